"""FedTAN's clients that train together have the results of clients whose exchanges are messages."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedbn_flwr import BNClient, client_app, strategies
from fedbn_flwr.errors import RunFailed
from fedbn_flwr.extensions.together import parked
from fedbn_flwr.extensions.together.groups import Row, train_exchanging
from fedbn_flwr.extensions.together.parked import TogetherPool
from fedbn_flwr.models.tensors import ModelTensors
from fedbn_flwr.strategies import GlobalMomentum
from tests.support.addressed import Addressed, OwnModel
from tests.support.federations import models_of, near, nodes_in_means, same
from tests.support.fixtures import Batches
from tests.support.marks import slow_except
from tests.support.smallbatches import FedAvgGlobalStats, FedTAN, FedTANII

Federations = Callable[..., Any]

FAILED = "training several clients at once has failed, so each trains alone: "


def mlp() -> nn.Module:
    """Two batch norms, the second without gamma and beta."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(32, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 6),
        nn.BatchNorm1d(6, affine=False), nn.ReLU(), nn.Linear(6, 3),
    )  # fmt: skip


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of clients whose first steps are computed at once."""
    found: list[int] = []

    def noted(rows: Sequence[Row], ask: Any) -> None:
        found.append(len(rows))
        train_exchanging(rows, ask)

    monkeypatch.setattr(parked, "train_exchanging", noted)
    return found


STRATEGIES: dict[str, Callable[..., Any]] = {
    "fused": FedTAN,
    "paper": partial(FedTAN, exchange="paper"),
    "weighted by batch": partial(FedTAN, weights="batch"),
    "forward only": FedAvgGlobalStats,
    "FedTAN-II": partial(FedTANII, fedtan_rounds=2),
    "global momentum": lambda **options: GlobalMomentum(FedTAN(**options)),
}


@pytest.mark.parametrize("sizes", [(8, 8, 8), (8, 13, 6, 11)], ids=["equal", "unequal"])
@pytest.mark.parametrize("name", slow_except({"fused", "weighted by batch", "global momentum"}, STRATEGIES))
def test_every_mode_equals_messages(
    name: str, sizes: tuple[int, ...], federation: Federations, groups: list[int]
) -> None:
    options = {"momentum": 0.5, "lr": 0.05, "epochs": 2}
    both(federation(sizes, model=mlp, dtype=torch.float64, **options), STRATEGIES[name], 3)
    assert groups == [len(sizes)] * (2 if name == "FedTAN-II" else 3)


def both(fed: Any, strategy: Callable[..., Any], rounds: int = 2, most: int = 9) -> tuple[list[list[int]], list[str]]:
    """Check that both ways have the same models and participants; returns the nodes in each mean, and the reasons why
    nodes were left out of the last round."""
    results = []
    for pool in ({}, {"pool": partial(TogetherPool, most=most)}):
        made = strategy(fraction_evaluate=0.0)
        nodes = nodes_in_means(made)
        with fed.grid(**pool) as grid:
            results.append((models_of(fed, made, rounds, grid=grid), nodes, made.base.training.left_out))
    (expected, *others), (found, *same_others) = results
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.keys() == theirs.keys()
        near(mine, theirs, rtol=1e-12, atol=1e-12)
    assert not same(found[-1], found[0])
    assert same_others == others
    return others[0], others[1]


class Ill(Batches):
    """Without any number in round 1."""

    def epoch(self, server_round: int, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        for inputs, targets in self.batches:
            yield inputs * torch.nan if server_round == 1 else inputs, targets


def test_a_client_that_was_left_out_has_the_state_from_before(federation: Federations, groups: list[int]) -> None:
    fed = federation((8, 13, 6), model=mlp, dtype=torch.float64, momentum=0.5, keep_momentum=True)
    fed.data[1] = Ill(fed.data[1].batches)
    nodes, left_out = both(fed, FedTAN, rounds=3)
    assert (nodes, left_out) == ([[1, 3], [1, 2, 3], [1, 2, 3]], [])
    assert groups == [3, 3, 3]


@pytest.mark.parametrize("batch", [0, 1], ids=["in the first step", "in a later step"])
def test_a_client_that_fails_in_training_fails_by_itself(
    batch: int, federation: Federations, groups: list[int], flower_log: pytest.LogCaptureFixture
) -> None:
    """Its labels are out of range: found after the forward exchanges, or after all exchanges."""
    fed = federation((8, 13, 6), model=mlp, dtype=torch.float64)
    fed.data[1].batches[batch][1].fill_(7)
    nodes, (reason,) = both(fed, FedTAN)
    assert nodes == [[1, 3]] * 2
    assert "Target 7 is out of bounds" in reason
    assert groups == [3, 3]
    assert FAILED in flower_log.text


def nan_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.sum() * torch.nan


@pytest.mark.parametrize("loss", [None, nan_loss], ids=["forward", "backward"])
def test_a_run_that_fails_in_an_exchange_is_no_failure_of_the_cohort(
    loss: Any, federation: Federations, groups: list[int], flower_log: pytest.LogCaptureFixture
) -> None:
    fed = federation((8, 13), model=mlp, dtype=torch.float64, loss=loss)
    for data in fed.data if loss is None else ():
        data.batches[0][0].fill_(torch.nan)
    with fed.grid(pool=partial(TogetherPool, most=2)) as grid, pytest.raises(RunFailed):
        models_of(fed, FedTAN(), 1, grid=grid)
    assert groups == [2]
    assert FAILED not in flower_log.text


def test_clients_of_one_model_that_cannot_be_parked_say_so(federation: Federations, groups: list[int]) -> None:
    """One client fails in the first step, so all must be parked one by one, which needs a model for each."""
    fed = federation((8, 13, 6), model=mlp, dtype=torch.float64)
    fed.data[1].batches[0][1].fill_(7)
    shared = ModelTensors(copy.deepcopy(fed.model))

    def make_client(context: Any) -> BNClient:
        return BNClient(shared, fed.data[int(context.node_config["partition-id"])], lr=0.1, context=context)

    with (
        fed.grid(client_app(make_client), pool=partial(TogetherPool, most=3)) as grid,
        pytest.raises(RunFailed) as error,
    ):
        models_of(fed, FedTAN(), 2, grid=grid)
    assert "client 1 (node 2), client 2 (node 3): could not take part in a layer-wise step" in str(error.value)
    assert "another client is in the middle of a round with this very model" in str(error.value)
    assert groups == [3]


class OwnFedTAN(OwnModel, strategies.FedTAN):
    pass


def test_every_client_receives_its_own_model_config_and_records(federation: Federations, groups: list[int]) -> None:
    """The clients share a model, which has the values of the last one while all train."""
    fed = federation((8, 13, 6), model=lambda: nn.Sequential(*mlp()[:3], nn.Linear(12, 3)))
    shared = ModelTensors(copy.deepcopy(fed.model))

    def make_client(context: Any) -> BNClient:
        return BNClient(shared, fed.data[int(context.node_config["partition-id"])], lr=0.1, context=context)

    strategy = Addressed(OwnFedTAN(min_batch=1, fraction_evaluate=0.0))
    with fed.grid(client_app(make_client), pool=partial(TogetherPool, most=3)) as grid:
        strategy.start(grid, fed.arrays(), num_rounds=2)
    assert strategy.received == [{client: (client, client + 1, client + 1) for client in range(3)}] * 2
    assert groups == [3, 3]


def test_a_client_that_fails_before_training_fails_by_itself(federation: Federations, groups: list[int]) -> None:
    fed = federation((8, 3, 12), model=mlp, dtype=torch.float64)
    nodes, (reason,) = both(fed, partial(FedTAN, min_batch=4))
    assert nodes == [[1, 3]] * 2
    assert "the batch of this client has 2 examples, and it refuses to exchange" in reason
    assert groups == []


def test_a_cohort_larger_than_the_number_at_once_exchanges_as_a_whole(
    federation: Federations, groups: list[int]
) -> None:
    fed = federation((8, 13, 6, 9, 8), model=mlp, dtype=torch.float64)
    both(fed, FedTAN, most=2)
    assert groups == [2, 2, 1] * 2


def test_a_mod_sees_every_exchange_as_a_message(federation: Federations, groups: list[int]) -> None:
    kinds: list[str] = []

    def noting(message: Any, context: Any, call_next: Any) -> Any:
        kinds.append(message.metadata.message_type)
        return call_next(message, context)

    fed = federation((8, 12), model=mlp, dtype=torch.float64)
    app = client_app(fed.make_client, mods={"query": [noting]})
    models_of(fed, FedTAN(), 1, grid=fed.grid(app, pool=partial(TogetherPool, most=2)))
    assert kinds == ["query.exchange"] * 8
    assert groups == []
