"""FedTAN's step for padded series and tokens: batch norm of the real positions of the union, in float64."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from fedbn_flwr.strategies.fedtan import algorithm_3  # type: ignore[import-untyped]
from torch import nn
from torch.nn import functional as F

from fedbn_flwr.batch import count
from fedbn_flwr.exchange.codec import Agreement, Contribution
from fedbn_flwr.exchange.step import LayerwiseStep
from tests.support import cohort as support
from tests.support.series import CLIENTS, Text, text, union_of


def cohort(model: nn.Module, batches: list[Any], weights: list[float], **options: bool) -> tuple[list[nn.Module], Any]:
    copies = [copy.deepcopy(model) for _ in batches]
    works = [
        lambda exchange, m=m, x=x, y=y: LayerwiseStep(exchange, **options)(m, x, y, F.cross_entropy)
        for m, (x, y) in zip(copies, batches, strict=True)
    ]
    support.run_cohort(works, weights)
    shares = [weight / sum(weights) for weight in weights]
    mean = {
        key: sum(p * dict(m.named_parameters())[key].grad for p, m in zip(shares, copies, strict=True))
        for key, _ in model.named_parameters()
    }
    return copies, mean


def model() -> nn.Module:
    torch.manual_seed(3)
    return Text().double()


def assert_union(net: nn.Module, copies: list[nn.Module], mean: Any, union: Any) -> None:
    twin = copy.deepcopy(net)
    F.cross_entropy(twin(union[0]), union[1]).backward()
    scale = max(float(p.grad.abs().max()) for p in twin.parameters())
    for key, parameter in twin.named_parameters():
        torch.testing.assert_close(mean[key], parameter.grad, rtol=0, atol=1e-12 * scale)
    for each in copies:
        for key, buffer in twin.named_buffers():
            torch.testing.assert_close(dict(each.named_buffers())[key], buffer, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "paper"])
def test_clients_of_other_lengths_have_gradient_and_statistics_of_the_union(fused: bool) -> None:
    net = model()
    copies, mean = cohort(net, CLIENTS, [float(count(x)) for x, _ in CLIENTS], fused=fused)
    assert_union(net, copies, mean, union_of(CLIENTS))


def test_weights_by_data_set_are_those_of_examples_in_the_union() -> None:
    """A client of weight 2/3 with 2 of the 7 examples: as if the union had each of them five times."""
    net, (one, two) = model(), (text(0, 3, 9), text(1, 15, 12, 20, 2, 14))
    copies, mean = cohort(net, [one, two], [2.0, 1.0])
    repeated = {key: value.repeat(5, 1) for key, value in one[0].items()}, one[1].repeat(5)
    twin = copy.deepcopy(net)
    union = union_of([repeated, two])
    F.cross_entropy(twin(union[0]), union[1]).backward()
    for key, parameter in twin.named_parameters():
        torch.testing.assert_close(mean[key], parameter.grad, rtol=0, atol=1e-12)
    for each in copies:
        torch.testing.assert_close(each.norm1.running_mean, twin.norm1.running_mean, rtol=1e-12, atol=1e-13)


def test_weights_without_the_lengths_are_not_those_of_the_union(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests against the union can fail: with p_i in place of q_i the gradient is wrong by more than a tenth."""
    net, union = model(), union_of(CLIENTS)

    def by_examples(contributions: Sequence[Contribution], weights: Sequence[float]) -> Agreement:
        return algorithm_3([replace(each, values=each.batch) for each in contributions], weights)

    monkeypatch.setattr(support, "algorithm_3", by_examples)
    _, mean = cohort(net, CLIENTS, [3.0, 5.0, 2.0])
    twin = copy.deepcopy(net)
    F.cross_entropy(twin(union[0]), union[1]).backward()
    errors = [(mean[key] - p.grad).norm() / p.grad.norm() for key, p in twin.named_parameters() if p.grad.norm() > 1e-9]
    assert max(errors) > 0.1


def test_a_client_alone_trains_as_without_an_exchange() -> None:
    net = model()
    copies, mean = cohort(net, CLIENTS[1:2], [1.0])
    assert_union(net, copies, mean, CLIENTS[1])


def test_algorithm_2_normalises_with_the_statistics_of_the_union() -> None:
    net = model()
    copies, _ = cohort(net, CLIENTS, [3.0, 5.0, 2.0], backward=False)
    twin = copy.deepcopy(net)
    union = union_of(CLIENTS)
    F.cross_entropy(twin(union[0]), union[1]).backward()
    for each in copies:
        for key, buffer in twin.named_buffers():
            torch.testing.assert_close(dict(each.named_buffers())[key], buffer, rtol=1e-12, atol=1e-13)


def test_examples_of_another_size_weigh_by_their_values() -> None:
    """Series without a mask, of one length in a client and of another in the next: each value counts alike."""

    torch.manual_seed(0)
    net = nn.Sequential(
        nn.BatchNorm1d(3, momentum=1.0), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(3, 3)
    ).double()
    batches = [
        (torch.randn(n, 3, t, dtype=torch.float64) + i, torch.full((n,), i))
        for i, (n, t) in enumerate([(4, 3), (2, 9)])
    ]
    copies, _ = cohort(net, batches, [4.0, 2.0])
    values = torch.cat([x.transpose(1, 2).reshape(-1, 3) for x, _ in batches])
    for each in copies:
        torch.testing.assert_close(each[0].running_mean, values.mean(0), rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(each[0].running_var, values.var(0), rtol=1e-12, atol=1e-13)
