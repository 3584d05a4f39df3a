"""The order of messages on workers, with durations instead of real work: the time until the last worker is free."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp

from fedbn_flwr import LocalGrid
from fedbn_flwr.engines.local import Nodes
from fedbn_flwr.engines.worker import NodeWorker, Then
from fedbn_flwr.messages.protocol import COHORT_QUERY


class Timed(NodeWorker):
    """Answers after `seconds` of its node."""

    def __init__(self, grid: TimedGrid) -> None:
        self.grid, self.held, self.until = grid, {}, 0.0
        self.served: list[int] = []

    def launch(self) -> None:
        self.result: Any = None

    def send(self, then: Then, call: str, *arguments: Any) -> None:
        message, context = arguments
        node = message.metadata.dst_node_id
        self.then, self.until = then, self.grid.now + self.grid.seconds[node]
        self.served.append(node)
        assert (context is None) == self.held.get(node, False)
        parked = message.metadata.message_type == COHORT_QUERY
        self.result = Message(RecordDict(), reply_to=message), None if parked else RecordDict()

    def receive(self) -> tuple[Any, str]:
        return self.result, ""

    def close(self) -> None:
        pass


class TimedGrid(LocalGrid):
    now = 0.0

    def __init__(self, work: Mapping[int, float], workers: int) -> None:
        self.seconds = work
        super().__init__(ClientApp(), len(work), workers=workers, work=list(work.values()), node_ids=list(work))
        self.start()

    def _make_workers(self, nodes: Nodes, count: int) -> Sequence[NodeWorker]:
        return [Timed(self) for _ in range(count)]

    def _wait(self, timeout: float) -> list[Any]:
        busy = [worker for worker in self._workers if worker.then]
        first = min(busy, key=lambda worker: worker.until, default=None)
        if first is None or first.until == math.inf or (not timeout and first.until > self.now):
            return []
        self.now = first.until
        return [first]

    def ask(self, nodes: Iterable[int], kind: str = "train") -> float:
        """The seconds until all of these nodes have answered."""
        began = self.now
        self.send_and_receive([Message(RecordDict(), node, kind) for node in nodes], timeout=0.5)
        return self.now - began

    def held(self) -> list[set[int]]:
        return [{*worker.held} for worker in self._workers]


def least(seconds: Sequence[float], workers: int) -> float:
    """No order can be shorter: of the (k - 1) m + 1 longest messages, one of m workers handles k or more."""
    longest = sorted(seconds, reverse=True)
    several = [k * longest[(k - 1) * workers] for k in range(1, -(-len(seconds) // workers) + 1)]
    return max(sum(seconds) / workers, *several)


@pytest.mark.parametrize("workers", [2, 4, 8, 16])
@pytest.mark.parametrize("kind", ["equal", "dirichlet", "shards"])
def test_workers_are_busy_until_the_end(kind: str, workers: int) -> None:
    random = np.random.default_rng(workers)
    images = {
        "equal": np.full(100, 500.0),
        "dirichlet": random.dirichlet([0.1] * 10, 10).reshape(-1) * 5000 + 20,
        "shards": np.repeat([100.0, 300.0, 900.0, 2000.0], 25),
    }[kind]
    work = dict(enumerate(images, start=1))
    grid = TimedGrid(work, workers)
    for _ in range(3):
        chosen = [int(node) for node in 1 + random.choice(100, size=5 * workers, replace=False)]
        grid.seconds = {node: work[node] * random.uniform(0.97, 1.03) for node in chosen}
        assert grid.ask(chosen) <= 1.05 * least(list(grid.seconds.values()), workers)


def test_a_node_stays_with_its_worker_until_its_layer_wise_round_ends() -> None:
    grid = TimedGrid(dict.fromkeys(range(1, 6), 1.0), 2)
    for _ in range(2):
        grid.ask(range(1, 6), COHORT_QUERY)
        held = grid.held()
        assert sorted(map(len, held)) == [2, 3]
        grid.ask(range(1, 6), COHORT_QUERY)
        assert grid.held() == held
        for worker in grid._workers:
            worker.served.clear()
        grid.ask(range(1, 6))
        assert [{*worker.served} for worker in grid._workers] == held
        assert grid.held() == [set(), set()]


def test_the_nodes_of_a_worker_that_died_go_to_any_worker() -> None:
    grid = TimedGrid({1: 1.0, 2: 1.0}, 2)
    grid.ask([1, 2], COHORT_QUERY)
    first, other = grid._workers
    first.receive = lambda: (None, "it died")
    grid.ask(first.held, COHORT_QUERY)
    assert (first.held, len(other.held)) == ({}, 1)
    first.is_ready, first.problem = False, "it cannot start"
    grid.ask([1, 2])
    assert {*other.served} == {1, 2}


def test_a_worker_that_hangs_loses_its_own_node_only() -> None:
    """It hangs in the message of node 1. The node that was to begin there next begins elsewhere in the next round."""
    grid = TimedGrid(dict.fromkeys(range(1, 5), 1.0), 2)
    grid.seconds = {**grid.seconds, 1: math.inf}
    grid.ask(range(1, 5), COHORT_QUERY)
    first, other = grid._workers
    assert (first.served, len(other.served)) == ([1], 2)
    grid.ask(range(2, 5), COHORT_QUERY)
    assert (first.held, {*other.held}) == ({1: False}, {2, 3, 4})
    first.until = grid.now  # it no longer hangs; what was given up is not handled
    grid.ask([1])
    assert first.served == [1, 1]
