"""Optimiser, schedule, loss and metrics of a run from its settings, and their checks before training starts."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedbn_flwr import named
from fedbn_flwr.client.losses import CrossEntropy, balanced_weights
from fedbn_flwr.client.metrics import Measurement, Metric, name_of
from fedbn_flwr.client.optimizers import check_optimizer, decay_of
from fedbn_flwr.client.schedules import CosineSchedule, ExponentialSchedule, LinearWarmup, Schedule, StepSchedule
from fedbn_flwr.client.training import Loss, cross_entropy
from fedbn_flwr.data.dataset import DataSet
from fedbn_flwr.data.partition.indices import hold_out
from fedbn_flwr.errors import SettingsError
from fedbn_flwr.messages.protocol import METRICS
from fedbn_flwr.results.folder.summary import is_taken
from fedbn_flwr.strategies import Rule

from .data import Shape, partition_of
from .model import choose_device
from .settings import Settings, name_in, strategy_name


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
            schedule: Schedule = StepSchedule(lr)
        case "step":
            schedule = StepSchedule(lr, options.milestones, 0.1 if options.gamma is None else options.gamma)
        case "cosine":
            schedule = CosineSchedule(lr, options.warmup)
        case "exponential":
            assert options.gamma is not None
            schedule = ExponentialSchedule(lr, options.gamma, options.warmup)
        case name:

            def schedule(server_round: int, rounds: int) -> float:
                rate: float = named.call("train.schedule.kind", name, server_round, rounds, lr)
                return rate

    return LinearWarmup(lr, options.warmup, schedule) if options.warmup else schedule


def loss_of(run: Settings, dataset: DataSet, indices: Tensor) -> Loss:
    """The loss of a client, whose training images are those at `indices`."""
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


# --- checks ------------------------------------------------------------------


def check_partition(run: Settings, rule: Rule, device: str, seeds: Sequence[int]) -> None:
    """Refuse clients with so few images that they would not exchange the statistics of their batches."""
    least = rule.traits.min_batch
    small: dict[str, int] = {}
    for seed in seeds if least > 1 else ():
        with_seed = f" with seed {seed}" if len(seeds) > 1 else ""
        for client, part in enumerate(partition_of(run.data, run.clients, seed, device)[: run.trained]):
            if (size := len(hold_out(part, run.evaluate.validation, seed, client)[0])) < least:
                small[f"{client}{with_seed} ({size})"] = size
    if small:
        raise SettingsError(
            f"{len(small)} of {len(seeds) * run.trained} clients have fewer than {least} training images: "
            f"{', '.join([*small][:5])}{', ...' if len(small) > 5 else ''}; with strategy "
            f"{strategy_name(run.strategy)} they refuse to exchange the statistics of so small batches, because these "
            "reveal the images; change clients or data.partition, or allow it with strategy.min_batch: "
            f"{min(small.values())}"
        )


def check_training(run: Settings, rule: Rule, model: nn.Module, shape: DataSet | Shape) -> None:
    """Refuse settings with which training cannot begin or is not what the strategy assumes."""
    train, weights = run.train, run.train.class_weights
    _check_strategy(run, rule)
    if weights == "balanced" and shape.dense:
        raise SettingsError(
            "train.class_weights is 'balanced', but segmentation data have masks of labels, which are not "
            "counted before training; give a list of weights"
        )
    if weights not in (None, "balanced") and len(weights) != shape.classes:
        raise SettingsError(
            f"train.class_weights has {len(weights)} weights, but the data have {shape.classes} classes"
        )
    for server_round in (1, run.rounds):
        learning_rate(run, server_round)
    if train.optimizer != "sgd":
        decays = decay_of(model, norm=train.norm_weight_decay, bias=train.bias_weight_decay)
        try:
            check_optimizer(
                train.optimizer,
                {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad},
                momentum=train.momentum,
                weight_decay=train.weight_decay,
                other_decay=decays,
            )
        except SettingsError as error:
            raise SettingsError(f"train.{error}") from None
    labels = torch.arange(2 * shape.classes) % shape.classes
    logits = torch.randn(len(labels), shape.classes, generator=torch.Generator().manual_seed(0))
    if shape.dense:
        labels, logits = labels[:, None, None].expand(-1, 2, 2), logits[:, :, None, None].expand(-1, -1, 2, 2)
    _check_loss(run, logits.clone().requires_grad_(), labels)
    _check_metrics(run, logits, labels)


def _check_strategy(run: Settings, rule: Rule) -> None:
    train, name = run.train, strategy_name(run.strategy)
    optimizer = name_in(train.optimizer)
    by_sgd = optimizer.lower() == "sgd"
    if rule.traits.linear_steps and not by_sgd:
        raise SettingsError(
            f"train.optimizer is {optimizer!r}, but strategy {name} needs sgd: the mean of its clients' first steps is "
            "the step on the union of their batches, which holds only for a step that is linear in the gradient"
        )
    if rule.traits.linear_steps and train.clip is not None:
        raise SettingsError(
            f"train.clip is {train.clip}, but in the first step of strategy {name} each client has a part of the "
            "gradient of all, and clipping the parts changes their mean; leave train.clip out"
        )
    if train.batch_size < rule.traits.min_batch:
        raise SettingsError(
            f"train.batch_size is {train.batch_size}, but with strategy {name} clients refuse to exchange the "
            f"statistics of batches of fewer than {rule.traits.min_batch} images, because these reveal the images; use "
            f"a larger train.batch_size, or allow it with strategy.min_batch: {train.batch_size}"
        )
    if rule.traits.averages_momentum and not (by_sgd and train.momentum):
        found = f"train.momentum is {train.momentum}" if by_sgd else f"train.optimizer is {optimizer!r}"
        raise SettingsError(
            f"{found}, but strategy {name} averages the momentum of SGD; expected train.optimizer sgd and a "
            "train.momentum above zero"
        )


def _check_loss(run: Settings, logits: Tensor, labels: Tensor) -> None:
    if (loss := own_loss(run)) is None:
        return
    name = name_in(run.train.loss)
    try:
        value: Any = loss(logits, labels)
    except Exception as error:
        raise SettingsError(
            f"train.loss={name!r} failed for logits {list(logits.shape)} and labels {list(labels.shape)}: "
            f"{type(error).__name__}: {error}"
        ) from error
    if not (isinstance(value, Tensor) and value.ndim == 0 and value.requires_grad):
        found = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise SettingsError(
            f"train.loss={name!r} returned {found}; expected a differentiable scalar tensor, the mean over the examples"
        )


def _check_metrics(run: Settings, logits: Tensor, labels: Tensor) -> None:
    metrics = metrics_of(run)
    names = [name_of(metric) for metric in metrics]
    for name, metric in zip(names, metrics, strict=True):
        if names.count(name) > 1:
            raise SettingsError(f"evaluate.metrics has the name {name!r} twice")
        if callable(metric) and is_taken(name):
            raise SettingsError(
                f"evaluate.metrics: a function is called {name!r}, and a run reports another figure under this name; "
                f"rename the function, for instance to my_{name}"
            )
    if logits.ndim > 2 and "auc" in names:
        raise SettingsError(
            "evaluate.metrics has 'auc', which ranks images, but segmentation data have masks of labels; "
            f"expected others of {', '.join(METRICS)}"
        )
    measurement = Measurement(metrics)
    measurement.add(logits, labels, None)
    try:
        measurement.values(strict=True)
    except Exception as error:
        raise SettingsError(
            f"evaluate.metrics: a metric of {', '.join(names)} failed for logits {list(logits.shape)} and labels "
            f"{list(labels.shape)}: {type(error).__name__}: {error}"
        ) from error


def work_of(run: Settings) -> list[int] | None:
    """The images of each client if it trains on all of them, as the expected relative duration of its messages."""
    if run.train.steps is not None or not run.evaluate.server:  # the same steps for all, or no data in this process
        return None
    device = str(choose_device(run.engine.device))
    return [len(part) for part in partition_of(run.data, run.clients, run.seed, device)]
