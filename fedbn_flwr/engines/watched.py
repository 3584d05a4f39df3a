"""A grid that reports every reply when it arrives, to show that a long round makes progress."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from flwr.app import Message, MessageType
from flwr.serverapp import Grid

from fedbn_flwr.messages import protocol

from .base import GridAround, ReplyObserver, capabilities

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
        self._observer: ReplyObserver | None = None

    def report(self, what: str, done: int, total: int) -> None:
        self._watcher(what, done, total)

    def observe(self, observer: ReplyObserver) -> None:
        self._observer = observer

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        messages = list(messages)
        observer, self._observer = self._observer, None
        if messages and (what := _COUNTED.get(messages[0].metadata.message_type)):  # not an exchange of FedTAN
            observer = _Counting(self._watcher, what, len(messages), observer)
        if observer is not None:
            capabilities(self.inner).observe(observer)
        return self.inner.send_and_receive(messages, timeout=timeout)


class _Counting:
    """Counts replies, and passes them on to the observer of the strategy, if there is one."""

    def __init__(self, watcher: Report, what: str, total: int, inner: ReplyObserver | None) -> None:
        self._watcher, self._what, self._total, self._inner = watcher, what, total, inner
        self._done = 0
        watcher(what, 0, total)

    def replied(self, reply: Message) -> None:
        self._done += 1
        self._watcher(self._what, self._done, self._total)
        if self._inner is not None:
            self._inner.replied(reply)

    def given_up(self) -> frozenset[int]:
        return frozenset() if self._inner is None else self._inner.given_up()
