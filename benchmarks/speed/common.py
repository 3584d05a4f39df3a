"""Shared by the measurements: figures, the plain PyTorch loop, and a round of clients with the same images.

Each measurement alternates between the two sides and reports the median of their ratio over the repetitions, with
minimum and maximum: on a shared machine a ratio within one run is less noisy than a time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from torch import Tensor, nn
from torch.nn import functional as F

from fedbn_flwr.batch import first
from fedbn_flwr.client.app import client_app
from fedbn_flwr.client.client import BNClient
from fedbn_flwr.data.batches import ClientBatches
from fedbn_flwr.data.examples import Examples
from fedbn_flwr.models.build import build_model
from fedbn_flwr.models.tensors import ModelTensors
from fedbn_flwr.strategies import FedAvg

BATCH = 20
MOMENTS = ((0.5, 0.5, 0.5), (0.25, 0.25, 0.25))


@dataclass(frozen=True)
class Options:
    repeats: int
    steps: int  # of a client in a round, in `overhead` and `gpu`
    device: torch.device
    workers: int


@dataclass(frozen=True)
class Figure:
    """One measured number: median, minimum and maximum over the repetitions, which a file keeps."""

    name: str
    value: float
    low: float
    high: float
    unit: str
    goal: str = ""
    met: bool | None = None
    values: tuple[float, ...] = ()  # of the repetitions


def figure(
    name: str, values: Sequence[float], unit: str, *, most: float | None = None, least: float | None = None
) -> Figure:
    middle = statistics.median(values)
    goal, met = "", None
    if most is not None:
        goal, met = f"at most {most:g}", middle <= most
    if least is not None:
        goal, met = f"at least {least:g}", middle >= least
    kept = tuple(float(f"{value:.4g}") for value in values)
    return Figure(name, middle, min(values), max(values), unit, goal, met, kept)


def seconds(action: Callable[[], Any]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


class BareLoop:
    """Plain PyTorch: SGD with momentum on images that are gathered and normalised batch by batch."""

    def __init__(self, data: Examples, batch: int = BATCH, model: nn.Module | None = None) -> None:
        self.images, self.labels = first(data.inputs), data.labels
        self.batch = batch
        device = self.images.device
        self.model = resnet20(device) if model is None else model
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.mean = torch.tensor(MOMENTS[0], device=device).view(1, 3, 1, 1)
        self.deviation = torch.tensor(MOMENTS[1], device=device).view(1, 3, 1, 1)

    def __call__(self, steps: int) -> None:
        self.model.train()
        total = torch.zeros((), device=self.images.device)
        rows = torch.randperm(len(self.images))[: steps * self.batch].to(self.images.device)
        for batch in rows.split(self.batch):
            inputs = (self.images[batch].float() / 255 - self.mean) / self.deviation
            self.optimizer.zero_grad()
            loss = F.cross_entropy(self.model(inputs), self.labels[batch])
            loss.backward()
            self.optimizer.step()
            total += loss.detach()
        float(total)


def resnet20(device: torch.device, norm: str = "bn") -> nn.Module:
    return build_model("resnet20", 10, norm).to(device)


def random_images(count: int, device: torch.device) -> Examples:
    generator = torch.Generator().manual_seed(0)
    images: Tensor = torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8, generator=generator)
    return Examples(images.to(device), torch.randint(0, 10, (count,), generator=generator).to(device))


def same_clients(
    data: Examples, model_of: Callable[[int], ModelTensors], steps: int, *, batch: int = BATCH, **options: Any
) -> ClientApp:
    """An app whose clients have the same images; `model_of(client)` returns a client's model.

    Convolutions are plain, as in the bare loop, unless `options` say otherwise.
    """
    options = {"channels_last": False} | options

    def make_client(context: Context) -> BNClient:
        client = int(context.node_config["partition-id"])
        batches = ClientBatches(data, torch.arange(len(data.labels)), MOMENTS, batch_size=batch, client=client, seed=0)
        return BNClient(model_of(client), batches, lr=0.01, momentum=0.9, steps=steps, context=context, **options)

    return client_app(make_client)


def train_round(strategy: FedAvg, grid: Grid, number: int, arrays: ArrayRecord) -> ArrayRecord:
    messages = list(strategy.configure_train(number, arrays, ConfigRecord(), grid))
    mean, _ = strategy.aggregate_train(number, grid.send_and_receive(messages))
    assert mean is not None
    return mean
