"""The order of messages on workers, with durations instead of real work: the time until the last worker is free."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from flwr.app import Message, RecordDict

from fedbn_flwr.engines.local import identify
from fedbn_flwr.engines.schedule import Schedule
from fedbn_flwr.messages.protocol import COHORT_QUERY

identify()  # messages are created outside of Flower's runtime


def messages(nodes: Sequence[int], kind: str = "train") -> list[Message]:
    return [Message(RecordDict(), node, kind) for node in nodes]


def carry_out(schedule: Schedule, workers: int, seconds: Mapping[int, float]) -> tuple[float, dict[int, int]]:
    """The time until all messages are handled, and the worker that handled the last message of each node."""
    free = [(0.0, worker) for worker in range(workers)]
    running: list[tuple[float, int, Message]] = []
    of: dict[int, int] = {}
    now = 0.0
    while True:
        idle: list[int] = []
        for _, worker in sorted(free):
            message = schedule.take(worker)
            if message is None:
                idle.append(worker)
                continue
            of[message.metadata.dst_node_id] = worker
            heapq.heappush(running, (now + seconds[message.metadata.dst_node_id], worker, message))
        if not running:
            return now, of
        now, worker, message = heapq.heappop(running)
        schedule.done(message, worker)
        free = [(now, each) for each in [*idle, worker]]


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
    work = dict(enumerate(images))
    schedule = Schedule(work)
    for _ in range(3):
        chosen = [int(node) for node in random.choice(100, size=5 * workers, replace=False)]
        seconds = {node: work[node] * random.uniform(0.97, 1.03) for node in chosen}
        schedule.add(messages(chosen), range(workers))
        took, _ = carry_out(schedule, workers, seconds)
        assert took <= 1.05 * least(list(seconds.values()), workers)


def test_a_node_stays_with_its_worker_until_its_layer_wise_round_ends() -> None:
    schedule = Schedule(dict.fromkeys(range(5), 1.0))
    places = []
    for _ in range(2):
        for kind in (COHORT_QUERY, COHORT_QUERY, "train"):
            schedule.add(messages(range(5), kind), (0, 1))
            places.append(carry_out(schedule, 2, dict.fromkeys(range(5), 1.0))[1])
            assert [schedule.is_kept(node) for node in range(5)] == [kind == COHORT_QUERY] * 5
        assert places[-1] == places[-2] == places[-3]
    assert sorted(list(places[0].values()).count(worker) for worker in (0, 1)) == [2, 3]


def test_the_nodes_of_a_worker_that_died_go_to_any_worker() -> None:
    schedule = Schedule({0: 1.0, 1: 1.0})
    schedule.add(messages([0, 1], COHORT_QUERY), (0, 1))
    begun = [schedule.take(worker) for worker in (0, 1)]
    for worker, message in enumerate(begun):
        assert message is not None
        schedule.done(message, worker)
    schedule.add(messages([0, 1], COHORT_QUERY), (0, 1))
    lost = schedule.take(0)
    assert lost is not None
    schedule.release(0)
    assert (schedule.is_kept(0), schedule.is_kept(1)) == (False, True)
    schedule.add(messages([0]), (0, 1))
    other = schedule.take(1)
    assert other is not None
    assert other.metadata.dst_node_id == 1


def test_messages_that_are_dropped_are_not_handled() -> None:
    schedule = Schedule({0: 1.0, 1: 1.0})
    sent = messages([0, 0, 1])
    for number, message in enumerate(sent):
        message.metadata.__dict__["_message_id"] = str(number)
    schedule.add(sent, (0,))
    schedule.drop(["0", "2"])
    assert schedule.take(0) is sent[1]
    schedule.done(sent[1], 0)
    assert schedule.take(0) is None


def test_a_worker_that_hangs_loses_its_own_node_only() -> None:
    """Worker 0 hangs in the message of node 0. Nodes that were to go there begin elsewhere in the next round."""
    schedule = Schedule(dict.fromkeys(range(4), 1.0))
    sent = messages(range(4), COHORT_QUERY)
    for message in sent:
        message.metadata.__dict__["_message_id"] = str(message.metadata.dst_node_id)
    schedule.add(sent, (0, 1))
    hanging = schedule.take(0)
    assert hanging is not None
    done = {hanging.metadata.dst_node_id}
    while (message := schedule.take(1)) is not None:
        done.add(message.metadata.dst_node_id)
        schedule.done(message, 1)
    (behind,) = {0, 1, 2, 3} - done
    schedule.drop([str(hanging.metadata.dst_node_id), str(behind)])
    for node in {0, 1, 2, 3} - {hanging.metadata.dst_node_id}:
        schedule.let_go(node)  # the round ended
    schedule.add(messages(sorted({0, 1, 2, 3} - {hanging.metadata.dst_node_id}), COHORT_QUERY), (0, 1))
    served = set()
    while (message := schedule.take(1)) is not None:
        served.add(message.metadata.dst_node_id)
        schedule.done(message, 1)
    assert served == {0, 1, 2, 3} - {hanging.metadata.dst_node_id}
    schedule.done(hanging, 0)
    schedule.add(messages([hanging.metadata.dst_node_id], COHORT_QUERY), (0, 1))
    assert schedule.take(0) is not None, "it is no longer late"
