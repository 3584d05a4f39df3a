"""Networks and comparisons that several tests of norm layers share."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedbn_flwr import convert_norm
from tests.support.fixtures import small_net


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def two_norms() -> nn.Module:
    net = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4, eps=1e-3),
        nn.ReLU(),
        nn.Conv2d(4, 6, 3, stride=2, groups=2),
        nn.BatchNorm2d(6),
        nn.Flatten(),
        nn.Linear(24, 3),
    ).double()
    for parameter in net.parameters():
        nn.init.normal_(parameter)
    return net


def some_batches(sizes: tuple[int, ...] = (5, 5, 3)) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randn(n, 2, 4, 4, dtype=torch.float64, generator=generator) * (1 + n), torch.arange(n) % 3)
        for n in sizes
    ]


def net(norm: str = "bn") -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return convert_norm(small_net().double(), norm)
