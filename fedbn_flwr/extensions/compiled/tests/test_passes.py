"""Compiled training beside uncompiled training."""

from __future__ import annotations

import logging
import shutil
import sysconfig
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fedbn_flwr import LocalGrid, client_app, convert_norm
from fedbn_flwr.client.client import BNClient
from fedbn_flwr.client.losses import make_loss
from fedbn_flwr.experiment.registry import STRATEGIES, build_strategy
from fedbn_flwr.messages.aggregate import Arrays
from fedbn_flwr.messages.arrays import pack, unpack
from fedbn_flwr.models.tensors import initial_arrays
from tests.support.series import CLIENTS, Text

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),  # of PyTorch about itself
]

compiles = pytest.mark.skipif(
    not (shutil.which("g++") and (Path(sysconfig.get_path("include")) / "Python.h").exists()),
    reason="PyTorch compiles with g++ and Python's headers (Debian: g++ python3-dev)",
)

# The settings that a strategy requires, and those that make it change the steps of the first round.
SPECS: dict[str, dict[str, Any]] = {
    "FedProx": {"proximal_mu": 0.5},
    "FixBN": {"freeze_round": 1},
    "FedTANII": {"fedtan_rounds": 1},
    "Private": {"noise_seed": 0},
}
NORMS = {"HeteroBN": "sbn", "FedWon": "won", "HBN": "hbn"}


def net(width: int = 8, norm: str = "bn") -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 3))
    return convert_norm(model, norm).double()


def images(client: int = 0) -> DataLoader[Any]:
    random = torch.Generator().manual_seed(client + 1)
    inputs, targets = torch.randn(44, 3, 2, 2, generator=random).double(), torch.randint(0, 3, (44,), generator=random)
    return DataLoader(TensorDataset(inputs, targets), batch_size=8)  # the last batch has four images


def federation(rule: str, first: ArrayRecord, *, compile: bool) -> dict[str, np.ndarray]:
    """The server's model after 50 steps of two clients in two rounds, and the last round's metrics."""

    def make_client(context: Context) -> BNClient:
        client = int(context.node_config["partition-id"])
        batches = images(client) if client else list(images(client))  # a list of batches has no batch size
        loss = make_loss("cross_entropy", class_weights=torch.tensor([1.0, 2.0 + client, 3.0]))
        options: dict[str, Any] = {"lr": lambda number: 0.03 / number, "momentum": 0.5, "steps": 25, "loss": loss}
        return BNClient(net(norm=NORMS.get(rule, "bn")), batches, compile=compile, context=context, **options)

    models: list[ArrayRecord] = []
    spec = {"name": rule, **SPECS.get(rule, {})}
    result = build_strategy(spec, fraction_evaluate=0.0, min_batch=1).start(
        LocalGrid(client_app(make_client), 2), first, num_rounds=2, evaluate_fn=lambda _, arrays: models.append(arrays)
    )
    metrics = {f"metric {key}": np.array(value) for key, value in result.train_metrics_clientapp[2].items()}
    return {key: value.copy() for key, value in unpack(models[-1]).items()} | metrics


def reset() -> Any:
    """Forget compiled code; what the compiler counts from now on. Only here, as its import takes seconds."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    return counters


def distance(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> float:
    return max(float(np.abs(a[key] - b[key]).max()) for key in a)


@compiles
@pytest.mark.parametrize("rule", sorted(STRATEGIES))
def test_each_strategy_has_the_results_of_uncompiled_training(rule: str, flower_log: pytest.LogCaptureFixture) -> None:
    first = initial_arrays(net(norm=NORMS.get(rule, "bn")))
    expected, found = (federation(rule, pack(first), compile=compile) for compile in (False, True))
    assert found.keys() == expected.keys()
    assert distance(found, expected) < 1e-6, "of which Secure rounds to 6e-8"
    assert "cannot compile" not in flower_log.text


@compiles
@pytest.mark.parametrize(
    ("norm", "config"),
    [("hbn", {}), ("hbn", {"fedbn.hbn": "batch"}), ("bn", {"fedbn.fixbn-freeze": "statistics"})],
)
def test_what_a_round_measures_is_that_of_uncompiled_training(norm: str, config: dict[str, Any]) -> None:
    """Also after a round without measurements, whose compiled code has no hooks."""
    measuring = {**config, "fedbn.fixbn-moments": True} if norm == "bn" else config
    first = initial_arrays(net(norm=norm))

    def rounds(*, compile: bool) -> list[Arrays]:
        client = BNClient(net(norm=norm), images(), lr=0.03, momentum=0.5, steps=5, compile=compile)
        first_config = {"server-round": 1, **({"fedbn.fixbn-freeze": "statistics"} if norm == "bn" else {})}
        return [client.train_round(first, each).arrays for each in (first_config, {"server-round": 2, **measuring})]

    for found, expected in zip(rounds(compile=True), rounds(compile=False), strict=True):
        assert distance(found, expected) < 1e-10


@compiles
@pytest.mark.parametrize(("rule", "graphs"), [("FedTAN", 1), ("FixBN", 2)])
def test_all_clients_and_rounds_share_the_compiled_code(rule: str, graphs: int) -> None:
    """Also with a model per client (FedTAN), another learning rate and loss, and a smaller last batch."""
    counters = reset()
    federation(rule, pack(initial_arrays(net())), compile=True)
    assert counters["stats"]["unique_graphs"] == graphs


def test_a_model_that_cannot_be_compiled_is_trained_without(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch._inductor.config as inductor
    from torch._inductor.utils import fresh_cache

    def trained(*, compile: bool) -> Arrays:
        client = BNClient(net(7), images(), lr=0.05, momentum=0.9, compile=compile)
        return client.train_round(first, {"server-round": 1}).arrays

    monkeypatch.setattr(inductor.cpp, "cxx", ("no-such-compiler",))
    # A model of another shape: PyTorch reuses the code of one that it has compiled.
    first = {key: value.copy() for key, value in initial_arrays(net(7)).items()}
    with fresh_cache(), caplog.at_level(logging.WARNING, "flwr"):
        found = trained(compile=True)
        trained(compile=True)
    expected = trained(compile=False)
    for key, value in expected.items():
        np.testing.assert_array_equal(found[key], value)
    assert caplog.text.count("PyTorch cannot compile the model Sequential, so it is trained without") == 1
    assert "install g++ and Python's headers" in caplog.text


class OfDict(nn.Module):
    """The network of a dict of two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        y: torch.Tensor = self.net(inputs["left"] + inputs["right"][:, :, :2])
        return y


@compiles
def test_inputs_may_be_a_dict_and_those_of_another_length_are_not_compiled() -> None:
    counters = reset()
    data = [({"left": x, "right": x.repeat(1, 1, 1 + i % 2, 1)}, y) for i, (x, y) in enumerate(images())]
    found, expected = (BNClient(OfDict(), data, lr=0.05, compile=compile) for compile in (True, False))
    for value, twin in zip(*(each.fit(each.get_parameters({}), {})[0] for each in (found, expected)), strict=True):
        np.testing.assert_allclose(value, twin, rtol=1e-9, atol=1e-12)
    assert counters["stats"]["unique_graphs"] == 1


def test_a_model_with_masks_is_trained_without_compiling(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "flwr"):
        found, expected = (BNClient(Text(), CLIENTS[:2], lr=0.05, compile=compile) for compile in (True, False))
        start = expected.get_parameters({})
        for value, twin in zip(*(each.fit(start, {})[0] for each in (found, expected)), strict=True):
            np.testing.assert_array_equal(value, twin)
    assert "cannot compile the model Text, so it is trained without: MaskedBatchNorm1d has another" in caplog.text


class Alternating(nn.Module):
    """Its passes change an attribute, and draw random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.heads = nn.Linear(12, 8), nn.ModuleList([nn.Linear(8, 3), nn.Linear(8, 3)])
        self.dropout, self.is_second = nn.Dropout(0.5), False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        head = self.heads[1] if self.is_second else self.heads[0]
        self.is_second = not self.is_second
        logits: torch.Tensor = head(self.dropout(self.body(inputs.flatten(1))).relu())
        return logits


@compiles
@pytest.mark.parametrize("in_thread", [False, True])
def test_a_network_that_alternates_and_draws_trains_as_without_compilation(in_thread: bool) -> None:
    """In any thread: PyTorch's compiler has separate settings in each, and a layer-wise round trains in its own."""
    ends = []

    def trained(*, compile: bool) -> None:
        reset()
        torch.manual_seed(0)
        client = BNClient(Alternating().double(), images(), lr=0.1, epochs=2, compile=compile)
        ends.append(dict(client.train_round(initial_arrays(client.model), {"server-round": 1}).arrays))

    trained(compile=False)
    for _ in range(2):
        if in_thread:
            thread = threading.Thread(target=trained, kwargs={"compile": True})
            thread.start()
            thread.join()
        else:
            trained(compile=True)
    assert len(ends) == 3
    assert max(distance(ends[0], end) for end in ends) < 1e-10
