"""Federated averaging (McMahan et al. 2017, https://arxiv.org/abs/1602.05629), the base of the other rules.

Flower's own FedAvg with the same arguments, except where a number could not be trusted:

- The mean keeps dtypes: ten equal integers of 16 stay 16 (Flower returns 15.999999999999998).
- It is the same whatever the order of replies and the node ids, which are random in every run: clients report
  their partition, and sums run in its order. So does the choice of clients, where not all take part.
- A reply that does not fit what was sent, or is not finite, is left out and named; a round that too few
  clients answered is an error with their reasons, never an empty success.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from logging import WARNING
from typing import Any, TypedDict

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg

from fedbn_flwr import seeding
from fedbn_flwr.client.rules.fedbn import RETURN
from fedbn_flwr.engines.base import wait_for_nodes
from fedbn_flwr.errors import MessageError, RunFailed
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.aggregate import Arrays, fault, weighted_mean
from fedbn_flwr.messages.arrays import metrics_of, pack, record_of, unpack
from fedbn_flwr.messages.screening import (
    Reply,
    number_problem,
    one_line,
    only_metrics,
    partition_of,
    read_reply,
    refuse_records,
)
from fedbn_flwr.norms.roles import roles, split_by_role

from ._rule import Round, Rule, returned_roles

MeanOfMetrics = Callable[[list[RecordDict], str], MetricRecord]


class FedAvgOptions(TypedDict, total=False):
    """The arguments of `FedAvg`, for rules that pass theirs on."""

    fraction_train: float
    fraction_evaluate: float
    min_train_nodes: int
    min_evaluate_nodes: int
    min_available_nodes: int
    weighted_by_key: str
    arrayrecord_key: str
    configrecord_key: str
    train_metrics_aggr_fn: MeanOfMetrics | None
    evaluate_metrics_aggr_fn: MeanOfMetrics | None
    seed: int
    node_timeout: float


class FedAvg(Rule, FlowerFedAvg):
    """Flower's FedAvg with its arguments, and these:

    Parameters
    ----------
    seed : int (default: 0)
        Of the choice of clients, where not all take part.
    node_timeout : float (default: 600)
        Seconds to wait for enough nodes to connect.
    """

    @dataclass
    class Memory(Rule.Memory):
        partitions: dict[int, int] = field(default_factory=dict)  # by node id, as far as nodes have reported theirs

    memory: Memory
    shares: dict[int, float]

    def __init__(
        self,
        fraction_train: float = 1.0,
        fraction_evaluate: float = 1.0,
        min_train_nodes: int = 2,
        min_evaluate_nodes: int = 2,
        min_available_nodes: int = 2,
        weighted_by_key: str = protocol.NUM_EXAMPLES,
        arrayrecord_key: str = "arrays",
        configrecord_key: str = "config",
        train_metrics_aggr_fn: MeanOfMetrics | None = None,
        evaluate_metrics_aggr_fn: MeanOfMetrics | None = None,
        *,
        seed: int = 0,
        node_timeout: float = 600,
    ) -> None:
        super().__init__(
            fraction_train, fraction_evaluate, min_train_nodes, min_evaluate_nodes, min_available_nodes,
            weighted_by_key, arrayrecord_key, configrecord_key, train_metrics_aggr_fn, evaluate_metrics_aggr_fn,
        )  # fmt: skip
        self.seed = seed
        self.node_timeout = node_timeout
        self.memory = self.Memory()
        self.shares = {}
        self.round: Round | None = None  # the one that clients train in
        self.asked = 0  # clients that were sent its model
        self.left_out: list[str] = []  # whose replies could not be used, and why

    # --- sending ---

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        if self.fraction_train == 0.0:
            return []
        self.round = round = Round(server_round, self.num_rounds, arrays, config, grid)
        nodes = self._choose(round, self.fraction_train, self.min_train_nodes, "train")
        self.asked, self.left_out = len(nodes), []
        told = dict(self.instructions(round))
        if self.traits.returned and (back := returned_roles(self.traits, roles(arrays).values())):
            told[RETURN] = protocol.join(back)
        records = {name: pack(values) for name, values in self.records(round).items() if values}
        return self._messages(round, records, told, nodes, MessageType.TRAIN)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        if self.fraction_evaluate == 0.0:
            return []
        round = Round(server_round, self.num_rounds, arrays, config, grid)
        nodes = self._choose(round, self.fraction_evaluate, self.min_evaluate_nodes, "evaluate")
        return self._messages(round, {}, {}, nodes, MessageType.EVALUATE)

    def outgoing(self, arrays: ArrayRecord) -> ArrayRecord:
        """The part of the global model that clients are sent: all but the roles that stay on the client."""
        kept = self.traits.kept
        return record_of(split_by_role(arrays, roles(arrays), kept)[1]) if kept else arrays

    def expected(self, arrays: ArrayRecord) -> list[str]:
        """The keys that a client sends back."""
        if not self.traits.kept:
            return list(arrays)
        of = roles(arrays)
        absent = self.traits.kept - returned_roles(self.traits, of.values())
        return [key for key, role in of.items() if role not in absent]

    def _messages(
        self,
        round: Round,
        records: Mapping[str, ArrayRecord],
        told: Mapping[str, Any],
        nodes: Iterable[int],
        kind: str,
    ) -> list[Message]:
        # A new record: Flower's loop gives every round the same one.
        config = ConfigRecord({**round.config, **told, protocol.ROUND: round.number})
        arrays = {self.arrayrecord_key: self.outgoing(round.arrays), **records}
        content = RecordDict({**arrays, self.configrecord_key: config})
        return [Message(content, node, kind) for node in nodes]

    def _choose(self, round: Round, fraction: float, least: int, purpose: str) -> list[int]:
        """The nodes of this round: a function of the seed, the round and the partitions."""
        partitions = self.memory.partitions
        nodes = self._wait_for_nodes(round.grid, max(self.min_available_nodes, least))
        for node in sorted(partitions.keys() - set(nodes), key=self._position):
            log(WARNING, "round %d, %s: without %s, which is not connected", round.number, purpose, self._who(node))
        count = max(int(len(nodes) * fraction), least)
        if count < len(nodes):
            self._ask_for_partitions(round, [node for node in nodes if node not in partitions])
        nodes.sort(key=self._position)
        if count < len(nodes):
            random = np.random.default_rng(seeding.seed_for(self.seed, f"choose-{purpose}", round.number))
            chosen = sorted(random.choice(len(nodes), size=count, replace=False))
            nodes = [nodes[i] for i in chosen]
        return nodes

    def _wait_for_nodes(self, grid: Grid, needed: int) -> list[int]:
        hint = "start more SuperNodes, or ask for fewer by min_available_nodes, min_train_nodes and min_evaluate_nodes"
        nodes = list(grid.get_node_ids())
        return nodes if len(nodes) >= needed else wait_for_nodes(grid, needed, self.node_timeout, hint)

    def _ask_for_partitions(self, round: Round, nodes: Sequence[int]) -> None:
        """Node ids are random in every run; who is chosen must not be."""
        if not nodes:
            return
        content = RecordDict({self.configrecord_key: ConfigRecord(protocol.run_keys(round.config))})
        questions = [Message(content, node, protocol.PARTITION_QUERY) for node in nodes]
        for reply in round.grid.send_and_receive(questions, timeout=self.node_timeout):
            if reply.has_content():
                self._note_partition(reply)

    def _note_partition(self, reply: Message) -> None:
        if (partition := partition_of(reply.content)) is not None:
            self.memory.partitions[reply.metadata.src_node_id] = partition

    def _position(self, node: int) -> tuple[int, int, int]:
        """Sorts nodes by partition; nodes that never reported theirs follow by node id."""
        partition = self.memory.partitions.get(node)
        return (1, 0, node) if partition is None else (0, partition, node)

    def _who(self, node: int) -> str:
        partition = self.memory.partitions.get(node)
        return f"node {node}" if partition is None else f"client {partition} (node {node})"

    # --- receiving ---

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        self.shares = {}
        round, messages = self.round, list(replies)
        if round is None or self.fraction_train == 0.0:
            return None, None
        like, expected, names = unpack(round.arrays), self.expected(round.arrays), list(self.records(round))

        def problem(message: Message) -> str | None:
            if bad := number_problem(only_metrics(message.content), self.weighted_by_key):
                return bad
            reply = read_reply(message, self.arrayrecord_key, names)
            return fault(reply.arrays, like, expected) or self.problem(round, reply)

        messages = refuse_records(messages, names, like)
        usable = self.screen(f"round {server_round}", messages, self.asked, problem)
        found = [read_reply(message, self.arrayrecord_key, names) for message in usable]
        weights = self.weights(round, found)
        if not sum(weights) > 0:
            raise RunFailed(
                f"round {server_round}: the weights of all {len(weights)} clients ({self.weighted_by_key}) are zero"
            )
        self.shares = {reply.node: weight for reply, weight in zip(found, weights, strict=True)}
        model = pack(self.combine(round, found, weights))
        if list(model) != list(round.arrays):  # what did not travel stays as it is
            model = record_of({key: model.get(key, value) for key, value in round.arrays.items()})
        self.after_round(round, found, weights)
        return model, self._mean_metrics(usable, self.train_metrics_aggr_fn)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        def problem(message: Message) -> str | None:
            return number_problem(only_metrics(message.content), self.weighted_by_key)

        # A run does not end because an evaluation is missing: no reply is needed.
        usable = self.screen(f"round {server_round}, evaluation", replies, 0, problem)
        return self._mean_metrics(usable, self.evaluate_metrics_aggr_fn) if usable else None

    def weights(self, round: Round, replies: Sequence[Reply]) -> list[float]:
        """p_i, up to scale: the client's number of examples."""
        return [reply.number(self.weighted_by_key) for reply in replies]

    def combine(self, round: Round, replies: Sequence[Reply], weights: Sequence[float]) -> Arrays:
        """sum_i p_i w_i"""
        return weighted_mean((reply.arrays for reply in replies), weights)

    def screen(
        self, what: str, replies: Iterable[Message], asked: int, problem: Callable[[Message], str | None]
    ) -> list[Message]:
        """The replies in which `problem` finds nothing, in the order of partitions; see `admit`."""
        usable: dict[int, Message] = {}
        refused: list[tuple[int, str]] = []  # not by node: for lost nodes Flower replies in the name of the SuperLink
        for reply in replies:
            node = reply.metadata.src_node_id
            if reply.has_error():
                refused.append((node, reply.error.reason or f"error code {reply.error.code}"))
                continue
            self._note_partition(reply)
            try:
                reason = problem(reply)
            except MessageError as error:
                reason = str(error)
            if reason is None:
                usable[node] = reply
            else:
                refused.append((node, reason))
        return [usable[node] for node in self.admit(what, dict.fromkeys(usable), refused, asked)]

    def admit(
        self, what: str, answered: Mapping[int, int | None], refused: Sequence[tuple[int, str]], asked: int
    ) -> list[int]:
        """The nodes that answered (with the partition each reports) and are not refused, in the order of partitions.

        The log names the others. Where too few of `asked` clients are left, RunFailed says why; with `asked` 0 none
        are needed.
        """
        self.memory.partitions.update({node: number for node, number in answered.items() if number is not None})
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

    def _mean_metrics(self, replies: Sequence[Message], mean: MeanOfMetrics) -> MetricRecord:
        """The clients' mean metrics, of the keys that all of them sent; a partition's number has no mean."""
        records = [metrics_of(reply.content) for reply in replies]
        common = set.intersection(*(set(record) for record in records))
        common -= {protocol.PARTITION, protocol.NUM_EXAMPLES, protocol.BATCH_EXAMPLES} - {self.weighted_by_key}
        kept = [
            RecordDict({"metrics": MetricRecord({key: value for key, value in record.items() if key in common})})
            for record in records
        ]
        if not any(record[self.weighted_by_key] for record in records):
            return MetricRecord()  # a mean over nothing
        return mean(kept, self.weighted_by_key)
