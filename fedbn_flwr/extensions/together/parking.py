"""A pool that trains the clients of a round together in this process.

Each client's message is handled in its own thread up to its training, one thread at a time. Then the loaded rounds are
trained together, and each thread continues to its reply. So clients differ from separate ones only
in their training, and may share the model, as they do in an experiment.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from flwr.app import Message

from fedbn_flwr.client.layerwise import Session
from fedbn_flwr.client.training import TRAINER, Trained, Training, train
from fedbn_flwr.engines.base import OnReply
from fedbn_flwr.engines.pool import Nodes, Pool

from .groups import Row, finished, row_of, train_rows

Park = Callable[[Row], Row]


class TogetherPool(Pool):
    """Serves the nodes in this process, `most` of them at a time."""

    def __init__(self, nodes: Nodes, on_reply: OnReply, most: int) -> None:
        super().__init__(nodes, on_reply)
        self.most = most

    def put(self, messages: Sequence[Message]) -> None:
        for start in range(0, len(messages), self.most):
            some = messages[start : start + self.most]
            sessions = [Session[Row, Row](functools.partial(self._answer, message)) for message in some]
            parked = [(session, row) for session in sessions if (row := session.advance()) is not None]
            train_rows([row for _, row in parked])
            for session, row in parked:
                session.advance(row)
            for session in sessions:
                self.on_reply(session.result.result())

    def _answer(self, message: Message, park: Park) -> Message:
        """The reply of a client, computed in its thread."""

        def trainer(training: Training) -> Trained:
            if (row := row_of(training)) is None:
                return train(training)
            park(row)
            return finished(row)

        TRAINER.set(trainer)  # of this thread until its next message
        return self.nodes.answer(message, self.nodes.contexts[message.metadata.dst_node_id])
