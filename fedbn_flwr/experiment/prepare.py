"""Makes data, model and strategy of the server from the settings, and checks them before training starts."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedbn_flwr.client.metrics import Metric
from fedbn_flwr.client.model_tensors import initial_arrays
from fedbn_flwr.client.training import Loss
from fedbn_flwr.data.batches import Normalise
from fedbn_flwr.data.dataset import DataSet
from fedbn_flwr.errors import SettingsError
from fedbn_flwr.messages.arrays import pack
from fedbn_flwr.norms.roles import computes_as_batch_norm, norm_layers
from fedbn_flwr.strategies import FLOWER, Rule, as_rule, build_strategy

from . import trackers
from .check import Faults
from .data import (
    Shape,
    check_labels,
    load_data,
    normalisation_of,
    partition_of,
    shape_without_data,
    try_data,
    validation_rows,
)
from .model import check_gpus, choose_device, make_model, model_arguments, try_model
from .mods import check_mods
from .sections import refuse
from .settings import Experiment, Settings, strategy_name
from .training import check_partition, check_training, metrics_of, own_loss


@dataclass(frozen=True)
class Parts:
    """What the server of a run needs, each part made once, when it is first used."""

    run: Settings
    name: str
    rule: Rule

    @cached_property
    def device(self) -> torch.device:
        device = choose_device(self.run.engine.device)
        check_gpus(self.run.engine, device)
        return device

    @cached_property
    def dataset(self) -> DataSet | None:
        """None: the server has no data."""
        return load_data(self.run.data, str(self.device)) if self.run.evaluate.server else None

    @property
    def shape(self) -> DataSet | Shape:
        return self.dataset or shape_without_data(self.run)

    @cached_property
    def partition(self) -> list[Tensor]:
        """Indices of each client's training images."""
        return partition_of(self.run.data, self.run.clients, self.run.seed, str(self.device))

    @cached_property
    def held_out(self) -> Tensor:
        """Indices of the training images that all clients together hold out."""
        return validation_rows(self.run, self.partition)

    @cached_property
    def normalise(self) -> Normalise | None:
        """None: a server without data does not know the moments of the clients' images."""
        known = self.dataset is not None or self.run.data.normalise != "moments"
        return normalisation_of(self.run, self.shape) if known else None

    @cached_property
    def loss(self) -> Loss | None:
        """The loss of the user, or None for cross entropy."""
        return own_loss(self.run)

    @cached_property
    def metrics(self) -> Sequence[Metric]:
        return metrics_of(self.run)

    def work(self) -> list[int] | None:
        """The images of each client if it trains on all of them, as the expected relative duration of its messages."""
        if self.run.train.steps is not None or self.dataset is None:  # the same steps for all, or no data here
            return None
        return [len(part) for part in self.partition]

    @cached_property
    def model(self) -> nn.Module:
        return make_model(self.run, self.shape).to(self.device)

    def release(self) -> None:
        """Free the model; it is built again when it is used."""
        self.__dict__.pop("model", None)

    @cached_property
    def model_description(self) -> Mapping[str, Any]:
        """The content of model.json."""
        return {
            "build": model_arguments(self.run, self.shape),
            "normalise": _in_words(self.run, self.normalise),
            "classes": self.run.data.class_names or None if self.dataset is None else self.dataset.class_names,
            "global": self.rule.traits.has_global_model,
        }


def prepare(
    experiment: Experiment,
    places: Sequence[int] | None = None,
    *,
    own_data: bool = False,
    faults: Faults | None = None,
) -> list[Parts]:
    """Prepare and check all runs, or those at these places of the experiment; first the strategies, which is quick.

    With `own_data`, nodes may have data of their own, so that the sizes of the partitions do not matter. What is wrong
    is raised, or added to `faults` if they are given.
    """
    named = [(run, name) for name, run in experiment.named.items()]
    chosen = named if places is None else [named[place] for place in places]
    runs = [run for run, _ in chosen]
    found = Faults() if faults is None else faults
    for text in dict.fromkeys(json.dumps(entry) for run in runs for entry in run.track):
        trackers.check(json.loads(text))
    rules: dict[str, Rule] = {}
    for run, name in chosen:
        with found.of(run.label):
            check_mods(run)
            rules[name] = make_rule(run)
    if faults is None:
        found.refuse()
    prepared: list[Parts] = []
    seeds: dict[str, list[int]] = {}
    for run in runs:
        seeds.setdefault(run.label, []).append(run.seed)
    for run, name in chosen:
        with found.of(run.label):
            if name not in rules:
                continue
            prepared.append(prepare_run(run, name, rules[name]))
            if len(chosen) > 1:
                prepared[-1].release()  # a sweep has many models
            if prepared[-1].dataset is not None and not own_data:
                check_partition(prepared[-1], seeds.pop(run.label, ()))
    if faults is None:
        found.refuse()
    return prepared


def prepare_run(run: Settings, name: str, rule: Rule) -> Parts:
    """The parts of a run, which suit each other."""
    parts = Parts(run, name, rule)
    if parts.dataset is not None:
        check_labels(run, parts.dataset)
        try_data(run, parts.dataset, parts.partition[0])
    check_labels(run, parts.shape)
    # Asked for now, so that what is wrong with them is reported before training.
    for part in ("normalise", *(["held_out"] if parts.dataset is not None and run.evaluate.validation else [])):
        getattr(parts, part)
    _check_norm(run, parts.model, rule)
    try_model(run, parts.model, parts.shape, parts.device, parts.loss)
    check_training(parts)
    with _without_warnings():  # the run calls it again
        rule.begin(run.rounds, pack(initial_arrays(parts.model)))  # refuses a model that does not suit it
    return parts


@contextmanager
def _without_warnings() -> Iterator[None]:
    logger = logging.getLogger("flwr")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _in_words(run: Settings, normalise: Normalise | None) -> Any:
    if normalise is None or callable(normalise):
        return normalise and run.data.normalise
    return dict(zip(("mean", "std"), normalise, strict=True))


def make_rule(run: Settings) -> Rule:
    # By default all clients train, and `evaluate.clients` decides whether they evaluate. A run begins with all clients
    # (nodes.check_nodes) and continues without those that fail.
    least = 1 if run.trained == 1 else 2
    _check_demands(run.strategy, run.trained)
    strategy = build_strategy(
        run.strategy,
        seed=run.seed,
        min_train_nodes=least,
        min_evaluate_nodes=least,
        min_available_nodes=least,
        node_timeout=run.engine.node_timeout,
        client_learning_rate=run.train.lr,  # of QFedAvg
    )
    rule = as_rule(strategy)
    name, options, traits = strategy_name(run.strategy), run.evaluate, rule.traits
    refuse(
        {
            f"evaluate.clients is false, but {name} trains no global model, and only clients can be evaluated; leave "
            "evaluate.clients out": options.clients is False and not traits.has_global_model,
            f"evaluate.unseen is {options.unseen}, but {name} trains no global model that a new client could use; "
            "leave evaluate.unseen out": options.unseen > 0 and not traits.has_global_model,
            f"evaluate.matrix is true, but with {name} all clients have the global model; expected a strategy with a "
            "model per client: FedBN, SiloBN or Standalone": options.matrix and not traits.personal,
            f"evaluate.matrix is true and reads the models of single clients, which {name} {traits.hides}; leave "
            "evaluate.matrix out": options.matrix and traits.hides is not None,
            f"evaluate.dynamics is true and reads the statistics of single clients, which {name} {traits.hides}; leave "
            "evaluate.dynamics out": options.dynamics and traits.hides is not None,
        }
    )
    return rule


def _check_demands(spec: Mapping[str, Any], clients: int) -> None:
    """Refuse a minimum number of nodes above the number of clients: a round would wait for them until its timeout."""
    for key in ("min_train_nodes", "min_evaluate_nodes", "min_available_nodes"):
        if isinstance(needed := spec.get(key), int) and needed > clients:
            raise SettingsError(f"strategy.{key} of {spec.get('name')} is {needed}, but {clients} clients train")
    about, bad = FLOWER.get(str(spec.get("name"))), spec.get("num_malicious_nodes", 0)
    if about is not None and about.needs is not None and isinstance(bad, int) and about.needs(bad) > clients:
        raise SettingsError(
            f"strategy {spec['name']} with num_malicious_nodes={bad} needs {about.needs(bad)} clients; clients is "
            f"{clients}"
        )
    if isinstance(base := spec.get("base"), Mapping):
        _check_demands(base, clients)


def _check_norm(run: Settings, model: nn.Module, rule: Rule) -> None:
    others = [type(layer).__name__ for layer in norm_layers(model).values() if not isinstance(layer, _BatchNorm)]
    if others and run.evaluate.statistics == "reestimated":
        raise SettingsError(
            f"evaluate.statistics is 'reestimated', which measures inputs of batch norms, but {run.model.name!r} with "
            f"norm {run.model.norm!r} has {others[0]}, whose statistics may be others; leave it out"
        )
    if not rule.traits.min_batch:
        return
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and not computes_as_batch_norm(module):
            raise SettingsError(
                f"strategy {strategy_name(run.strategy)} computes batch norm over the clients' batches in place of "
                f"plain batch norm, but {name!r} of {run.model.name!r} is a {type(module).__name__}, whose own "
                "arithmetic would be lost; use model.norm: bn, or another strategy"
            )
    if others and not any(isinstance(layer, _BatchNorm) for layer in model.modules()):
        raise SettingsError(
            f"strategy {strategy_name(run.strategy)} computes batch norm over the clients' batches, but the layers of "
            f"{run.model.name!r} that track statistics are {others[0]}, which normalises otherwise; use another "
            "strategy, or a model with batch norm"
        )
