"""FBN, `FixBN(FedAvg(), freeze_round=0, refresh=0.1)`, against a twin in float64 of explicit sums."""

from __future__ import annotations

from typing import Any

import flwr.serverapp.strategy as flower
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedbn_flwr.errors import forget_said
from fedbn_flwr.strategies import FedAvg, FixBN, MeanStatistics, Secure
from tests.support.federations import Federations, last_model, models_of, near

OFF: dict[str, Any] = {"fraction_evaluate": 0.0}
LR = 0.1


def fbn(rate: float = 0.1, **options: Any) -> FixBN:
    return FixBN(FedAvg(**OFF), freeze_round=0, refresh=rate, **options)


def client(batches: Any, w: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """A client's parameters after a round of SGD, and the means over its batches of mean and biased variance."""
    mu, v = w["1.running_mean"], w["1.running_var"]
    own = {key: value.clone() for key, value in w.items() if "running" not in key}
    means, variances = [], []
    for images, labels in batches:
        p = {key: value.requires_grad_() for key, value in own.items()}
        x = F.conv2d(images, p["0.weight"])
        values = x.detach().transpose(0, 1).flatten(1)
        means.append(values.mean(1))
        variances.append(((values - means[-1][:, None]) ** 2).mean(1))
        shape = (1, -1, 1, 1)
        x = (x - mu.view(shape)) / (v.view(shape) + 1e-5).sqrt() * p["1.weight"].view(shape) + p["1.bias"].view(shape)
        loss = F.cross_entropy(F.linear(x.relu().flatten(1), p["4.weight"], p["4.bias"]), labels)
        steps = torch.autograd.grad(loss, [*p.values()])
        own = {key: (value - LR * step).detach() for (key, value), step in zip(p.items(), steps, strict=True)}
    return own, torch.stack(means).mean(0), torch.stack(variances).mean(0)


def twin(fed: Any, rounds: int, rate: float) -> dict[str, Tensor]:
    """`rounds` rounds of FBN."""
    w = {key: value.clone() for key, value in fed.model.state_dict().items() if "num_batches" not in key}
    sizes = [sum(len(images) for images, _ in data.batches) for data in fed.data]
    n = sum(sizes)

    def mean(values: list[Tensor]) -> Tensor:
        return sum((size * value for size, value in zip(sizes, values, strict=True)), torch.zeros(())) / n

    for _ in range(rounds):
        owns, means, variances = zip(*(client(data.batches, w) for data in fed.data), strict=True)
        mu = rate * mean(list(means)) + (1 - rate) * w["1.running_mean"]
        second = [v + (each - mu) ** 2 for v, each in zip(variances, means, strict=True)]
        w["1.running_var"] = rate * mean(second) + (1 - rate) * w["1.running_var"]
        w["1.running_mean"] = mu
        for key in owns[0]:
            w[key] = sum((size * own[key] for size, own in zip(sizes, owns, strict=True)), torch.zeros(())) / n
    return w


@pytest.mark.parametrize("rate", [0.1, 1.0])
def test_rounds_are_the_explicit_sums(federation: Federations, rate: float) -> None:
    fed = federation((6, 8, 10), batches=2, dtype=torch.float64, lr=LR)
    near(twin(fed, 3, rate), last_model(fed, fbn(rate), 3), rtol=1e-12, atol=1e-12)


def test_before_the_freeze_statistics_are_pooled_and_then_follow(federation: Federations) -> None:
    fed = federation((6, 8), dtype=torch.float64, lr=LR)
    models = models_of(fed, FixBN(FedAvg(**OFF), freeze_round=2, refresh=0.1), 3)
    pooled = last_model(fed, FedAvg(statistics="pooled", **OFF), 2)
    near(pooled, models[2], rtol=1e-12, atol=1e-14)
    fed.model.load_state_dict({key: torch.from_numpy(value.copy()) for key, value in models[2].items()}, strict=False)
    near(twin(fed, 1, 0.1), models[3], rtol=1e-12, atol=1e-12)


def test_secure_aggregation_gives_the_same(federation: Federations) -> None:
    fed = federation((6, 8, 10), dtype=torch.float64, lr=LR)
    near(twin(fed, 2, 0.1), last_model(fed, Secure(fbn()), 2), rtol=2e-7, atol=2e-7)


def test_the_first_round_of_a_new_model_is_reported(
    federation: Federations, flower_log: pytest.LogCaptureFixture
) -> None:
    fed = federation((8, 8))
    fbn().begin(1, fed.arrays())
    assert "nothing is normalised before they are refreshed" in flower_log.text
    flower_log.clear()
    forget_said()
    fed.model[1].running_mean.fill_(0.5)
    fbn().begin(1, fed.arrays())
    assert "normalised" not in flower_log.text


def test_means_that_are_asked_for_around_a_robust_strategy_can_be_refreshed(federation: Federations) -> None:
    """And without `refresh` a median can be frozen."""
    fed = federation((6, 8, 10), dtype=torch.float64, lr=LR)
    found = last_model(fed, FixBN(MeanStatistics(flower.FedMedian(**OFF)), freeze_round=0, refresh=0.1), 1)
    expected = twin(fed, 1, 0.1)
    near({key: expected[key] for key in expected if "running" in key}, found, rtol=1e-12, atol=1e-12)
    FixBN(MeanStatistics(flower.FedMedian(), statistics="median"), freeze_round=1)


@pytest.mark.parametrize("stays", [True, False])
def test_a_layer_that_stays_or_has_no_running_statistics_is_not_refreshed(federation: Federations, stays: bool) -> None:
    def net() -> nn.Module:
        last = nn.BatchNorm2d(4, track_running_stats=stays)
        return nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1), last, nn.Flatten(), nn.Linear(16, 3)
        )

    fed = federation((8, 12), model=net)
    base = FedAvg(kept=["3"], global_kept="initial", **OFF) if stays else FedAvg(**OFF)
    _, one, two = models_of(fed, FixBN(base, freeze_round=1, refresh=0.1), 2)
    assert not np.array_equal(one["1.running_mean"], two["1.running_mean"])
    if stays:
        np.testing.assert_array_equal(two["3.running_mean"], np.zeros(4), "the server never gets it")
