"""Optimiser, schedule, loss and metrics of a run from its settings, and their checks before training starts."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedbn_flwr import named
from fedbn_flwr.client.evaluation import Metric
from fedbn_flwr.client.losses import balanced_weights, make_loss
from fedbn_flwr.client.schedules import Schedule, cosine, exponential, linear_warmup, steps
from fedbn_flwr.client.training import Loss
from fedbn_flwr.data.dataset import DataSet
from fedbn_flwr.errors import SettingsError
from fedbn_flwr.tasks import Task

from .sections import refuse
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
    train, task = run.train, dataset.task
    if own_loss(run) is not None or not (train.label_smoothing or train.class_weights):
        return plain_loss(run, task)
    weights: Tensor | None = None
    if train.class_weights == "balanced":
        weights = balanced_weights(dataset.train.labels[indices.to(dataset.train.labels.device)], dataset.classes)
    elif train.class_weights is not None:
        weights = torch.tensor(train.class_weights, dtype=torch.float64, device=dataset.train.device)
    options = {"label_smoothing": train.label_smoothing, "class_weights": weights}
    return make_loss(name_in(train.loss or task.losses[0]), **options)


def plain_loss(run: Settings, task: Task) -> Loss:
    """The loss that evaluations report, without label smoothing and class weights."""
    if (own := own_loss(run)) is not None:
        return own
    return make_loss(name_in(run.train.loss or task.losses[0]), **_options(run))


def own_loss(run: Settings) -> Loss | None:
    """The loss of the user, or None for one of `tasks.LOSSES`."""
    name = name_in(run.train.loss or "")
    if not named.is_name(name):
        return None
    options, function = _options(run), named.load("train.loss", name)
    if isinstance(function, type):
        made: Loss = named.call("train.loss", name, **options)
        return made
    return functools.partial(function, **options) if options else function


def _options(run: Settings) -> dict[str, Any]:
    loss = run.train.loss
    return {key: value for key, value in loss.items() if key != "name"} if isinstance(loss, Mapping) else {}


def targets_like(task: Task, count: int, number: int, size: Sequence[int] = ()) -> Tensor:
    """Targets of so many examples, to try a loss: of all `count` classes in turn, of labels, or of numbers."""
    labels = torch.arange(number) % count
    if task.form == "classes":
        return labels.reshape(-1, *(1 for _ in size)).expand(-1, *size)
    targets = torch.randn(number, count, generator=torch.Generator().manual_seed(1))
    targets = (targets > 0).float() if task.form == "labels" else targets
    return targets[:, 0] if count == 1 else targets


def check_loss(run: Settings, task: Task, count: int) -> None:
    """Refuse a loss, or an option of it, that does not suit the targets."""
    train, found = run.train, f"{run.data.name!r} has {task.targets} ({task.name})"
    suited = f"{' or '.join(task.losses)}, or " if task.losses else ""
    name = name_in(train.loss) if train.loss is not None else task.losses[0] if task.losses else "missing"
    refuse(
        {
            f"data.task is 'binary', but {run.data.name!r} has {count} classes; expected two, or task: "
            "classification": task.name == "binary" and count != 2,
            f"train.loss is {name}, but {found}; expected {suited}module:callable, a loss of your own": own_loss(run)
            is None
            and name not in task.losses,
            f"train.label_smoothing is {train.label_smoothing}, but {found}; leave it out": train.label_smoothing > 0
            and "label_smoothing" not in task.options,
            f"train.class_weights is {train.class_weights}, but {found}; leave it out": train.class_weights is not None
            and "class_weights" not in task.options,
        }
    )


def metrics_of(run: Settings) -> Sequence[Metric]:
    return [named.load("evaluate.metrics", name) if ":" in name else name for name in run.evaluate.metrics]
