"""The grid of a run, whose ledger counts messages and bytes of arrays in each direction.

Bytes are the number of elements times their size; names, headers and metrics are not counted, as in the papers. Only
replies that have passed the gate are counted.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedbn_flwr.engines.capabilities import GridAround
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.arrays import arrays_in, config_of, size_of, unpack
from fedbn_flwr.messages.gate import Gated, gate
from fedbn_flwr.results.folder.traffic import Traffic

if TYPE_CHECKING:
    from fedbn_flwr.internals import NodeInfo
    from fedbn_flwr.messages.aggregate import Arrays


class MeteredGrid(GridAround):
    """A grid that passes messages to another one, checks the replies at the gate and counts both."""

    hidden: Collection[int] = ()  # nodes that strategies do not see

    def __init__(self, grid: Grid) -> None:
        super().__init__(grid)
        self._now = Traffic()
        self._lock = threading.Lock()

    def take(self) -> Traffic:
        """The counts since the last call."""
        with self._lock:
            taken, self._now = self._now, Traffic()
        return taken

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
