"""The grid of a run, whose ledger counts messages and bytes of arrays in each direction.

Bytes are the number of elements times their size; names, headers and metrics are not counted, as in the papers. Only
replies that have passed the gate are counted. The grid also reports how far a round is, for progress lines and bars.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from flwr.app import Message, MessageType, RecordDict
from flwr.serverapp import Grid

from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.arrays import arrays_in, config_of, size_of, unpack
from fedbn_flwr.messages.gate import Gated, gate

from .capabilities import GridAround

if TYPE_CHECKING:  # the exchange's modules are imported when a strategy uses them
    from flwr.proto.node_pb2 import NodeInfo

    from fedbn_flwr.exchange.carriers import Answers
    from fedbn_flwr.exchange.codec import Agreement
    from fedbn_flwr.messages.aggregate import Arrays

_REPORTED = {
    MessageType.TRAIN: "clients trained",
    MessageType.EVALUATE: "clients evaluated",
    protocol.PARTITION_QUERY: "clients ready",
    protocol.STATISTICS_QUERY: "clients' statistics",
}


@dataclass
class Traffic:
    """Counts of one round, or their sums over several."""

    communication_rounds: int = 0  # for training; see the glossary
    messages_down: int = 0
    messages_up: int = 0
    bytes_down: int = 0
    bytes_up: int = 0
    # The traffic in the papers' tables: one broadcast (a message to all clients, counted once), plus all uploads.
    broadcast_bytes: int = 0
    # Largest message to and from one client, in elements of its arrays.
    elements_down_per_client: int = 0
    elements_up_per_client: int = 0
    # Evaluation and queries, which no paper includes.
    other_messages: int = 0
    other_bytes: int = 0

    def add(self, more: Traffic) -> None:
        for field in fields(self):
            combine = max if field.name.startswith("elements") else int.__add__
            setattr(self, field.name, combine(getattr(self, field.name), getattr(more, field.name)))


class MeteredGrid(GridAround):
    """A grid that passes messages to another one, checks the replies at the gate and counts both.

    `watcher` is called with what is reported, how many are done, and how many there are: for each reply when it
    arrives, and for what strategies report.
    """

    hidden: Collection[int] = ()  # nodes that strategies do not see

    def __init__(self, grid: Grid, watcher: Callable[[str, int, int], object] = lambda what, done, total: None) -> None:
        super().__init__(grid)
        self._watcher, self._now = watcher, Traffic()
        self._lock = threading.Lock()

    def take(self) -> Traffic:
        """The counts since the last call."""
        with self._lock:
            taken, self._now = self._now, Traffic()
        return taken

    def continue_parked(self, nodes: Sequence[int], agreement: Agreement, timeout: float) -> Answers | None:
        answers = super().continue_parked(nodes, agreement, timeout)
        if answers is not None:
            up = [{} if isinstance(answer, str) else answer.tensors for answer in answers.values()]
            self.count_exchange(up, [agreement.tensors] * len(nodes))
        return answers

    def report(self, what: str, done: int, total: int) -> None:
        self._watcher(what, done, total)

    def count_exchange(self, up: Sequence[Arrays], down: Sequence[Arrays]) -> None:
        """Count an exchange of FedTAN that bypassed the grid."""
        sizes = list(map(size_of, down))
        self._count(int(any(count for count, _ in sizes)), sizes, list(map(size_of, up)))

    def _count(
        self, rounds: int, down: Sequence[Size] = (), up: Sequence[Size] = (), others: Sequence[Size] = ()
    ) -> None:
        bytes_down, bytes_up = [size for _, size in down], [size for _, size in up]
        traffic = Traffic(
            communication_rounds=rounds,
            messages_down=len(down),
            messages_up=len(up),
            bytes_down=sum(bytes_down),
            bytes_up=sum(bytes_up),
            broadcast_bytes=max(bytes_down, default=0) + sum(bytes_up),
            elements_down_per_client=max((count for count, _ in down), default=0),
            elements_up_per_client=max((count for count, _ in up), default=0),
            other_messages=len(others),
            other_bytes=sum(size for _, size in others),
        )
        with self._lock:
            self._now.add(traffic)

    def _note(self, messages: Sequence[Message], direction: str) -> None:
        sizes, rounds = {True: list[Size](), False: list[Size]()}, 0
        for message in messages:
            kind, content = message.metadata.message_type, message.content if message.has_content() else RecordDict()
            trains = not kind.startswith("evaluate") and kind not in protocol.QUERIES
            sizes[trains].append(size_of(*map(unpack, arrays_in(content).values())))
            # A message that brings an agreement without tensors is the end of the exchange before it.
            is_end = protocol.EXCHANGE_STEP in config_of(content) and not sizes[trains][-1][0]
            rounds |= direction == "down" and trains and not is_end
        self._count(rounds, others=sizes[False], **{direction: sizes[True]})

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Gated:
        sent = list(messages)  # Flower's HttpGrid iterates over them twice
        self._note(sent, "down")
        if sent and (what := _REPORTED.get(sent[0].metadata.message_type)):
            done = itertools.count(1)
            self.report(what, 0, len(sent))
            self.observe(lambda _: self.report(what, next(done), len(sent)))
        replies = gate(self.inner.send_and_receive(sent, timeout=timeout) if sent else ())
        self._note(replies, "up")
        return replies

    def get_node_ids(self) -> Iterable[int]:
        return [node for node in super().get_node_ids() if node not in self.hidden]

    def get_nodes(self) -> Iterable[NodeInfo]:
        return [node for node in super().get_nodes() if node.node_id not in self.hidden]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        sent = list(messages)
        self._note(sent, "down")
        return self.inner.push_messages(sent)

    def pull_messages(self, message_ids: Iterable[str]) -> Gated:
        replies = gate(self.inner.pull_messages(message_ids))
        self._note(replies, "up")
        return replies


Size = tuple[int, int]  # elements and bytes of the arrays of a message
