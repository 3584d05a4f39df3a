"""FedTAN's exchanges on the local engine, whose processes have the clients' parked rounds."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ArrayRecord

from fedbn_flwr import strategies
from fedbn_flwr.client import layerwise
from fedbn_flwr.experiment.metered import MeteredGrid
from tests.support.addressed import Addressed, OwnModel
from tests.support.federations import Federations, Forgetful, last_model, nodes_in_means, same, with_fault
from tests.support.marks import slow_except
from tests.support.models import two_norms, two_norms_with_dropout
from tests.support.smallbatches import FedTAN


@pytest.mark.parametrize(("exchange", "exchanges"), slow_except({"fused"}, [("fused", 4), ("paper", 6)]))
def test_any_number_of_processes_gives_the_same_model_and_traffic(
    federation: Federations, exchange: str, exchanges: int
) -> None:
    fed = federation((6, 7, 8), model=two_norms_with_dropout, lr=0.1, momentum=0.9)
    results = []
    for workers in range(4):
        with fed.grid(workers=workers, threads=1) as grid:
            metered = MeteredGrid(grid)
            strategy = FedTAN(fraction_evaluate=0.0, exchange=exchange)
            results.append((last_model(fed, strategy, 2, metered), metered.take()))
    (model, traffic), *others = results
    assert traffic.communication_rounds == 2 * (exchanges + 1)
    assert all(same(model, other) and counted == traffic for other, counted in others)


def participants(fed: Any, grid: Any, after: Callable[[int], object] = bool, **options: Any) -> list[list[int]]:
    """The nodes in the mean of each of two rounds; `after` is called at the end of each."""
    strategy = FedTAN(fraction_evaluate=0.0, **options)
    found = nodes_in_means(strategy)

    def note(server_round: int, arrays: ArrayRecord) -> None:
        if server_round:
            after(server_round)

    strategy.start(grid, fed.arrays(), num_rounds=2, evaluate_fn=note)
    return [sorted(nodes) for nodes in found]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_client_that_fails_between_two_exchanges_is_left_out(
    federation: Federations, flower_log: pytest.LogCaptureFixture, workers: int
) -> None:
    fed = federation((6, 6, 6), batches=1, model=two_norms)

    def fault(_: Any) -> None:
        raise OSError("the disk is gone")

    with fed.grid(with_fault(fed, 1, fault), workers=workers) as grid:
        assert participants(fed, grid) == [[1, 3]] * 2
    reason = "could not take part in a layer-wise step: OSError: the disk is gone"
    assert f"round 2, exchange 2: left out client 1 (node 2): {reason}" in flower_log.text


def test_a_process_that_dies_between_two_exchanges_loses_its_clients_for_this_round(
    federation: Federations, tmp_path: Path, flower_log: pytest.LogCaptureFixture
) -> None:
    fed, once = federation((6, 6, 6, 6), batches=1, model=two_norms), tmp_path / "once"

    def fault(_: Any) -> None:
        if not once.exists():
            once.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    with fed.grid(with_fault(fed, 1, fault), workers=2) as grid:
        assert participants(fed, grid) == [[1, 3], [1, 2, 3, 4]]
    reasons = {
        1: "its process died (signal 9)",
        3: "could not take part in a layer-wise step: MessageError: the client's",
    }
    for client, reason in reasons.items():
        assert f"left out client {client} (node {client + 1}): {reason}" in flower_log.text


@pytest.mark.slow
def test_a_late_client_is_left_out_of_this_round_only(
    federation: Federations, tmp_path: Path, flower_log: pytest.LogCaptureFixture
) -> None:
    fed, go = federation((6, 6, 6, 6), batches=1, model=two_norms), tmp_path / "go"

    def fault(_: Any) -> None:
        for _ in range(600):
            if go.exists():
                return
            time.sleep(0.05)

    with fed.grid(with_fault(fed, 1, fault), workers=2) as grid:
        grid.start()
        found = participants(fed, grid, lambda _: go.touch(), exchange_timeout=10)
    assert found == [[1, 3], [1, 2, 3, 4]]
    for silent in ("client 1 (node 2)", "client 3 (node 4)"):
        assert f"round 1, exchange 2: left out {silent}: it did not answer in time" in flower_log.text


class OwnFedTAN(OwnModel, strategies.FedTAN):
    pass


@pytest.mark.parametrize("parked", [True, False], ids=["parked", "replayed"])
@pytest.mark.parametrize("workers", [0, 2])
def test_every_client_receives_its_own_model_config_and_records(
    federation: Federations, monkeypatch: pytest.MonkeyPatch, workers: int, parked: bool
) -> None:
    if not parked:
        monkeypatch.setattr(layerwise, "parked_rounds", Forgetful())
    fed = federation((6, 6, 6), batches=1, model=two_norms, lr=0.1)
    strategy = Addressed(OwnFedTAN(min_batch=1, fraction_evaluate=0.0))
    with fed.grid(workers=workers) as grid:
        strategy.start(grid, fed.arrays(), num_rounds=2)
    assert strategy.received == [{client: (client, client + 1, client + 1) for client in range(3)}] * 2
