"""Counts the images in an experiment's partitions, for `fedbn partition EXPERIMENT`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedbn_flwr.data.dataset import DataSet
from fedbn_flwr.results.partition import PartitionCounts

from . import settings
from .data import PLAIN, load_data, partition_of, resolve
from .settings import Experiment


def count_partitions(experiment: Experiment) -> list[PartitionCounts]:
    """The image counts of each different partition of the runs, with the first seed that uses it."""
    labels_of: dict[tuple[settings.Data, int], list[str]] = {}
    seeds: dict[tuple[settings.Data, int], int] = {}
    for run in map(resolve, experiment.runs):
        key = run.data.model_copy(update=PLAIN), run.clients
        seeds.setdefault(key, run.seed)
        labels_of.setdefault(key, []).append(run.label)
    counted = []
    for (data, clients), labels in labels_of.items():
        dataset = load_data(data, "cpu")
        parts = partition_of(data, clients, seeds[data, clients], "cpu")
        # Images of segmentation data have many classes each: only the images are counted.
        classes = ("images",) if dataset.dense else dataset.class_names
        counts = [torch.bincount(dataset.train.labels[part], minlength=len(classes)).tolist() for part in parts]
        options = {key: value for key, value in data.partition.model_dump().items() if value is not None}
        words = [options.pop("kind"), *(f"{key}={value}" for key, value in options.items())]
        title = f"{data.name}: {', '.join(words)}, clients={clients}, seed={seeds[data, clients]}"
        if len(labels_of) > 1:  # the runs that use it
            names = list(dict.fromkeys(labels))
            title += f" ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
        counted.append(PartitionCounts(title, classes, tuple(map(tuple, counts)), _names_of(data, dataset, parts)))
    return counted


def _names_of(data: settings.Data, dataset: DataSet, parts: Sequence[Tensor]) -> tuple[str, ...]:
    """The clients' names in a partition by domain or column: the group that their images belong to."""
    groups = {"domain": dataset.domains, "natural": dataset.natural}.get(data.partition.kind)
    return () if groups is None else tuple(groups.names[int(groups.train[part[0]])] for part in parts)
