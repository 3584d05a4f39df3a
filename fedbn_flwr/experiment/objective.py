"""Optimiser, schedule, loss and metrics of a run from its settings, and their checks before training starts."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from fedbn_flwr import named
from fedbn_flwr.client.losses import CrossEntropy, balanced_weights
from fedbn_flwr.client.metrics import Metric
from fedbn_flwr.client.schedules import Schedule, cosine, exponential, linear_warmup, steps
from fedbn_flwr.client.training import Loss, cross_entropy
from fedbn_flwr.data.dataset import DataSet
from fedbn_flwr.errors import SettingsError

from .settings import Settings, name_in


def learning_rate(run: Settings, server_round: int) -> float:
    rate = schedule_of(run)(server_round, run.rounds)
    if not (isinstance(rate, int | float) and rate >= 0):
        raise SettingsError(
            f"train.schedule.kind={run.train.schedule.kind!r} returned {rate!r} for round {server_round}; expected a "
            "learning rate, zero or more"
        )
    return float(rate)


def schedule_of(run: Settings) -> Schedule:
    lr, options = run.train.lr, run.train.schedule
    match options.kind:
        case "constant":
            schedule: Schedule = steps(lr)
        case "step":
            schedule = steps(lr, options.milestones, 0.1 if options.gamma is None else options.gamma)
        case "cosine":
            schedule = cosine(lr, options.warmup)
        case "exponential":
            assert options.gamma is not None
            schedule = exponential(lr, options.gamma, options.warmup)
        case name:

            def schedule(server_round: int, rounds: int) -> float:
                rate: float = named.call("train.schedule.kind", name, server_round, rounds, lr)
                return rate

    return linear_warmup(lr, options.warmup, schedule) if options.warmup else schedule


def loss_of(run: Settings, dataset: DataSet, indices: Tensor) -> Loss:
    """The loss of a client, whose training examples are those at `indices`."""
    train = run.train
    if (loss := own_loss(run)) is not None:
        return loss
    if not train.label_smoothing and train.class_weights is None:
        return cross_entropy
    weights: Tensor | None = None
    if train.class_weights == "balanced":
        weights = balanced_weights(dataset.train.labels[indices.to(dataset.train.labels.device)], dataset.classes)
    elif train.class_weights is not None:
        weights = torch.tensor(train.class_weights, dtype=torch.float64, device=dataset.train.device)
    return CrossEntropy(train.label_smoothing, weights)


def own_loss(run: Settings) -> Loss | None:
    """The loss of the user, or None for cross entropy."""
    name = name_in(run.train.loss)
    if name == "cross_entropy":
        return None
    options = {} if isinstance(run.train.loss, str) else {k: v for k, v in run.train.loss.items() if k != "name"}
    function = named.load("train.loss", name)
    if isinstance(function, type):
        made: Loss = named.call("train.loss", name, **options)
        return made
    return functools.partial(function, **options) if options else function


def metrics_of(run: Settings) -> Sequence[Metric]:
    return [named.load("evaluate.metrics", name) if ":" in name else name for name in run.evaluate.metrics]
