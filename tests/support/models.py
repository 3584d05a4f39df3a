"""Small models that several test files train."""

from __future__ import annotations

from torch import nn


def two_norms() -> nn.Module:
    """For the `federation` fixture's examples: two convolutions, each with a batch norm."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 5, 2), nn.BatchNorm2d(5),
        nn.ReLU(), nn.Flatten(), nn.Linear(5, 3),
    )  # fmt: skip


def two_norms_with_dropout() -> nn.Module:
    return nn.Sequential(two_norms()[:4], nn.Dropout(0.3), *two_norms()[4:])
