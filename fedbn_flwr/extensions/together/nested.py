"""A pool that trains the clients of a round together in this process.

A client's message is handled up to its training, and there the next client's message is handled in the same way. The
last one trains the loaded rounds of all; then each client continues to its reply, the last one first. So clients differ
from separate ones only in their training, and may share the model, as they do in an experiment.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from flwr.app import Message

from fedbn_flwr.client.training import TRAINER, Trained, Training, train
from fedbn_flwr.engines.base import OnReply
from fedbn_flwr.engines.pool import Nodes, Pool

from .groups import Row, finished, row_of, train_rows

_MOST = 100  # clients: each one's calls are inside those of the others
_CALLS = 50  # of a client


class TogetherPool(Pool):
    """Serves the nodes in this process, `most` of them at a time."""

    def __init__(self, nodes: Nodes, on_reply: OnReply, most: int) -> None:
        super().__init__(nodes, on_reply)
        self.most = min(most, _MOST)

    def put(self, messages: Sequence[Message]) -> None:
        for start in range(0, len(messages), self.most):
            for reply in self._answers(messages[start : start + self.most]):
                self.on_reply(reply)

    def _answers(self, messages: Sequence[Message]) -> Sequence[Message]:
        waiting, rows = enumerate(messages), list[Row]()
        replies: dict[int, Message] = {}

        def answer() -> None:
            for place, message in waiting:
                replies[place] = self.nodes.answer(message, self.nodes.contexts[message.metadata.dst_node_id])

        def trainer(training: Training) -> Trained:
            if (row := row_of(training)) is None:
                return train(training)
            rows.append(row)
            answer()
            train_rows(rows)
            rows.clear()  # they are trained when the other clients continue
            return finished(row)

        calls, before = sys.getrecursionlimit(), TRAINER.set(trainer)
        sys.setrecursionlimit(calls + _CALLS * len(messages))
        try:
            answer()
        finally:
            sys.setrecursionlimit(calls)
            TRAINER.reset(before)
        return [replies[place] for place in sorted(replies)]
