"""What a run is made of, from its settings: device, data, model, schedule, loss and metrics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Real
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fedbn_flwr import named, seeding
from fedbn_flwr.batch import first
from fedbn_flwr.client.evaluation import Metric
from fedbn_flwr.client.losses import balanced_weights, make_loss
from fedbn_flwr.client.rule import Loss
from fedbn_flwr.data import Moments
from fedbn_flwr.data.dataset import DataSet, Schema
from fedbn_flwr.errors import SettingsError
from fedbn_flwr.models.build import build_model
from fedbn_flwr.results.folder.clients import PartitionCounts
from fedbn_flwr.tasks import REGRESSION, Task
from fedbn_flwr.trees import Tree

from .data import Shape, load_data, normalisation_of, shape_without_data, shares_of, split_moments, splits_of
from .settings import Settings, name_in, options_in

if TYPE_CHECKING:  # clients need no strategies
    from fedbn_flwr.strategies import Rule


_LARGE_TARGETS = 5.0  # numbers of unit variance are smaller


@dataclass(eq=False)
class RunParts:
    """What the server and the clients of a run both need, each part made once, when it is first used.

    `agreed` are the moments of all sites' inputs and targets, once the sites have agreed on them.
    """

    run: Settings
    listed: str | None = field(default=None, kw_only=True)  # the experiment's data set, if `run` has a site's

    @cached_property
    def device(self) -> torch.device:
        return choose_device(self.run.engine.device)

    @cached_property
    def metrics(self) -> Sequence[Metric]:
        names = self.run.evaluate.metrics
        return [named.load("evaluate.metrics", name) if ":" in name else name for name in names]

    @cached_property
    def dataset(self) -> DataSet | None:
        """None: the server has no data."""
        return load_data(self.run.source, str(self.device)) if self.run.evaluate.server else None

    @property
    def shape(self) -> DataSet | Shape:
        return self.dataset or shape_without_data(self.run)

    @property
    def task(self) -> Task:
        return self.shape.task

    def normalise(self, agreed: Moments | None) -> Moments:
        """A server without data has no moments of the clients' data before they agree on them."""
        if agreed is not None:
            return split_moments(agreed, self.shape)[0]
        return normalisation_of(self.run, self.shape, self.listed)

    def units(self, agreed: Moments | None) -> Moments | None:
        """Mean and deviation of the regression targets, if they are scaled."""
        if self.run.data.targets and agreed is not None:
            return split_moments(agreed, self.shape)[1]
        return self.dataset.units if self.run.data.targets and self.dataset is not None else None


@dataclass(eq=False)
class Parts(RunParts):
    """What the server of a run needs."""

    name: str
    rule: Rule
    own_data: bool = False  # nodes may have data of their own; what they answer decides how the partition is checked

    @cached_property
    def partition(self) -> list[Tensor]:
        """Indices of each client's training examples."""
        return shares_of(self.run.source, self.run.clients, self.run.seed, str(self.device))[0]

    def split(self, client: int) -> tuple[Tensor, Tensor]:
        """Indices of the examples that a client trains on, and of those that it holds out."""
        return splits_of(self.run, str(self.device))[client]

    @cached_property
    def held_out(self) -> Tensor:
        """Indices of the training examples that all clients that train together hold out."""
        share, unseen = self.run.evaluate.validation, self.run.evaluate.unseen.clients
        held = [self.split(client)[1] for client in range(len(self.partition)) if client not in unseen]
        if not any(map(len, held)):
            raise SettingsError(
                f"evaluate.validation is {share:g}, which is less than half an example for each of the {len(held)} "
                "clients (or half a value of data.test.by, or half a series); use a larger share or fewer clients"
            )
        return torch.cat(held)

    def advice_on_targets(self) -> str:
        """What to do if regression targets are so large that a network at its initial values is far from them."""
        if self.task is not REGRESSION or self.dataset is None or self.run.data.targets:
            return ""
        size = float(first(self.dataset.train.targets).double().square().mean()) ** 0.5
        said = f"The regression targets are {size:.3g} in size (root mean square), and a network begins near 0"
        return f"; or set data.targets: scale. {said}" if size > _LARGE_TARGETS else ""

    def work(self) -> list[int] | None:
        """The examples of each client if it trains on all of them, as the expected relative duration of a message."""
        if self.run.train.steps is not None or self.dataset is None:  # the same steps for all, or no data here
            return None
        return [len(part) for part in self.partition]

    @cached_property
    def model(self) -> nn.Module:
        return make_model(self.run, self.shape).to(self.device)

    def release(self) -> None:
        """Free the model; it is built again when it is used."""
        vars(self).pop("model", None)

    def description(self, agreed: Moments | None, of_sites: Schema) -> Tree:
        """The content of model.json; `of_sites` is the schema on which sites with data of their own agree."""
        normalise, units = (
            each and dict(zip(("mean", "std"), each, strict=True))
            for each in (self.normalise(agreed), self.units(agreed))
        )
        return {
            "build": model_arguments(self.run, self.shape),
            "normalise": normalise,
            "targets": units,
            "classes": self.run.data.class_names,
            **(of_sites if self.dataset is None else self.dataset.schema),
            "categories": {name: [*texts] for name, texts in self.run.data.categories.items()},
            "local": sorted(self.rule.traits.local),
            "sent_back": self.rule.traits.sent_back,
        }


def counts_of(run: Settings, dataset: DataSet, partition: Sequence[Tensor]) -> PartitionCounts:
    """Count the examples of each client by class; `partition` has the rows of each."""
    strata, options = dataset.strata(), run.data.partition.model_dump(exclude_none=True)
    parts = [part.cpu() for part in partition]
    # A segmentation example has many classes: only the examples are counted.
    counts = [torch.bincount(strata.train[part], minlength=len(strata.names)).tolist() for part in parts]
    kind = options.pop("kind")
    words = [kind, *(f"{key}={value}" for key, value in options.items())]
    title = f"{run.data.name}: {', '.join(words)}, clients={run.clients}, seed={run.seed}"
    groups = {"domain": dataset.domains, "natural": dataset.groups}.get(kind)  # after which clients are named
    names = () if groups is None else tuple(groups.names[int(groups.train[int(part[0])])] for part in parts)
    return PartitionCounts(title=title, classes=strata.names, counts=tuple(map(tuple, counts)), clients=names)


# --- device and model ---


def choose_device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise SettingsError("engine.device is 'cuda', but PyTorch finds no GPU here; use auto or cpu")
    return torch.device(name)


def make_model(run: Settings, dataset: DataSet | Shape) -> nn.Module:
    """The run's model, with initial weights drawn from its seed."""
    with seeding.streams(seeding.seed_for(run.seed, "initial model")):
        return build_model(**model_arguments(run, dataset), weights=run.model.weights)


def model_arguments(run: Settings, dataset: DataSet | Shape) -> Tree:
    """The arguments with which `build_model` builds the run's model."""
    return {
        "name": run.model.name,
        "num_classes": dataset.outputs,
        "arguments": dict(run.model.options),
        "norm": run.model.norm,
        "input_shape": dataset.shape,
        "num_tokens": dataset.tokens,
        "stem": run.model.stem,
        "groups": run.model.groups,  # each norm picks its own options
        "branch_scale": run.model.branch_scale,
        **run.model.brn.model_dump(),
    }


# --- schedule and loss ---


def step_rate(now: int, rounds: int, lr: float, milestones: Sequence[float], gamma: float) -> float:
    """`lr`, multiplied by `gamma` after each milestone, which is a round or, below 1, a fraction of all rounds."""
    # 0.29 * 100 is 28.999999999999996; without the correction round 29 would come after the milestone.
    ends = [end * rounds + 1e-9 if end < 1 else end for end in milestones]
    return lr * float(gamma ** sum(now > end for end in ends))


def cosine_rate(now: int, rounds: int, lr: float) -> float:
    """Half a cosine from `lr` in the first round to zero in the round after the last."""
    return lr * 0.5 * (1 + math.cos(math.pi * (now - 1) / rounds))


def learning_rate(run: Settings, server_round: int) -> float:
    lr, options = run.train.lr, run.train.schedule
    match options.kind:
        case "constant":
            return lr
        case "step":
            return step_rate(server_round, run.rounds, lr, options.milestones, options.gamma or 0.1)
        case "cosine":
            return cosine_rate(server_round, run.rounds, lr)
    rate = named.call("train.schedule.kind", options.kind, server_round, run.rounds, lr)
    if not (isinstance(rate, Real) and float(rate) >= 0):
        raise SettingsError(
            f"train.schedule.kind={options.kind!r} returned {rate!r} for round {server_round}; expected a "
            "learning rate, zero or more"
        )
    return float(rate)


def loss_of(run: Settings, dataset: DataSet, indices: Tensor) -> Loss:
    """The training loss of the client that has the examples at `indices`."""
    train, task = run.train, dataset.task
    if has_own_loss(run) or not (train.label_smoothing or train.class_weights):
        return plain_loss(run, task)
    weights: Tensor | None = None
    if train.class_weights == "balanced":
        weights = balanced_weights(dataset.train.labels[indices.to(dataset.train.labels.device)], dataset.classes)
    elif train.class_weights is not None:
        weights = torch.tensor(train.class_weights, dtype=torch.float64, device=dataset.train.device)
    options = {"label_smoothing": train.label_smoothing, "class_weights": weights}
    return make_loss(name_in(train.loss or task.losses[0]), **options)


def plain_loss(run: Settings, task: Task) -> Loss:
    """The loss that evaluations report: without label smoothing and class weights."""
    name, options = name_in(run.train.loss or task.losses[0]), options_in(run.train.loss)
    if not has_own_loss(run):
        return make_loss(name, **options)
    return named.with_options("train.loss", name, options)


def has_own_loss(run: Settings) -> bool:
    """Whether the loss is the user's, not one of `tasks.LOSSES`."""
    return named.is_name(name_in(run.train.loss or ""))
