"""The order of messages on workers, with durations instead of real work: the time until the last worker is free.

No real time passes: the clock of the grid and its pool is `TimedPool.now`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp

from fedbn_flwr import LocalGrid
from fedbn_flwr.engines import local
from fedbn_flwr.engines.capabilities import OnReply
from fedbn_flwr.engines.pool import Nodes, WorkerPool
from fedbn_flwr.engines.worker import NodeWorker, Then
from fedbn_flwr.messages.protocol import EXCHANGE_QUERY


class Timed(NodeWorker):
    """Answers after `seconds` of its node."""

    def __init__(self, pool: TimedPool) -> None:
        self.pool, self.until = pool, 0.0
        self.served: list[int] = []

    def launch(self) -> None:
        self.result: Any = None

    def send(self, then: Then, call: str, *arguments: Any) -> None:
        message, context = arguments
        node = message.metadata.dst_node_id
        self.then, self.until = then, TimedPool.now + self.pool.seconds[node]
        self.served.append(node)
        assert (context is None) == (self.pool._seats[node].parked)
        parked = message.metadata.message_type == EXCHANGE_QUERY
        self.result = Message(RecordDict(), reply_to=message), None if parked else RecordDict()

    def receive(self) -> tuple[Any, str]:
        return self.result, ""

    def close(self) -> None:
        self.is_ready = False


class TimedPool(WorkerPool[Timed]):
    now = 0.0

    def __init__(self, nodes: Nodes, on_reply: OnReply, count: int) -> None:
        super().__init__(nodes, on_reply, functools.partial(Timed, self), count)
        self.seconds = nodes.work

    def wait(self, busy: Sequence[Timed], timeout: float) -> Iterable[Timed]:
        first = min(busy, key=lambda worker: worker.until)
        TimedPool.now = max(self.now, min(first.until, self.now + timeout))
        return [first] if first.until <= self.now else []

    def nodes_of(self, worker: Timed) -> set[int]:
        return {node for node, seat in self._seats.items() if seat.worker is worker}


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TimedPool, "now", 0.0)
    monkeypatch.setattr(local, "time", SimpleNamespace(monotonic=lambda: TimedPool.now))


class TimedGrid(LocalGrid):
    def __init__(self, work: Mapping[int, float], workers: int) -> None:
        pools = list[TimedPool]()

        def make(nodes: Nodes, on_reply: OnReply) -> TimedPool:
            pools.append(TimedPool(nodes, on_reply, workers))
            return pools[0]

        options: dict[str, Any] = {"work": list(work.values()), "node_ids": list(work)}
        super().__init__(ClientApp(), len(work), pool=make, **options)
        (self.pool,) = pools
        self.start()

    def ask(self, nodes: Iterable[int], kind: str = "train") -> float:
        """The seconds until all of these nodes have answered, or 99 where one hangs."""
        began = TimedPool.now
        self.send_and_receive([Message(RecordDict(), node, kind) for node in nodes], timeout=99)
        return TimedPool.now - began

    def shares(self) -> list[set[int]]:
        """The nodes of each worker."""
        return [self.pool.nodes_of(worker) for worker in self.pool.workers]


def least(seconds: Sequence[float], workers: int) -> float:
    """No order can be shorter: of the (k - 1) m + 1 longest messages, one of m workers handles k or more."""
    longest = sorted(seconds, reverse=True)
    several = [k * longest[(k - 1) * workers] for k in range(1, -(-len(seconds) // workers) + 1)]
    return max(sum(seconds) / workers, *several)


@pytest.mark.parametrize("workers", [2, 4, 8, 16])
@pytest.mark.parametrize("kind", ["equal", "dirichlet", "shards"])
def test_workers_are_busy_until_the_end(kind: str, workers: int) -> None:
    random = np.random.default_rng(workers)
    thousands = {
        "equal": np.full(100, 0.5),
        "dirichlet": random.dirichlet([0.1] * 10, 10).reshape(-1) * 5 + 0.02,
        "shards": np.repeat([0.1, 0.3, 0.9, 2.0], 25),
    }[kind]
    work = dict(enumerate(thousands, start=1))
    grid = TimedGrid(work, workers)
    for _ in range(3):
        chosen = [int(node) for node in 1 + random.choice(100, size=5 * workers, replace=False)]
        grid.pool.seconds = {node: work[node] * random.uniform(0.97, 1.03) for node in chosen}
        assert grid.ask(chosen) <= 1.05 * least(list(grid.pool.seconds.values()), workers)


def test_a_node_stays_with_its_worker_until_its_layer_wise_round_ends() -> None:
    grid = TimedGrid(dict.fromkeys(range(1, 6), 1.0), 2)
    for _ in range(2):
        grid.ask(range(1, 6), EXCHANGE_QUERY)
        shares = grid.shares()
        assert sorted(map(len, shares)) == [2, 3]
        grid.ask(range(1, 6), EXCHANGE_QUERY)
        assert grid.shares() == shares
        for worker in grid.pool.workers:
            worker.served.clear()
        grid.ask(range(1, 6))
        assert [{*worker.served} for worker in grid.pool.workers] == shares
        assert grid.shares() == [set(), set()]


def test_the_nodes_of_a_worker_that_died_go_to_any_worker() -> None:
    grid = TimedGrid({1: 1.0, 2: 1.0}, 2)
    grid.ask([1, 2], EXCHANGE_QUERY)
    first, other = grid.pool.workers
    first.receive = lambda: (None, "it died")
    grid.ask(grid.pool.nodes_of(first), EXCHANGE_QUERY)
    assert sorted(map(len, grid.shares())) == [0, 1]
    first.is_ready, first.problem = False, "it cannot start"
    grid.ask([1, 2])
    assert {*other.served} == {1, 2}


def test_a_worker_that_hangs_loses_its_own_node_only() -> None:
    """It hangs in the message of node 1. The node that was to begin there next begins elsewhere in the next round."""
    grid = TimedGrid(dict.fromkeys(range(1, 5), 1.0), 2)
    grid.pool.seconds = {**grid.pool.seconds, 1: math.inf}
    grid.ask(range(1, 5), EXCHANGE_QUERY)
    first, other = grid.pool.workers
    assert (first.served, len(other.served)) == ([1], 2)
    grid.ask(range(2, 5), EXCHANGE_QUERY)
    assert grid.shares() == [{1}, {2, 3, 4}]
    assert {node for node, seat in grid.pool._seats.items() if seat.parked} == {2, 3, 4}
    first.until = TimedPool.now  # it no longer hangs; what was given up is not handled
    grid.ask([1])
    assert first.served == [1, 1]


def test_a_worker_that_cannot_start_keeps_no_node() -> None:
    """The nodes whose layer-wise rounds were to begin there begin at the other worker."""
    grid = TimedGrid(dict.fromkeys(range(1, 5), 1.0), 2)
    broken, other = grid.pool.workers
    broken.is_ready, broken.receive = False, lambda: ("no memory", "")  # type: ignore[method-assign]
    grid.ask(range(1, 5), EXCHANGE_QUERY)
    assert broken.problem == "no memory"
    assert sorted(other.served) == [1, 2, 3, 4]
