"""Clients whose steps are taken in turn have the very results of clients that train one after the other."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from flwr.clientapp import ClientApp
from torch import nn

from fedbn_flwr import client_app
from fedbn_flwr.client.client import BNClient
from fedbn_flwr.client.training import Trained, Training, train
from fedbn_flwr.extensions.together import lanes, nested
from fedbn_flwr.extensions.together.lanes import Lane, lane_of, train_lanes
from fedbn_flwr.extensions.together.nested import TogetherPool
from fedbn_flwr.models.tensors import ModelTensors
from fedbn_flwr.strategies import (
    FedAvg,
    FedBN,
    FedNova,
    FedProx,
    FedRep,
    FedWon,
    FixBN,
    GlobalMomentum,
    Scaffold,
    Standalone,
)
from tests.support.federations import models_of, same
from tests.support.fixtures import small_net
from tests.support.marks import slow_except

Federations = Callable[..., Any]


@pytest.fixture(autouse=True)
def groups(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of clients that take turns, which on a GPU all networks do except stacks of linear layers."""
    found: list[int] = []

    def noted(lanes: Sequence[Lane]) -> None:
        found.extend([len(lanes)] if lanes else [])
        train_lanes(lanes)

    monkeypatch.setattr(nested, "loaded", lane_of)
    monkeypatch.setattr(nested, "train_lanes", noted)
    return found


STRATEGIES: dict[str, Callable[[], Any]] = {
    "FedAvg": FedAvg,
    "FedProx": lambda: FedProx(proximal_mu=0.1),
    "Scaffold": Scaffold,
    "FedBN": FedBN,
    "FedNova": FedNova,
    "Standalone": Standalone,
    "FixBN": lambda: FixBN(FedAvg(), freeze_round=1),
    "frozen affine": lambda: FixBN(FedProx(proximal_mu=0.1), freeze_round=1, freeze=("statistics", "affine")),
    "GlobalMomentum": lambda: GlobalMomentum(FedAvg()),
    "FedWon": lambda: FedWon(clip=0.01),
}


def net(norm: bool = True) -> nn.Module:
    return small_net() if norm else nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))


def with_one_model(fed: Any) -> tuple[ModelTensors, ClientApp]:
    """An app whose clients share a model, as in an experiment."""
    shared = ModelTensors(copy.deepcopy(fed.model), build=lambda: copy.deepcopy(fed.model))

    def make_client(context: Any) -> BNClient:
        return BNClient(shared, fed.data[int(context.node_config["partition-id"])], lr=0.1, context=context)

    return shared, client_app(make_client)


@pytest.mark.parametrize("name", slow_except([*STRATEGIES][::3], STRATEGIES))
def test_every_strategy_is_the_same_to_the_last_bit(name: str, federation: Federations, groups: list[int]) -> None:
    kept = {"momentum": 0.5, "keep_momentum": name not in ("GlobalMomentum", "FedNova")}
    fed = federation((8, 12, 7, 8), batches=3, model=lambda: net(name != "FedWon"), lr=0.05, epochs=2, **kept)
    expected = models_of(fed, STRATEGIES[name](), 3)
    found = models_of(fed, STRATEGIES[name](), 3, grid=fed.grid(pool=partial(TogetherPool, most=3)))
    assert all(map(same, found, expected))
    assert groups == [3, 1] * 3


@pytest.mark.parametrize(
    "options", [{"optimizer": "adam"}, {"clip": 0.1}, {"optimizer": "adam", "keep_momentum": True}]
)
def test_any_optimiser_is_the_same_to_the_last_bit(
    options: dict[str, Any], federation: Federations, groups: list[int]
) -> None:
    fed = federation((8, 12, 7), batches=2, lr=0.01, **options)
    expected = models_of(fed, FedAvg(), 3)
    found = models_of(fed, FedAvg(), 3, grid=fed.grid(pool=partial(TogetherPool, most=3)))
    assert all(map(same, found, expected))
    assert groups == [3] * 3


def test_clients_may_share_the_model_whose_copies_stay(federation: Federations) -> None:
    fed = federation((8, 12, 7))
    shared, app = with_one_model(fed)
    expected = models_of(fed, FedBN(), 3)
    found = models_of(fed, FedBN(), 3, grid=fed.grid(app, pool=partial(TogetherPool, most=3)))
    assert all(map(same, found, expected))
    copies = lanes._replicas[shared.model]
    assert len(copies) == 3
    assert not any(each.used for each in copies)


def test_a_client_that_fails_does_so_alone(federation: Federations, flower_log: pytest.LogCaptureFixture) -> None:
    fed = federation((8, 12, 7))
    inputs, targets = fed.data[1].batches[0]
    fed.data[1].batches[0] = inputs[:, :1], targets
    grid, strategy = fed.grid(pool=partial(TogetherPool, most=3)), FedAvg()
    strategy.start(grid, fed.arrays(), num_rounds=1)
    assert "training several clients at once has failed, so each trains alone: RuntimeError: " in flower_log.text
    assert [reason.partition(":")[0] for reason in strategy.base.training.left_out] == ["node 2"]


def test_random_passes_draw_what_they_draw_alone(federation: Federations, groups: list[int]) -> None:
    fed = federation((8, 12, 7), model=lambda: nn.Sequential(small_net(), nn.Dropout(0.5)))
    _, app = with_one_model(fed)
    expected = models_of(fed, FedAvg(), 2)
    found = models_of(fed, FedAvg(), 2, grid=fed.grid(app, pool=partial(TogetherPool, most=3)))
    assert all(map(same, found, expected))
    assert groups == [3]  # in the second round it is known


def test_rules_that_need_the_network_itself_train_alone(federation: Federations, groups: list[int]) -> None:
    fed = federation((8, 12, 7))
    strategies = [lambda: FedRep(kept=["4"]), lambda: FixBN(FedAvg(), freeze_round=1, refresh=0.1)]
    for make in strategies:
        expected = models_of(fed, make(), 2)
        found = models_of(fed, make(), 2, grid=fed.grid(pool=partial(TogetherPool, most=3)))
        assert all(map(same, found, expected))


def test_a_lane_is_the_loop_of_one_client() -> None:
    """Without engine and messages: unequal numbers of steps, and the losses."""
    from .test_together import rounds

    model = net()
    ours, apart = (rounds(model, (8, 13, 5), momentum=0.9) for _ in range(2))
    loaded = [lane for training in ours if isinstance(lane := lane_of(training), Lane)]
    train_lanes(loaded)
    found: list[Trained] = [lane.finished() for lane in loaded]
    expected: list[Training] = apart
    assert found == [train(training) for training in expected]
    for mine, one in zip(ours, apart, strict=True):
        torch.testing.assert_close(mine.model.state_dict(), one.model.state_dict(), rtol=0, atol=0)


def test_a_round_whose_batches_cannot_be_read_leaves_its_copy_free() -> None:
    from .test_together import rounds

    model = net()
    (training,) = rounds(model, (8,))
    training.batches = ({}["no"] for _ in range(1))
    with pytest.raises(KeyError):
        lane_of(training)
    assert not any(each.used for each in lanes._replicas[training.model])
