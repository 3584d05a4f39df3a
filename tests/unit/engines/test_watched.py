"""What the grid of a run reports while a round runs."""

from __future__ import annotations

from typing import Any

import pytest
from flwr.app import ConfigRecord

from fedbn_flwr.engines.metered import MeteredGrid
from fedbn_flwr.strategies import FedAvg
from tests.support.federations import Federations
from tests.support.models import two_norms
from tests.support.smallbatches import FedAvgGlobalStats, FedTAN

Reports = list[tuple[str, int, int]]


def watched(grid: Any) -> tuple[MeteredGrid, Reports]:
    reports: Reports = []
    return MeteredGrid(grid, lambda *report: reports.append(report)), reports


@pytest.mark.parametrize("workers", [0, 2])
def test_every_reply_is_reported_when_it_arrives(federation: Federations, workers: int) -> None:
    fed, strategy, seen = federation((8, 12, 8)), FedAvg(), list[int]()
    with fed.grid(workers=workers) as inner:
        grid, reports = watched(inner)
        for _ in range(2):
            messages = strategy.configure_train(1, fed.arrays(), ConfigRecord(), grid)
            grid.observe(lambda reply: seen.append(reply.metadata.src_node_id))
            strategy.aggregate_train(1, grid.send_and_receive(messages))
        grid.send_and_receive(strategy.configure_evaluate(1, fed.arrays(), ConfigRecord(), grid))
    one_round = [("clients trained", done, 3) for done in range(4)]
    assert reports == one_round * 2 + [("clients evaluated", done, 3) for done in range(4)]
    assert sorted(seen) == [1, 1, 2, 2, 3, 3], "the strategy's observer sees the same replies"


FORWARD, BACKWARD = "forward pass, layers", "backward pass, layers"


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        (FedTAN(), [(FORWARD, 1, 2), (FORWARD, 2, 2), (BACKWARD, 1, 2), (BACKWARD, 2, 2)]),
        (
            FedTAN(exchange="paper"),
            [(FORWARD, 1, 2), (FORWARD, 1, 2), (FORWARD, 2, 2), (FORWARD, 2, 2), (BACKWARD, 1, 2), (BACKWARD, 2, 2)],
        ),
        (FedAvgGlobalStats(), [(FORWARD, 1, 2), (FORWARD, 2, 2)]),
    ],
)
def test_fedtan_reports_layers(federation: Federations, strategy: FedAvg, expected: Reports) -> None:
    fed = federation((6, 6), batches=1, model=two_norms, steps=1)
    grid, reports = watched(fed.grid())
    strategy.begin(1, fed.arrays())
    list(strategy.configure_train(1, fed.arrays(), ConfigRecord(), grid))
    assert reports == expected
