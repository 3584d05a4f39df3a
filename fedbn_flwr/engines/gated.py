"""A grid whose replies have passed the gate (`fedbn_flwr.messages.gate`), and whose nodes keep their partitions."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from flwr.app import Message, MessageType
from flwr.serverapp import Grid

from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.gate import Gated, gate, partition_of, refused

from .base import GridAround

Report = Callable[[str, int, int], object]  # what is counted, how many are done, of how many

_COUNTED = {
    MessageType.TRAIN: "clients trained",
    MessageType.EVALUATE: "clients evaluated",
    protocol.PARTITION_QUERY: "clients ready",
    protocol.STATISTICS_QUERY: "clients' statistics",
}


class GatedGrid(GridAround):
    """A grid that replaces replies that may not pass by errors with the reason.

    A node keeps the partition that it first reports, as long as it is connected. If two nodes report the same partition
    at first, neither is known to be right, and both pass.

    Parameters
    ----------
    clients
        The number of partitions; None: unknown.
    watcher
        Gets the progress within a round: each reply when it arrives, and what strategies report.
    """

    def __init__(self, inner: Grid, clients: int | None = None, watcher: Report | None = None) -> None:
        super().__init__(inner)
        self._clients, self._watcher = clients, watcher
        self._partitions: dict[int, int] = {}  # by node
        self._holders: dict[int, int] = {}  # the inverse

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        messages = list(messages)
        if self._watcher and messages and (what := _COUNTED.get(messages[0].metadata.message_type)):
            done = itertools.count(1)
            self.report(what, 0, len(messages))
            self.observe(lambda _: self.report(what, next(done), len(messages)))
        return self._passed(self.inner.send_and_receive(messages, timeout=timeout))

    def report(self, what: str, done: int, total: int) -> None:
        if self._watcher:
            self._watcher(what, done, total)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return self._passed(self.inner.pull_messages(message_ids))

    def _passed(self, replies: Iterable[Message]) -> Gated:
        found = list(replies)
        passed = gate(found)
        reported = {
            reply.metadata.src_node_id: partition
            for reply in found  # refused ones too, so that their clients have names
            if reply.has_content() and (partition := partition_of(reply.content)) is not None
        }
        reasons = self.partition_problems(reported) | {
            after.metadata.src_node_id: after.error.reason
            for before, after in zip(found, passed, strict=True)
            if before.has_content() and after.has_error()
        }
        return Gated(
            reply if reason is None else refused(reply, self._named(reply.metadata.src_node_id, reason))
            for reply in passed
            for reason in [reasons.get(reply.metadata.src_node_id)]
        )

    def _named(self, node: int, reason: str) -> str:
        """The reason with the number of the client, as the errors that clients send have it."""
        return f"client {self._partitions[node]}: {reason}" if node in self._partitions else reason

    def partition_problems(self, reported: Mapping[int, int]) -> dict[int, str]:
        found: dict[int, str] = {}
        times = Counter(reported.values())
        for node, partition in reported.items():
            if self._partitions.get(node) == partition:
                continue
            holder = self._holders.get(partition)
            if self._clients is not None and partition >= self._clients:
                found[node] = f"its partition-id is {partition}, expected 0 to {self._clients - 1}"
            elif node in self._partitions:
                found[node] = f"its partition-id is {partition}, and it reported {self._partitions[node]} before"
            elif holder is not None and holder in self.inner.get_node_ids():
                found[node] = f"its partition-id is {partition}, which node {holder} has"
            elif times[partition] == 1:
                self._partitions[node], self._holders[partition] = partition, node
        return found
