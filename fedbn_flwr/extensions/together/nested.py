"""A pool that trains the clients of a round together in this process.

A client's message is handled up to its training, and there the next client's message is handled in the same way. The
last one trains the loaded rounds of all; then each client continues to its reply, the last one first. So clients differ
from separate ones only in their training: mods and methods that a subclass overrides work, and clients may share the
model, as they do in an experiment. Nested calls take no time; a thread for each client would take about 0.3 ms.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import cast

from flwr.app import Message

from fedbn_flwr.client.training import TRAINER, Trained, Training, train
from fedbn_flwr.engines.capabilities import OnReply
from fedbn_flwr.engines.pool import Nodes, Pool
from fedbn_flwr.exchange.step import LayerwiseStep

from .groups import Row, network_for, row_of, train_rows, train_rows_exchanging
from .joined import Joined, joined_of, not_joined, take_first_steps
from .lanes import Lane, lane_of, no_lane, train_lanes
from .waiting import AskAll, Waiting

_MOST = 100  # clients at a time, since their calls are nested
_CALLS = 50  # nested calls for each client, at most


class TogetherPool(Pool):
    """Serves the nodes in this process, `most` of them at a time."""

    def __init__(self, nodes: Nodes, on_reply: OnReply, most: int) -> None:
        super().__init__(nodes, on_reply)
        self._most = min(most, _MOST)

    def put(self, messages: Sequence[Message]) -> None:
        for some in self.at_once(messages):
            for reply in answer_together(self.nodes, some, train_waiting):
                self.on_reply(reply)

    def at_once(self, messages: Sequence[Message]) -> Iterator[Sequence[Message]]:
        """The messages, as many at a time as are answered together."""
        for start in range(0, len(messages), self._most):
            yield messages[start : start + self._most]


def answer_together(
    nodes: Nodes, messages: Sequence[Message], train_all: Callable[[Sequence[Waiting]], object]
) -> Sequence[Message]:
    """The replies, in any order. `train_all` trains the rounds of all messages as soon as they are loaded."""
    answers = _Answers(nodes, messages, train_all)
    calls, before = _CALLS * len(messages), TRAINER.set(answers.train)
    sys.setrecursionlimit(sys.getrecursionlimit() + calls)
    try:
        answers.answer_rest()
    finally:
        sys.setrecursionlimit(sys.getrecursionlimit() - calls)  # parked rounds may have raised it too
        TRAINER.reset(before)
    return answers.replies


class _Answers:
    """Answers messages in nested calls: each message is handled where the client before it would train."""

    def __init__(
        self, nodes: Nodes, messages: Sequence[Message], train_all: Callable[[Sequence[Waiting]], object]
    ) -> None:
        self._nodes, self._rest, self._train_all = nodes, iter(messages), train_all
        self._waiting: list[Waiting] = []
        self.replies: list[Message] = []

    def answer_rest(self) -> None:
        """Answer the messages that no call has begun yet."""
        for message in self._rest:
            self.replies.append(self._nodes.answer(message))

    def train(self, training: Training) -> Trained:
        """Train this round, as a `Trainer`: the rounds of the other messages are loaded first."""
        if isinstance(own := loaded(training), str):
            return train(training)
        self._waiting.append(own)
        self.answer_rest()
        if self._waiting:  # so this client is the last one
            try:
                self._train_all(self._waiting)
            finally:
                self._waiting.clear()
        return own.finished()


def has_lanes(training: Training) -> bool:
    """Whether clients with any network train at once, each on a stream of its own."""
    return training.device.type == "cuda"


def loaded(training: Training) -> Waiting | str:
    """The round, to be trained along with others, or why its client must train alone."""
    if not isinstance(found := row_of(training), str):
        return found
    if isinstance(training.first_step, LayerwiseStep):  # of a network that could be a row, the batches are loaded
        return joined_of(training) if isinstance(network_for(training), str) else found
    return lane_of(training) if has_lanes(training) else found


def train_waiting(waiting: Sequence[Waiting]) -> None:
    """Train these rounds, as far as they can train along with others."""
    train_rows([each for each in waiting if isinstance(each, Row)])
    train_lanes([each for each in waiting if isinstance(each, Lane)])


def train_exchanging(waiting: Sequence[Waiting], ask: AskAll) -> None:
    """Train rounds whose first steps exchange, all at once; `ask` does an exchange."""
    if rows := [each for each in waiting if isinstance(each, Row)]:
        train_rows_exchanging(rows, ask)
        return
    rounds = cast(Sequence[Joined], waiting)
    take_first_steps(rounds, ask)
    if has_lanes(rounds[0].training):
        for each in rounds:
            each.restore()
            each.rest = lane if isinstance(lane := lane_of(each.training), Lane) else None
        train_lanes([each.rest for each in rounds if isinstance(each.rest, Lane)])


def problem(training: Training) -> str | None:
    """Why this client must train alone, as far as it shows before its batches are loaded, or None."""
    if not isinstance(network := network_for(training), str):
        return None
    if not isinstance(training.first_step, LayerwiseStep):
        return no_lane(training) if has_lanes(training) else network
    if (alone := not_joined(training)) is not None or has_lanes(training):
        return alone
    return f"{network}; only their first steps are computed at once"
