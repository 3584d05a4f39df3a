"""What an experiment costs, for `fedbn list experiments`: images to train on, and a rough time, without its data."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedbn_flwr.cores import cores
from fedbn_flwr.data.catalogue import CATALOGUE

from .settings import Data, Experiment, Model, Settings, resolve

# Limits of a timed step: sides of an image, and values of a batch.
_SIDE = 256
_VALUES = 2**20
_STEPS = 3


@dataclass(frozen=True)
class Cost:
    runs: int
    images: int | None  # to train on in all runs; None: not known without the data
    minutes: float | None = None  # of all training steps on all cores of this machine; None: not measured


def cost_of(experiment: Experiment, *, timed: bool = False) -> Cost:
    """The cost of all runs. `timed`: a few steps are trained for each network and batch size."""
    images = [images_of(run) for run in experiment.runs]
    if any(count is None for count in images):
        return Cost(len(images), None)
    total = sum(count or 0 for count in images)
    if not timed or any(run.data.name not in CATALOGUE for run in experiment.runs):
        return Cost(len(images), total)
    seconds: list[float] = []
    for run, count in zip(experiment.runs, images, strict=True):
        data = Data(name=run.data.name, size=run.data.size, crop=run.data.crop)  # what decides the time
        seconds.append((count or 0) * _seconds(data, run.model, run.train.batch_size))
    return Cost(len(images), total, sum(seconds) / 60 / cores())


def images_of(run: Settings) -> int | None:
    """The images that all clients of a run train on, one image counted each time; None if they are not known.

    Exact if all clients take part in each round, and else expected. Smaller last batches count as whole ones.
    """
    strategy = _innermost(run.strategy)
    least, share = strategy.get("min_train_nodes", min(2, run.trained)), strategy.get("fraction_train", 1)
    if not isinstance(least, int) or not isinstance(share, int | float) or not 0 <= share <= 1:
        return None  # the strategy will be refused
    clients = max(int(run.trained * share), least)
    if run.train.steps is not None:
        return run.rounds * clients * run.train.steps * run.train.batch_size
    entry, held = CATALOGUE.get(run.data.name), run.data.images
    if (of_each := getattr(run.data.partition, "images", None)) is not None:
        held = of_each * run.clients
    if held is None:
        held = entry.images if entry is not None and not run.data.domains else None
    if held is None:
        return None
    trained = held * (1 - run.evaluate.validation) * clients / run.clients
    return round(run.rounds * (run.train.epochs or 1) * trained)


def _innermost(strategy: Mapping[str, Any]) -> Mapping[str, Any]:
    """The strategy that chooses the clients."""
    base = strategy.get("base")
    return _innermost(base) if isinstance(base, Mapping) else strategy


@functools.lru_cache(maxsize=1000)
def _seconds(data: Data, model: Model, batch_size: int) -> float:
    """The seconds of a training step divided by its images, on one core.

    The network trains on random images of the data set's size. Of larger ones, it trains on a square of 256 by 256
    pixels, and the time is multiplied by the ratio of the pixels.
    """
    import torch
    from torch.nn import functional as F

    from .data import Shape
    from .model import make_model

    run = resolve(Settings(data=data, model=model))
    entry = CATALOGUE[data.name]
    size = run.data.crop or run.data.size or entry.size
    assert size is not None  # an entry has one of them
    sides = (size, size) if isinstance(size, int) else size
    shape = Shape(entry.classes, entry.channels, sides, entry.ids is not None)
    height, width = (min(side, _SIDE) for side in shape.size)
    ratio = shape.size[0] * shape.size[1] / (height * width)
    count = max(2, min(batch_size, _VALUES // (shape.channels * height * width)))
    network = make_model(run, shape).train()
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3)
    images = torch.randn(count, shape.channels, height, width)
    labels = torch.arange(count) % shape.classes
    if shape.dense:
        labels = labels[:, None, None].expand(count, height, width)
    times = []
    for _ in range(_STEPS):
        began = time.perf_counter()
        optimizer.zero_grad()
        F.cross_entropy(network(images), labels).backward()
        optimizer.step()
        times.append(time.perf_counter() - began)
    return ratio * min(times[1:]) / count
