"""FedTAN's step for padded series and tokens: batch norm of the real positions of the union, in float64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedbn_flwr.batch import count
from tests.support.cohort import cohort_gradients, trained_on
from tests.support.series import CLIENTS, Text, text, union_of


def model() -> nn.Module:
    torch.manual_seed(3)
    return Text().double()


def assert_union(copies: list[nn.Module], twin: nn.Module, mean: Mapping[str, Tensor] | None = None) -> None:
    if mean is not None:
        scale = max(float(p.grad.abs().max()) for p in twin.parameters())
        for key, parameter in twin.named_parameters():
            torch.testing.assert_close(mean[key], parameter.grad, rtol=0, atol=1e-12 * scale)
    for each in copies:
        for key, buffer in twin.named_buffers():
            torch.testing.assert_close(dict(each.named_buffers())[key], buffer, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "paper"])
@pytest.mark.parametrize("clients", [CLIENTS, CLIENTS[1:2]], ids=["three", "one"])
def test_clients_of_other_lengths_have_gradient_and_statistics_of_the_union(clients: list[Any], fused: bool) -> None:
    net = model()
    copies, mean, _ = cohort_gradients(net, clients, [float(count(x)) for x, _ in clients], fused=fused)
    assert_union(copies, trained_on(net, *union_of(clients)), mean)


def test_weights_by_data_set_are_those_of_examples_in_the_union() -> None:
    """A client of weight 2/3 with 2 of the 7 examples: as if the union had each of them five times."""
    net, (one, two) = model(), (text(0, 3, 9), text(1, 15, 12, 20, 2, 14))
    copies, mean, _ = cohort_gradients(net, [one, two], [2.0, 1.0])
    repeated = {key: value.repeat(5, 1) for key, value in one[0].items()}, one[1].repeat(5)
    twin = trained_on(net, *union_of([repeated, two]))
    for key, parameter in twin.named_parameters():
        torch.testing.assert_close(mean[key], parameter.grad, rtol=0, atol=1e-12)
    torch.testing.assert_close(copies[0].norm1.running_mean, twin.norm1.running_mean, rtol=1e-12, atol=1e-13)


def test_algorithm_2_normalises_with_the_statistics_of_the_union() -> None:
    net = model()
    copies, _, _ = cohort_gradients(net, CLIENTS, [3.0, 5.0, 2.0], backward=False)
    assert_union(copies, trained_on(net, *union_of(CLIENTS)))


def test_examples_of_another_size_weigh_by_their_values() -> None:
    """Series without a mask, of one length in a client and of another in the next: each value counts alike."""

    net = nn.Sequential(
        nn.BatchNorm1d(3, momentum=1.0), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(3, 3)
    ).double()
    batches = [
        (torch.randn(n, 3, t, dtype=torch.float64) + i, torch.full((n,), i))
        for i, (n, t) in enumerate([(4, 3), (2, 9)])
    ]
    copies, _, _ = cohort_gradients(net, batches, [4.0, 2.0])
    values = torch.cat([x.transpose(1, 2).reshape(-1, 3) for x, _ in batches])
    for each in copies:
        torch.testing.assert_close(each[0].running_mean, values.mean(0), rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(each[0].running_var, values.var(0), rtol=1e-12, atol=1e-13)
