"""A grid that reports how far a round is, for progress lines and bars."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

from flwr.app import Message, MessageType
from flwr.serverapp import Grid

from fedbn_flwr.messages import protocol

from .capabilities import GridAround

_COUNTED = {
    MessageType.TRAIN: "clients trained",
    MessageType.EVALUATE: "clients evaluated",
    protocol.PARTITION_QUERY: "clients ready",
    protocol.STATISTICS_QUERY: "clients' statistics",
}


class WatchedGrid(GridAround):
    """A grid that reports each reply when it arrives, and what strategies report."""

    def __init__(self, inner: Grid, watcher: Callable[[str, int, int], None]) -> None:
        super().__init__(inner)
        self._watcher = watcher  # called with what is counted, how many are done, and how many there are

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        messages = list(messages)
        if messages and (what := _COUNTED.get(messages[0].metadata.message_type)):
            done = itertools.count(1)
            self.report(what, 0, len(messages))
            self.observe(lambda _: self.report(what, next(done), len(messages)))
        return self.inner.send_and_receive(messages, timeout=timeout)

    def report(self, what: str, done: int, total: int) -> None:
        self._watcher(what, done, total)
