"""Federated averaging (McMahan et al. 2017, https://arxiv.org/abs/1602.05629), the base of the other rules.

Flower's own FedAvg with the same arguments, except where a number could not be trusted:

- The mean keeps dtypes: ten equal integers of 16 stay 16 (Flower returns 15.999999999999998).
- It is the same whatever the order of replies and the node ids, which are random in every run: clients report
  their partition, and sums run in its order. So does the choice of clients, where not all take part.
- A reply that does not fit what was sent, or is not finite, is left out and named; a round that too few
  clients answered is an error with their reasons, never an empty success.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from logging import WARNING
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
from flwr.serverapp.strategy import Result

from fedbn_flwr import seeding
from fedbn_flwr.errors import RunFailed
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.aggregate import Arrays, fault, weighted_mean
from fedbn_flwr.messages.arrays import arrays_in, metrics_in, metrics_of, pack, record_of, unpack

from ._memory import numbers
from ._wrapper import check, prepare


class FedAvg(FlowerFedAvg):
    """Flower's FedAvg with its arguments, and these:

    Parameters
    ----------
    seed : int (default: 0)
        Of the choice of clients, where not all take part.
    node_timeout : float (default: 600)
        Seconds to wait for enough nodes to connect.
    """

    def __init__(self, *args: Any, seed: int = 0, node_timeout: float = 600, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seed = seed
        self.node_timeout = node_timeout
        self.shares: dict[int, float] = {}  # whose replies made the last mean, in order, and their weights
        self._partitions: dict[int, int] = {}  # node id -> partition, as far as nodes have told
        self._global: ArrayRecord | None = None  # the model of this round, and the part that was sent
        self._sent: ArrayRecord | None = None
        self._asked = 0
        self._left_out: list[str] = []  # whose replies of this round were of no use, and why
        self._run: dict[str, Any] = {}  # which run it is, and so which model clients build
        self._unpacked: tuple[ArrayRecord | None, Arrays] = (None, {})

    # --- sending ---

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        if self.fraction_train == 0.0:
            return []
        self._left_out = []
        self._run = {key: config[key] for key in protocol.OF_RUN if key in config}
        nodes = self._choose(grid, server_round, self.fraction_train, self.min_train_nodes, "train")
        self._global, self._sent, self._asked = arrays, self.outgoing(arrays), len(nodes)
        return self._messages(server_round, self._sent, config, nodes, MessageType.TRAIN)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        if self.fraction_evaluate == 0.0:
            return []
        nodes = self._choose(grid, server_round, self.fraction_evaluate, self.min_evaluate_nodes, "evaluate")
        return self._messages(server_round, self.outgoing(arrays), config, nodes, MessageType.EVALUATE)

    def outgoing(self, arrays: ArrayRecord) -> ArrayRecord:
        """The part of the global model that clients are sent: all of it, unless a rule keeps some at home."""
        return arrays

    def expected(self) -> list[str]:
        """The keys that a client sends back: those it was sent, unless a rule asks for more."""
        return [] if self._sent is None else list(self._sent)

    def _messages(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, nodes: Iterable[int], kind: str
    ) -> list[Message]:
        config[protocol.ROUND] = server_round
        content = RecordDict({self.arrayrecord_key: arrays, self.configrecord_key: config})
        return [Message(content, node, kind) for node in nodes]

    def _choose(self, grid: Grid, server_round: int, fraction: float, least: int, purpose: str) -> list[int]:
        """The nodes of this round: a function of the seed, the round and the partitions."""
        needed = max(self.min_available_nodes, least)
        nodes = self._wait_for_nodes(grid, needed)
        for node in sorted(self._partitions.keys() - set(nodes), key=self._position):
            log(WARNING, "round %d, %s: without %s, which is not connected", server_round, purpose, self._who(node))
        count = max(int(len(nodes) * fraction), least)
        if count < len(nodes):
            self._ask_for_partitions(grid, [node for node in nodes if node not in self._partitions])
        nodes.sort(key=self._position)
        if count < len(nodes):
            random = np.random.default_rng(seeding.seed_for(self.seed, f"choose-{purpose}", server_round))
            chosen = sorted(random.choice(len(nodes), size=count, replace=False))
            nodes = [nodes[i] for i in chosen]
        return nodes

    def _wait_for_nodes(self, grid: Grid, needed: int) -> list[int]:
        deadline = time.monotonic() + self.node_timeout
        told = 0.0
        while len(nodes := list(grid.get_node_ids())) < needed:
            now = time.monotonic()
            if now > deadline:
                raise RunFailed(
                    f"{len(nodes)} of {needed} nodes connected within {self.node_timeout:g} s. Start more SuperNodes, "
                    "or ask for fewer by min_available_nodes, min_train_nodes and min_evaluate_nodes"
                )
            if now - told > 10:
                log(
                    WARNING,
                    "Waiting for nodes: %d of %d are connected, at most %.0f s more",
                    len(nodes),
                    needed,
                    deadline - now,
                )
                told = now
            time.sleep(0.2)
        return nodes

    def _ask_for_partitions(self, grid: Grid, nodes: Sequence[int]) -> None:
        """Node ids are random in every run; who is chosen must not be."""
        if not nodes:
            return
        content = RecordDict({self.configrecord_key: ConfigRecord(self._run)})
        questions = [Message(content, node, protocol.PARTITION_QUERY) for node in nodes]
        for reply in grid.send_and_receive(questions, timeout=self.node_timeout):
            if reply.has_content():
                self._note_partition(reply)

    def _note_partition(self, reply: Message) -> None:
        for metrics in metrics_in(reply.content).values():
            partition = metrics.get(protocol.PARTITION)
            if isinstance(partition, int):
                self._partitions[reply.metadata.src_node_id] = partition

    def _position(self, node: int) -> tuple[int, int, int]:
        """Sorts nodes by partition; those that never told theirs follow by node id."""
        partition = self._partitions.get(node)
        return (1, 0, node) if partition is None else (0, partition, node)

    def _who(self, node: int) -> str:
        partition = self._partitions.get(node)
        return f"node {node}" if partition is None else f"client {partition} (node {node})"

    # --- receiving ---

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        self.shares = {}
        usable = self._usable(server_round, list(replies), with_arrays=True)
        if not usable:
            return None, None
        contents = [reply.content for reply in usable]
        weights = self.weights(server_round, contents)
        if not sum(weights) > 0:
            raise RunFailed(
                f"round {server_round}: the weights of all {len(weights)} clients ({self.weighted_by_key}) are zero"
            )
        self.shares = {reply.metadata.src_node_id: weight for reply, weight in zip(usable, weights, strict=True)}
        mean = pack(weighted_mean((unpack(self._arrays(content)) for content in contents), weights))
        if self._global is not None and list(mean) != list(self._global):  # what did not travel stays as it is
            mean = record_of({key: mean.get(key, value) for key, value in self._global.items()})
        return mean, self._mean_metrics(contents, self.train_metrics_aggr_fn)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        usable = self._usable(server_round, list(replies), with_arrays=False)
        if not usable:
            return None
        return self._mean_metrics([reply.content for reply in usable], self.evaluate_metrics_aggr_fn)

    def weights(self, server_round: int, contents: Sequence[RecordDict]) -> list[float]:
        """Each reply's weight in the mean, up to scale: p_i, the client's number of examples."""
        return [_weight(content, self.weighted_by_key) for content in contents]

    def _usable(self, server_round: int, replies: list[Message], *, with_arrays: bool) -> list[Message]:
        """The replies that can be aggregated, in the order of their partitions."""
        what = f"round {server_round}" if with_arrays else f"round {server_round}, evaluation"
        asked = self._asked if with_arrays else 0  # a run does not end for want of an evaluation
        return self.screen(what, replies, asked, lambda content: self._problem(content, with_arrays))

    def screen(
        self, what: str, replies: Iterable[Message], asked: int, problem: Callable[[RecordDict], str | None]
    ) -> list[Message]:
        """The replies in which `problem` finds nothing, in the order of partitions; the others are named in the log.

        Where too few of `asked` clients are left, RunFailed says why; with `asked` 0 none are needed.
        """
        usable, reasons = [], []
        replies = list(replies)
        for reply in replies:
            node = reply.metadata.src_node_id
            if reply.has_error():
                reasons.append(f"{self._who(node)}: {reply.error.reason or f'error code {reply.error.code}'}")
                continue
            self._note_partition(reply)
            if (reason := problem(reply.content)) is None:
                usable.append(reply)
            else:
                reasons.append(f"{self._who(node)}: {reason}")
        reasons.sort()
        if (silent := asked - len(replies)) > 0:
            reasons.append(f"{silent} of {asked} clients did not answer in time")
        self._left_out += reasons
        needed = max(1, min(self.min_train_nodes, asked)) if asked else 0
        if len(usable) < needed:
            listed = "".join(f"\n  - {_one_line(reason)}" for reason in self._left_out) or " no reply"
            raise RunFailed(
                f"{what}: {len(usable)} of {asked} clients sent a usable reply, {needed} are needed:{listed}"
            )
        for reason in reasons:
            log(WARNING, "%s: left out %s", what, _one_line(reason))
        return sorted(usable, key=lambda reply: self._position(reply.metadata.src_node_id))

    def _problem(self, content: RecordDict, with_arrays: bool) -> str | None:
        """Why a reply cannot be aggregated, or None."""
        if len(metrics_in(content)) != 1:
            return f"the reply has {len(metrics_in(content))} MetricRecords, expected one"
        weight = metrics_of(content).get(self.weighted_by_key)
        if isinstance(weight, list) or weight is None or not np.isfinite(weight) or weight < 0:
            return f"the reply's metrics have {self.weighted_by_key!r} = {weight!r}, expected a number, zero or more"
        if not with_arrays:
            return None
        records = arrays_in(content)
        if self.arrayrecord_key not in records and len(records) != 1:
            return f"the reply has {len(records)} ArrayRecords, expected one"
        if self._global is None:
            return None
        try:
            arrays = unpack(self._arrays(content))
        except Exception as error:  # what a client sends may be anything
            return f"the reply's arrays cannot be read: {error}"
        return fault(arrays, self._like, self.expected())

    @property
    def _like(self) -> Mapping[str, np.ndarray]:
        """The global model's arrays, unpacked once a round."""
        assert self._global is not None
        if self._unpacked[0] is not self._global:
            self._unpacked = (self._global, unpack(self._global))
        return self._unpacked[1]

    def _arrays(self, content: RecordDict) -> ArrayRecord:
        records = arrays_in(content)
        return records[self.arrayrecord_key] if self.arrayrecord_key in records else next(iter(records.values()))

    def _mean_metrics(
        self, contents: list[RecordDict], mean: Callable[[list[RecordDict], str], MetricRecord]
    ) -> MetricRecord:
        """The clients' mean metrics, of the keys that all of them sent; a partition's number has no mean."""
        records = [metrics_of(content) for content in contents]
        common = set.intersection(*(set(record) for record in records))
        common -= {protocol.PARTITION, protocol.NUM_EXAMPLES, protocol.BATCH_EXAMPLES} - {self.weighted_by_key}
        kept = [
            RecordDict({"metrics": MetricRecord({key: value for key, value in record.items() if key in common})})
            for record in records
        ]
        if not any(_weight(content, self.weighted_by_key) for content in contents):
            return MetricRecord()  # a mean over nothing
        return mean(kept, self.weighted_by_key)

    # --- the run ---

    def check(self, num_rounds: int) -> None:
        """Nothing to check; rules that depend on the number of rounds do."""

    def prepare(self, num_rounds: int, arrays: ArrayRecord) -> None:
        self._partitions.clear()

    def state(self) -> RecordDict:
        """What the rule remembers from round to round; one with a memory of its own adds it."""
        nodes = ConfigRecord({"nodes": list(self._partitions), "partitions": list(self._partitions.values())})
        return RecordDict({"partitions": nodes})

    def restore(self, records: RecordDict) -> None:
        told = numbers(records, "partitions")
        self._partitions.update(zip(told.get("nodes", []), told.get("partitions", []), strict=True))

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        check(self, num_rounds)
        prepare(self, num_rounds, initial_arrays)
        return super().start(grid, initial_arrays, num_rounds, timeout, train_config, evaluate_config, evaluate_fn)


def _weight(content: RecordDict, key: str) -> float:
    value = metrics_of(content)[key]
    assert isinstance(value, int | float), "checked by _problem"
    return float(value)


def _one_line(text: str) -> str:
    return " ".join(text.split())
