"""Pooled statistics in whole rounds: every strategy that averages has them, Secure too, and Private refuses them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from flwr.serverapp.strategy import FedAdam
from torch import nn

from fedbn_flwr import Role, roles
from fedbn_flwr.errors import SettingsError
from fedbn_flwr.strategies import FedAvg, FedBN, FedNova, FedProx, FixBN, MeanStatistics, Private, Scaffold, Secure
from tests.support.federations import Arrays, Federations, differing, last_model

OFF: dict[str, Any] = {"fraction_evaluate": 0.0}
POOLED: dict[str, Any] = {"statistics": "pooled", **OFF}


def of_statistics(fed: Any, rate: float) -> tuple[np.ndarray, np.ndarray]:
    """Mean and variance of the images' two channels, if the first step sees each client's images at once.

    The means begin at zero and the variances at one; PyTorch's rate is that of the layer.
    """
    images = [data.batches[0][0].numpy() for data in fed.data]
    values = [each.transpose(1, 0, 2, 3).reshape(2, -1) for each in images]
    means = np.stack([rate * each.mean(1) for each in values])
    variances = np.stack([1 - rate + rate * each.var(1, ddof=1) for each in values])
    p = np.array([len(each) for each in images]) / sum(map(len, images))
    mu = p @ means
    return mu, p @ (variances + (means - mu) ** 2)


def norm_first() -> nn.Module:
    return nn.Sequential(nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(32, 3))


RULES: dict[str, Callable[..., Any]] = {
    "FedAvg": FedAvg,
    "FedProx": FedProx,
    "Scaffold": Scaffold,
    "FedBN": FedBN,
    "FixBN": lambda **options: FixBN(FedAvg(**options), freeze_round=1),
    "MeanStatistics": lambda statistics, **options: MeanStatistics(FedAdam(**options), statistics=statistics),
}


@pytest.mark.parametrize(
    ("rule", "secure"), [("FedNova", False), *((rule, secure) for rule in RULES for secure in (False, True))]
)
def test_the_variance_is_that_of_all_clients_data(federation: Federations, rule: str, secure: bool) -> None:
    fed = federation((6, 8, 10), batches=1, model=norm_first, dtype=torch.float64, lr=0.05)
    made = {**RULES, "FedNova": FedNova}[rule](**POOLED)  # FedNova needs single replies
    found = last_model(fed, Secure(made) if secure else made, 1)
    mu, var = of_statistics(fed, 0.1)
    tolerance = 5e-8 if secure else 1e-13
    np.testing.assert_allclose(found["0.running_mean"], mu, atol=tolerance)
    np.testing.assert_allclose(found["0.running_var"], var, atol=tolerance)


@pytest.mark.parametrize("rule", ["FedAvg", "Scaffold", "FedBN", "FixBN", "MeanStatistics"])
def test_a_secure_run_is_the_open_one(federation: Federations, rule: str) -> None:
    """Also in later rounds, whose second moments are about means that are not zero."""
    fed = federation((6, 8, 10), dtype=torch.float64, lr=0.05)
    there, here = (last_model(fed, wrap(RULES[rule](**POOLED)), 3) for wrap in (lambda made: made, Secure))
    assert max(float(np.abs(value - here[key]).max()) for key, value in there.items()) < 2e-7


def test_only_the_variances_of_the_first_round_differ_from_the_mean(federation: Federations) -> None:
    fed = federation((6, 8, 10), dtype=torch.float64, lr=0.05)
    plain, pooled = (last_model(fed, FedAvg(**options), 1) for options in (OFF, POOLED))
    assert differing(plain, pooled) == {"1.running_var"}
    assert (pooled["1.running_var"] >= plain["1.running_var"]).all()


def test_frozen_statistics_keep_every_bit(federation: Federations) -> None:
    fed = federation((6, 8, 10), lr=0.05)

    def statistics(model: Arrays) -> list[bytes]:
        return [model[key].tobytes() for key, role in roles(model).items() if role is Role.STATISTICS]

    for wrap in (lambda made: made, Secure):
        first, last = (last_model(fed, wrap(RULES["FixBN"](**POOLED)), rounds) for rounds in (1, 3))
        assert statistics(first) == statistics(last)


def test_private_refuses_them_and_the_summary_names_them() -> None:
    with pytest.raises(SettingsError, match=r"statistics is 'pooled', but Private .* use statistics='mean'"):
        Private(FixBN(FedAvg(**POOLED), freeze_round=1))
    assert FedAvg(**POOLED).notes() == {"norm_statistics": "pooled"}
    assert FixBN(MeanStatistics(FedAvg(), statistics="pooled"), freeze_round=1).traits.pooled
    with pytest.raises(SettingsError, match="statistics is 'sum'"):
        FedAvg(statistics="sum")  # type: ignore[arg-type]
