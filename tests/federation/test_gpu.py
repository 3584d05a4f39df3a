"""Properties of training on a GPU: these tests need one."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord, Context
from torch import nn
from torch.nn import functional as F

from fedbn_flwr import BNClient, LocalGrid, client_app
from fedbn_flwr.client.optimizers import make_optimizer
from fedbn_flwr.client.rule import Batch
from fedbn_flwr.client.training import Training, train
from fedbn_flwr.data.batches import ClientBatches, Standardiser
from fedbn_flwr.data.examples import Examples
from fedbn_flwr.experiment.file.layers import load_experiment
from fedbn_flwr.experiment.run.launch import carry_out
from fedbn_flwr.extensions.compiled import graphs
from fedbn_flwr.extensions.compiled.graphs import Recording
from fedbn_flwr.extensions.compiled.passes import uncompiled
from fedbn_flwr.messages.arrays import pack, unpack
from fedbn_flwr.models.build import build_model
from fedbn_flwr.models.tensors import ModelTensors, initial_arrays
from fedbn_flwr.strategies import FedAvg, FedProx, FedTAN, FixBN, Scaffold
from tests.support import smoke

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning"),
]

CPU, GPU = torch.device("cpu"), torch.device("cuda")
MOMENTS = ((0.5,) * 3, (0.25,) * 3)


@pytest.fixture
def _float64() -> Iterator[None]:
    """Models and inputs of the test are in float64, in which devices differ by rounding only."""
    torch.set_default_dtype(torch.float64)
    Standardiser.cache_clear()
    yield
    torch.set_default_dtype(torch.float32)
    Standardiser.cache_clear()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Recording]:
    """The recordings that a test makes."""
    found: list[Recording] = []

    class Counted(Recording):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            found.append(self)

    monkeypatch.setattr(graphs, "Recording", Counted)
    return found


def images(device: torch.device) -> Examples:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (60, 3, 16, 16), dtype=torch.uint8, generator=generator)
    return Examples(pixels, torch.randint(0, 10, (60,), generator=generator)).to(device)


def federate(strategy: Any, device: torch.device, rounds: int = 3, **how: Any) -> dict[str, torch.Tensor]:
    """The model after some rounds of three clients."""
    torch.manual_seed(0)
    model = build_model("resnet20", 10, "bn")
    first = pack(initial_arrays(model))
    data = images(device)

    def build() -> nn.Module:
        return copy.deepcopy(model).to(device)

    models = [ModelTensors(build()) for _ in range(3)]

    def make_client(context: Context) -> BNClient:
        client = int(context.node_config["partition-id"])
        parts = models[client if isinstance(strategy, FedTAN) else 0]  # FedTAN's clients train at the same time
        rows = torch.arange(20) + 20 * client
        batches = ClientBatches(
            data, rows, MOMENTS, batch_size=8, client=client, seed=0, augment=("crop", "flip", "rotate")
        )
        return BNClient(parts, batches, lr=0.02, momentum=0.9, epochs=2, context=context, **how)

    grid = LocalGrid(client_app(make_client), 3)
    result = strategy.start(grid, first, num_rounds=rounds, train_config=ConfigRecord())
    return {key: torch.from_numpy(value.copy()).double() for key, value in unpack(result.arrays).items()}


def options() -> dict[str, Any]:
    return {"min_available_nodes": 3, "fraction_evaluate": 0.0}


def close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], most: float) -> None:
    for key, value in one.items():
        apart = (other[key] - value).norm() / value.norm().clamp(min=1e-3)
        assert apart <= most, f"{key}: {float(apart):g} apart"


RULES = {
    "FedAvg": lambda: FedAvg(**options()),
    "FedProx": lambda: FedProx(proximal_mu=0.1, **options()),
    "SCAFFOLD": lambda: Scaffold(**options()),
    "FedTAN": lambda: FedTAN(min_batch=1, **options()),
    "FixBN": lambda: FixBN(FedAvg(**options()), freeze_round=1),
}


@pytest.mark.usefixtures("_float64")
@pytest.mark.parametrize("rule", RULES)
def test_a_gpu_trains_what_a_cpu_trains(rule: str) -> None:
    close(federate(RULES[rule](), CPU, 2), federate(RULES[rule](), GPU, 2), 1e-7)


def test_bfloat16_goes_where_float32_goes() -> None:
    one, other = (federate(FedAvg(**options()), GPU, 1, precision=each) for each in (None, torch.bfloat16))
    torch.manual_seed(0)
    begun = {
        key: torch.from_numpy(value.copy()) for key, value in initial_arrays(build_model("resnet20", 10, "bn")).items()
    }
    moved = [torch.cat([(each[key] - begun[key]).flatten() for key in begun]) for each in (one, other)]
    assert F.cosine_similarity(*moved, dim=0) > 0.9
    assert not moved[0].equal(moved[1])


@pytest.mark.usefixtures("_float64")
@pytest.mark.filterwarnings("default")  # of PyTorch about itself
@pytest.mark.parametrize("rule", RULES)
def test_recorded_training_is_plain_training(rule: str, made: list[Recording]) -> None:
    plain, recorded = (federate(RULES[rule](), GPU, 2, compile=compile) for compile in (False, True))
    close(plain, recorded, 1e-9)
    # One for all clients and rounds, and another one of frozen layers; FedTAN's three clients have a model each.
    assert len(made) == {"FixBN": 2, "FedTAN": 3}.get(rule, 1)
    assert not uncompiled


def two_rounds(make: Callable[[], nn.Module], **how: Any) -> dict[str, torch.Tensor]:
    """The model after two rounds of one client."""
    torch.manual_seed(0)
    data = [(torch.randn(8, 3, 4, 4), torch.randint(0, 3, (8,))) for _ in range(6)]
    client = BNClient(make(), data, lr=0.1, momentum=0.9, device=GPU, **how)
    for number in (1, 2):
        update = client.train_round(initial_arrays(client.model), {"server-round": number})
    return {key: torch.from_numpy(value.copy()) for key, value in update.arrays.items()}


def with_dropout() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(48, 32), nn.BatchNorm1d(32), nn.Dropout(0.5), nn.Linear(32, 3))


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("precision", [None, torch.bfloat16])
def test_a_recording_draws_what_plain_training_draws(precision: torch.dtype | None) -> None:
    plain, recorded = (two_rounds(with_dropout, compile=compile, precision=precision) for compile in (False, True))
    close(plain, recorded, 1e-6)
    assert not uncompiled


class Unrecordable(nn.Module):
    """The host waits for the number of positive values."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = with_dropout()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.layers(images) + images[images > 0].mean()
        return logits


@pytest.mark.filterwarnings("default")
def test_a_network_that_cannot_be_recorded_is_trained_without(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "flwr"):
        plain, found = (two_rounds(Unrecordable, compile=compile) for compile in (False, True))
    close(plain, found, 1e-6)
    assert "cannot compile the model Unrecordable, so it is trained without" in caplog.text
    uncompiled.clear()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_host_waits_for_no_step(momentum: float) -> None:
    model = build_model("resnet20", 10, "bn").to(GPU)
    data = ClientBatches(
        images(GPU), torch.arange(60), MOMENTS, batch_size=8, client=0, seed=0, augment=("crop", "flip", "rotate")
    )
    optimizer = make_optimizer("sgd", dict(model.named_parameters()), 0.01, momentum=momentum)

    def checked() -> Iterator[Batch]:
        try:
            torch.cuda.set_sync_debug_mode("error")
            yield from data.epoch(2, 0)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    for batches in (data.epoch(1, 0), checked()):  # the first epoch allocates what all epochs use
        assert train(Training(model, batches.__iter__, optimizer, F.cross_entropy, GPU)).loss > 0


@pytest.mark.filterwarnings("default")  # of PyTorch about itself
@pytest.mark.parametrize("name", ["ours/label-skew", "fixbn/table4", "fixbn/tableH", "fedtan/table2", "fedbs/mnist"])
def test_every_run_finishes_on_a_gpu(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: list[Recording]
) -> None:
    on_cpu = smoke.changes
    more = {"engine": {"workers": 0, "device": "cuda"}, "train.compile": True}
    monkeypatch.setattr(smoke, "changes", lambda run: on_cpu(run) | more)
    for number, experiment in enumerate(smoke.smoke_runs(name)):
        carry_out(experiment, tmp_path / str(number), resume=False, quiet=True)
    found = [json.loads(file.read_text()) for file in tmp_path.rglob("summary.json")]
    assert len(found) == number + 1
    assert all(each["status"] == "finished" and each["device"].startswith("cuda") for each in found)
    assert made
    assert not uncompiled


def test_an_experiment_says_what_it_used(tmp_path: Path) -> None:
    changes = ["rounds=2", "seeds=[0]", "train.steps=4", "engine.device=cuda", "train.precision=bfloat16"]
    carry_out(load_experiment("demo", changes), tmp_path, resume=False)
    summaries = [json.loads(file.read_text()) for file in tmp_path.rglob("summary.json")]
    assert summaries
    for summary in summaries:
        assert summary["device"].startswith("cuda")
