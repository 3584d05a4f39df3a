"""What the server of a run is made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from fedbn_flwr.client.evaluation import Metric
from fedbn_flwr.data import Moments
from fedbn_flwr.data.batches import Normalise
from fedbn_flwr.data.dataset import DataSet
from fedbn_flwr.strategies import Rule
from fedbn_flwr.tasks import Task

from .data import Shape, load_data, normalisation_of, partition_of, shape_without_data, validation_rows
from .model import choose_device, make_model, model_arguments
from .objective import metrics_of
from .settings import Settings


@dataclass(frozen=True)
class Parts:
    """What the server of a run needs, each part made once, when it is first used."""

    run: Settings
    name: str
    rule: Rule

    @cached_property
    def device(self) -> torch.device:
        return choose_device(self.run.engine.device)

    @cached_property
    def dataset(self) -> DataSet | None:
        """None: the server has no data."""
        return load_data(self.run.data, str(self.device)) if self.run.evaluate.server else None

    @property
    def shape(self) -> DataSet | Shape:
        return self.dataset or shape_without_data(self.run)

    @cached_property
    def partition(self) -> list[Tensor]:
        """Indices of each client's training examples."""
        return partition_of(self.run.data, self.run.clients, self.run.seed, str(self.device))

    @cached_property
    def held_out(self) -> Tensor:
        """Indices of the training examples that all clients together hold out."""
        return validation_rows(self.run, self.partition)

    @cached_property
    def normalise(self) -> Normalise:
        """A server without data has no moments of the clients' data before they agree on them."""
        return normalisation_of(self.run, self.shape)

    def use_moments(self, moments: Moments) -> None:
        """Normalise by the moments of all sites' data."""
        self.__dict__["normalise"] = moments

    @property
    def task(self) -> Task:
        return self.shape.task

    @cached_property
    def metrics(self) -> Sequence[Metric]:
        return metrics_of(self.run)

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


def _in_words(run: Settings, normalise: Normalise) -> Any:
    return run.data.normalise if callable(normalise) else dict(zip(("mean", "std"), normalise, strict=True))
