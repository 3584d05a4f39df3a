"""A grid that reports the progress within a round: each reply when it arrives, and what strategies report."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

from flwr.app import Message, MessageType
from flwr.serverapp import Grid

from fedbn_flwr.engines.base import GridAround
from fedbn_flwr.messages import protocol

Report = Callable[[str, int, int], object]  # what is counted, how many are done, of how many

_COUNTED = {
    MessageType.TRAIN: "clients trained",
    MessageType.EVALUATE: "clients evaluated",
    protocol.PARTITION_QUERY: "clients ready",
    protocol.STATISTICS_QUERY: "clients' statistics",
}


class WatchedGrid(GridAround):
    def __init__(self, inner: Grid, watcher: Report) -> None:
        super().__init__(inner)
        self._watcher = watcher

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        messages = list(messages)
        if messages and (what := _COUNTED.get(messages[0].metadata.message_type)):
            done = itertools.count(1)
            self.report(what, 0, len(messages))
            self.observe(lambda _: self.report(what, next(done), len(messages)))
        return self.inner.send_and_receive(messages, timeout=timeout)

    def report(self, what: str, done: int, total: int) -> None:
        self._watcher(what, done, total)
