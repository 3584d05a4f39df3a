"""The innermost rule of a chain: it chooses the clients, and knows them by their partitions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from logging import WARNING
from typing import TypeVar

from flwr.app import Message, MetricRecord
from flwr.common import log
from flwr.serverapp import Grid

from fedbn_flwr.engines.base import capabilities
from fedbn_flwr.errors import MessageError, RunFailed
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.arrays import metrics_in
from fedbn_flwr.messages.bounds import Bounds
from fedbn_flwr.messages.gate import Reply, gate, one_line, partition_of, refused
from fedbn_flwr.messages.screening import odd_metrics, reason_of
from fedbn_flwr.norms.roles import Role

from ._rule import Round, Rule

Content = TypeVar("Content")


class Leaf(Rule):
    """A rule with no other inside it."""

    @dataclass
    class Memory(Rule.Memory):
        partitions: dict[int, int] = field(default_factory=dict)  # by node id, for nodes that have reported it

    memory: Memory
    weighted_by_key: str = protocol.NUM_EXAMPLES  # the metric that weights replies
    arrayrecord_key: str = "arrays"
    bounds: Bounds | None = None  # on the influence of one client
    min_train_nodes: int = 1  # usable replies that a round needs
    hidden: frozenset[Role] = frozenset()  # what a strategy that is not a rule does not see of the model
    asked: int = 0  # the number of clients that received the model in this round
    # The weight of each reply in the last mean, by node id and in the order of the sum.
    shares: Mapping[int, float] = {}
    used: Collection[int] = ()  # the nodes whose replies are in the last mean, of training or of evaluation

    def __init__(self) -> None:
        self.memory = self.Memory()
        self.left_out: list[str] = []  # this round's unusable replies: client and reason
        self.refused: list[Message] = []  # the same, as errors

    @property
    def leaf(self) -> Leaf:
        return self

    def weights(self, round: Round, replies: Sequence[Reply]) -> list[float]:
        return [reply.number(self.weighted_by_key) for reply in replies]

    def bounded(self, weights: list[float]) -> list[float]:
        """The weights, none of which is larger than the rule allows."""
        return weights

    def metrics(self, replies: Sequence[Reply]) -> MetricRecord | None:
        """The metrics of training, of all clients together."""
        raise NotImplementedError

    def compare(self, round: Round, found: Mapping[int, Reply]) -> Mapping[int, str]:
        """The reasons to refuse replies that show only beside those of the other clients, by node."""
        return {}

    def screen(
        self,
        what: str,
        replies: Iterable[Message],
        asked: int,
        read: Callable[[Message], Content],
        compare: Callable[[Mapping[int, Content]], Mapping[int, str]] = lambda found: {},
    ) -> list[Content]:
        """What `read` returns for each reply, in the order of partitions; a MessageError refuses one. See `admit`."""
        usable: dict[int, Content] = {}
        answered: dict[int, int | None] = {}
        problems: list[tuple[int, str]] = []  # not a dict: all errors for lost nodes have the SuperLink's node id
        messages = gate(replies)
        for reply in messages:
            node = reply.metadata.src_node_id
            if reply.has_error():
                problems.append((node, reason_of(reply)))
                continue
            answered[node] = partition_of(reply.content)
            try:
                usable[node] = read(reply)
            except MessageError as error:
                problems.append((node, str(error)))
        metrics = {node: MetricRecord() for node in usable}
        for reply in messages:
            if (node := reply.metadata.src_node_id) in usable:
                metrics[node] = next(iter(metrics_in(reply.content).values()), metrics[node])
        problems += {**odd_metrics(metrics), **compare(usable)}.items()
        left = self.admit(what, answered, problems, asked)
        reasons = dict(problems)
        self.refused = [
            refused(reply, reasons.get(node, "")) if reply.has_content() else reply
            for reply in messages
            if (node := reply.metadata.src_node_id) not in left
        ]
        self.used = left
        return [usable[node] for node in left]

    def admit(
        self, what: str, answered: Mapping[int, int | None], refused: Sequence[tuple[int, str]], asked: int
    ) -> list[int]:
        """The nodes of `answered` that are not in `refused`, in the order of partitions.

        `answered` maps a node to the partition that it reports, `refused` are pairs of node and reason. The log names
        the clients left out. RunFailed lists the reasons if fewer than `min_train_nodes` of the `asked` clients remain;
        with `asked` 0 no client is required.
        """
        refused = [*refused, *self._note_partitions(None if self.round is None else self.round.grid, answered)]
        reasons = sorted(f"{self._who(node)}: {reason}" for node, reason in refused)
        usable = list(answered.keys() - {node for node, _ in refused})
        if (silent := asked - len(usable) - len(refused)) > 0:
            reasons.append(f"{silent} of {asked} clients did not answer in time")
        self.left_out += reasons
        needed = max(1, min(self.min_train_nodes, asked)) if asked else 0
        if len(usable) < needed:
            listed = "".join(f"\n  - {one_line(reason)}" for reason in self.left_out) or " no reply"
            raise RunFailed(
                f"{what}: {len(usable)} of {asked} clients sent a usable reply, {needed} are needed:{listed}"
            )
        for reason in reasons:
            log(WARNING, "%s: left out %s", what, one_line(reason))
        return sorted(usable, key=self._position)

    def _note_partitions(self, grid: Grid | None, answered: Mapping[int, int | None]) -> list[tuple[int, str]]:
        """Note the partitions that nodes report; returns the nodes that report a wrong one, each with the reason."""
        known = self.memory.partitions
        found = {node: number for node, number in answered.items() if number not in (None, known.get(node))}
        wrong = capabilities(grid).partition_problems(found) if found and grid is not None else {}
        self.memory.partitions.update({node: number for node, number in found.items() if node not in wrong})
        return list(wrong.items())

    def _position(self, node: int) -> tuple[int, int, int]:
        """The sort key of a node: its partition; nodes that have not reported one follow, sorted by node id."""
        partition = self.memory.partitions.get(node)
        return (1, 0, node) if partition is None else (0, partition, node)

    def _who(self, node: int) -> str:
        partition = self.memory.partitions.get(node)
        return f"node {node}" if partition is None else f"client {partition} (node {node})"
