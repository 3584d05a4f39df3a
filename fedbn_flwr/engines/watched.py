"""A grid that reports every reply when it arrives, to show that a long round makes progress."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

from flwr.app import Message, MessageType
from flwr.serverapp import Grid

from fedbn_flwr.messages import protocol

from .base import GridAround

Report = Callable[[str, int, int], None]  # what is counted, how many are done, of how many

_COUNTED = {
    MessageType.TRAIN: "clients trained",
    MessageType.EVALUATE: "clients evaluated",
    protocol.PARTITION_QUERY: "clients ready",
    protocol.STATISTICS_QUERY: "clients' statistics",
    protocol.PERSONAL_QUERY: "personal models",
}


class WatchedGrid(GridAround):
    """A grid that reports to `watcher` the replies to its messages, and what strategies report."""

    def __init__(self, inner: Grid, watcher: Report) -> None:
        super().__init__(inner)
        self._watcher = watcher

    def report(self, what: str, done: int, total: int) -> None:
        self._watcher(what, done, total)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        messages = list(messages)
        if messages and (what := _COUNTED.get(messages[0].metadata.message_type)):  # not an exchange of FedTAN
            done = itertools.count()

            def count(_: Message | None = None) -> None:
                self._watcher(what, next(done), len(messages))

            count()
            self.observe(count)
        return super().send_and_receive(messages, timeout=timeout)
