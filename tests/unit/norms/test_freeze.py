"""Frozen statistics and affine parameters stay as they are, and everything else trains."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedbn_flwr import Role
from fedbn_flwr.errors import MessageError
from fedbn_flwr.norms.statistics import frozen_norm


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(16, 3)
    )


def moved(model: nn.Module) -> set[str]:
    """Keys of parameters that get a gradient from a pass over a batch, and of buffers that it changes.

    A gradient need not move its parameter: for a bias before batch norm it is zero but for rounding.
    """
    before = {key: value.clone() for key, value in model.named_buffers()}
    model.zero_grad()
    F.cross_entropy(model(torch.randn(8, 1, 4, 4) + 2), torch.arange(8) % 3).backward()
    trained = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    return trained | {key for key, value in model.named_buffers() if not value.equal(before[key])}


WEIGHTS = {"0.weight", "0.bias", "5.weight", "5.bias"}
AFFINE = {"1.weight", "1.bias"}
COMPUTED = {f"1.parametrizations.weight.original{i}" for i in (0, 1)}
STATISTICS = {"1.running_mean", "1.running_var", "1.num_batches_tracked"}


@pytest.mark.parametrize(
    ("what", "moves"),
    [
        (frozenset(), WEIGHTS | AFFINE | STATISTICS),
        (frozenset({Role.STATISTICS}), WEIGHTS | AFFINE),
        (frozenset({Role.AFFINE}), WEIGHTS | STATISTICS),
        (frozenset({Role.STATISTICS, Role.AFFINE}), WEIGHTS),
    ],
)
def test_all_that_is_not_frozen_trains(what: frozenset[Role], moves: set[str]) -> None:
    model = net()
    with frozen_norm(model, what):
        assert moved(model) == moves


def test_frozen_statistics_are_what_training_normalises_with() -> None:
    model = net()
    model[1].running_mean.fill_(2.0)
    model[1].running_var.fill_(9.0)
    x = torch.randn(5, 1, 4, 4)
    with frozen_norm(model, frozenset({Role.STATISTICS})):
        found = model[:2](x)
    torch.testing.assert_close(found, (model[0](x) - 2) / (9 + 1e-5) ** 0.5)


def test_dropout_stays_on_while_statistics_are_frozen() -> None:
    model = net().eval()
    x = torch.randn(4, 1, 4, 4)
    with frozen_norm(model, frozenset({Role.STATISTICS})):
        assert model[3].training
        assert not model(x).equal(model(x))


def test_a_loop_that_calls_train_does_not_thaw_batch_norm() -> None:
    """As most loops do at the start of each epoch, and Lightning after each validation."""
    model = net()
    with frozen_norm(model, frozenset({Role.STATISTICS})):
        model.eval().train()
        assert model[3].training
        assert moved(model) == WEIGHTS | AFFINE
    assert moved(model.eval().train()) == WEIGHTS | AFFINE | STATISTICS


@pytest.mark.parametrize("ends", [pytest.raises(RuntimeError, match="diverged"), contextlib.nullcontext()])
def test_the_model_is_afterwards_as_before(ends: contextlib.AbstractContextManager[Any]) -> None:
    """A pass outside the block would normalise with the frozen statistics. A bias that its user froze stays so."""
    model = net()
    model[1].bias.requires_grad_(False)
    with ends, frozen_norm(model, frozenset({Role.STATISTICS, Role.AFFINE})):
        assert not model[1].training
        assert not model[1].weight.requires_grad
        if not isinstance(ends, contextlib.nullcontext):
            raise RuntimeError("diverged")
    assert all(module.training for module in model.modules())
    with frozen_norm(model, frozenset()):
        assert moved(model) == WEIGHTS | STATISTICS | {"1.weight"}


def test_a_gamma_that_is_computed_is_frozen_too() -> None:
    model = net()
    nn.utils.parametrizations.weight_norm(model[1])
    for what, moves in ((frozenset({Role.AFFINE}), set()), (frozenset[Role](), {"1.bias", *COMPUTED})):
        with frozen_norm(model, what):
            assert moved(model) == WEIGHTS | STATISTICS | moves


def test_a_batch_norm_without_statistics_cannot_be_frozen() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, track_running_stats=False))
    with (
        pytest.raises(MessageError, match="batch norm '1': it tracks none"),
        frozen_norm(model, frozenset({Role.STATISTICS})),
    ):
        pass
