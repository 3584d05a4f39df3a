"""Compiled training passes beside uncompiled ones."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch
import torch._inductor.config as inductor
from torch import nn
from torch._inductor.utils import fresh_cache
from torch.utils.data import DataLoader, TensorDataset

from fedbn_flwr.client.client import BNClient
from fedbn_flwr.client.model_tensors import ModelTensors, flatten_storage
from fedbn_flwr.client.rules.fixbn import FREEZE
from fedbn_flwr.messages.aggregate import Arrays

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # of PyTorch about itself

CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "proximal term": {"proximal-mu": 0.1},
    "frozen": {FREEZE: "statistics"},
}


def net(width: int = 8) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(12, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 3))


def images() -> DataLoader[Any]:
    random = torch.Generator().manual_seed(1)
    inputs, targets = torch.randn(44, 3, 2, 2, generator=random), torch.randint(0, 3, (44,), generator=random)
    return DataLoader(TensorDataset(inputs, targets), batch_size=8)  # the last batch has four images


def trained(tensors: ModelTensors, first: Arrays, config: dict[str, Any], *, compile: bool) -> tuple[Arrays, float]:
    client = BNClient(tensors, images(), lr=0.05, momentum=0.9, steps=50, clip=5.0, compile=compile)
    update = client.train_round(first, {"server-round": 1, **config})
    return {key: value.copy() for key, value in update.arrays.items()}, update.metrics["train-loss"]


def test_compiled_passes_give_the_results_of_uncompiled_ones(caplog: pytest.LogCaptureFixture) -> None:
    plain = ModelTensors(flatten_storage(net()))
    compiled = ModelTensors(flatten_storage(net()))
    first = {key: value.copy() for key, value in plain.taken(plain.roles).items()}
    for config in CONFIGS.values():
        expected, loss = trained(plain, first, config, compile=False)
        found, found_loss = trained(compiled, first, config, compile=True)
        assert found_loss == pytest.approx(loss, rel=1e-5)
        for key, value in expected.items():
            np.testing.assert_allclose(found[key], value, rtol=1e-4, atol=1e-5)
        assert any(not np.array_equal(found[key], first[key]) for key in first)
    assert "cannot compile" not in caplog.text


def test_a_model_that_cannot_be_compiled_is_trained_without(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inductor.cpp, "cxx", ("no-such-compiler",))
    tensors = ModelTensors(net(7))  # a model of another shape: PyTorch reuses the passes of one that it has compiled
    first = {key: value.copy() for key, value in tensors.taken(tensors.roles).items()}
    with fresh_cache(), caplog.at_level(logging.WARNING, "flwr"):
        found, _ = trained(tensors, first, {}, compile=True)
        trained(tensors, first, {}, compile=True)
    expected, _ = trained(ModelTensors(net(7)), first, {}, compile=False)
    for key, value in expected.items():
        np.testing.assert_array_equal(found[key], value)
    assert caplog.text.count("PyTorch cannot compile the model Sequential, so it is trained without") == 1
