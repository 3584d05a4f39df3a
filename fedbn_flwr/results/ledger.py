"""The ledger counts messages and bytes of arrays in each direction.

Bytes are the number of elements times their size; names, headers and metrics are not counted, as in the papers. Of
replies those are counted that have passed the gate.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedbn_flwr.engines.base import GridAround
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.arrays import size_in
from fedbn_flwr.messages.gate import gate

if TYPE_CHECKING:  # the exchange's modules are imported when a strategy uses them
    from fedbn_flwr.exchange.codec import Agreement
    from fedbn_flwr.exchange.round import Answers
    from fedbn_flwr.messages.aggregate import Arrays


@dataclass
class Traffic:
    """Counts of one round, or their sums over several."""

    communication_rounds: int = 0  # for training; see the glossary
    messages_down: int = 0
    messages_up: int = 0
    bytes_down: int = 0
    bytes_up: int = 0
    # The figure in the papers' tables: one broadcast (a message to all clients, counted once), plus all uploads.
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
    """A grid that passes messages to another one and counts them."""

    def __init__(self, grid: Grid) -> None:
        super().__init__(grid)
        self._now = Traffic()
        self._lock = threading.Lock()

    def take(self) -> Traffic:
        """The counts since the last call."""
        with self._lock:
            taken, self._now = self._now, Traffic()
        return taken

    def exchange(self, nodes: Sequence[int], agreement: Agreement, timeout: float) -> Answers | None:
        answers = super().exchange(nodes, agreement, timeout)
        if answers is not None:
            up = [{} if isinstance(answer, str) else answer.tensors for answer in answers.values()]
            self.count_exchange(up, [agreement.tensors] * len(nodes))
        return answers

    def count_exchange(self, up: Sequence[Arrays], down: Sequence[Arrays]) -> None:
        """Count an exchange of FedTAN that bypassed the grid."""
        traffic = Traffic(communication_rounds=1)
        _count_down(traffic, map(_size_of_arrays, down))
        _count_up(traffic, map(_size_of_arrays, up))
        self._add(traffic)

    def _note_down(self, messages: list[Message]) -> None:
        training = [message.content for message in messages if _trains(message)]
        traffic = Traffic(communication_rounds=bool(training))
        _count_down(traffic, map(size_in, training))
        _count_others(traffic, messages)
        self._add(traffic)

    def _note_up(self, replies: list[Message]) -> None:
        traffic = Traffic()
        _count_up(traffic, [size_in(_content(reply)) for reply in replies if _trains(reply)])
        _count_others(traffic, replies)
        self._add(traffic)

    def _add(self, traffic: Traffic) -> None:
        with self._lock:
            self._now.add(traffic)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        messages = list(messages)  # Flower's HttpGrid iterates over them twice
        if not messages:
            return []
        self._note_down(messages)
        replies = gate(self.inner.send_and_receive(messages, timeout=timeout))
        self._note_up(replies)
        return replies

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        self._note_down(messages)
        return self.inner.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        replies = gate(self.inner.pull_messages(message_ids))
        self._note_up(replies)
        return replies


Size = tuple[int, int]  # elements and bytes of the arrays of a message


def _size_of_arrays(arrays: Arrays) -> Size:
    return sum(array.size for array in arrays.values()), sum(array.nbytes for array in arrays.values())


def _count_down(traffic: Traffic, sizes: Iterable[Size]) -> None:
    largest = 0
    for count, size in sizes:
        largest = max(largest, size)
        traffic.messages_down += 1
        traffic.bytes_down += size
        traffic.elements_down_per_client = max(traffic.elements_down_per_client, count)
    traffic.broadcast_bytes += largest


def _count_up(traffic: Traffic, sizes: Iterable[Size]) -> None:
    for count, size in sizes:
        traffic.messages_up += 1
        traffic.bytes_up += size
        traffic.broadcast_bytes += size
        traffic.elements_up_per_client = max(traffic.elements_up_per_client, count)


def _count_others(traffic: Traffic, messages: Iterable[Message]) -> None:
    for message in messages:
        if not _trains(message):
            traffic.other_messages += 1
            traffic.other_bytes += size_in(_content(message))[1]


def _content(message: Message) -> RecordDict:
    return message.content if message.has_content() else RecordDict()


def _trains(message: Message) -> bool:
    kind = message.metadata.message_type
    return not kind.startswith("evaluate") and kind not in protocol.QUERIES
