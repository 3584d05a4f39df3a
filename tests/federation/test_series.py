"""Clients whose inputs are dicts: tokens and padding masks, of other lengths at each client."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fedbn_flwr import Role, roles
from fedbn_flwr.strategies import FedAvg, FedBN, FixBN, MeanStatistics, Scaffold
from tests.support.federations import last_model, near, same
from tests.support.fixtures import Batches, Federation
from tests.support.series import CLIENTS, Text, union_of
from tests.support.smallbatches import FedAvgGlobalStats, FedTAN, FedTANII
from tests.support.twins import sgd

NONE: dict[str, Any] = {"fraction_evaluate": 0.0}


class Of(Batches):
    """Batches (inputs, targets), whose inputs and targets may be dicts."""

    batches: list[Any]

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches
        self.num_examples = sum(len(x["tokens"]) for x, _ in batches)


def federation(**options: Any) -> Federation:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = Text().double()
    return Federation(model, [Of([batch]) for batch in CLIENTS], {"lr": 0.1, "steps": 1, **options})


@pytest.mark.parametrize("exchange", ["fused", "paper"])
def test_fedtan_trains_as_one_model_on_the_union_of_padded_series(exchange: str) -> None:
    fed = federation()
    ours = last_model(fed, FedTAN(exchange=exchange, **NONE), 3)
    near(ours, sgd(copy.deepcopy(fed.model).train(), [union_of(CLIENTS)] * 3, lr=0.1), atol=1e-12)


@pytest.mark.parametrize(
    "strategy",
    [
        lambda: FedAvg(),
        lambda: FedBN(),
        lambda: FixBN(FedAvg(), freeze_round=1),
        lambda: Scaffold(),
        lambda: FedTANII(fedtan_rounds=1),
        lambda: FedAvgGlobalStats(),
        lambda: MeanStatistics(FedAvg()),
    ],
    ids=["FedAvg", "FedBN", "FixBN", "Scaffold", "FedTANII", "FedAvgGlobalStats", "MeanStatistics"],
)
def test_every_rule_trains_and_evaluates_on_dicts(strategy: Any) -> None:
    fed = federation()
    before = {key: value.numpy().copy() for key, value in fed.model.state_dict().items()}
    found = last_model(fed, strategy(), 2)
    assert all(np.isfinite(value).all() for value in found.values())
    changed = {key for key, value in found.items() if not np.array_equal(value, before[key])}
    kept = {Role.AFFINE, Role.STATISTICS} if isinstance(strategy(), FedBN) else set()
    role_of = roles(found)
    assert {key for key in found if role_of[key] not in kept} <= changed


def test_targets_may_be_a_dict_with_a_loss_of_the_user() -> None:
    def both(logits: Tensor, targets: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(logits, targets["class"]) + (logits.sum(1) - targets["length"]).square().mean()

    plain, fed = federation(), federation(loss=both)
    fed.data = [Of([(x, {"class": y, "length": x["mask"].sum(1)})]) for x, y in CLIENTS]
    assert not same(last_model(plain, FedTAN(**NONE), 1), last_model(fed, FedTAN(**NONE), 1))


def test_memory_format_is_for_images_only() -> None:
    assert same(
        last_model(federation(channels_last=True), FedAvg(**NONE), 1), last_model(federation(), FedAvg(**NONE), 1)
    )


def test_autocast_trains_on_tokens() -> None:
    fed = federation(precision=torch.bfloat16)
    fed.model.float()
    assert all(np.isfinite(value).all() for value in last_model(fed, FedAvg(**NONE), 1).values())
