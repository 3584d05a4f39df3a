"""Counts the examples in an experiment's partitions, for `fedbn partition EXPERIMENT`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from fedbn_flwr.data.dataset import DataSet
from fedbn_flwr.data.partitions import Options
from fedbn_flwr.results.folder.clients import PartitionCounts

from . import settings
from .data import examples_of, load_data, partition_of
from .settings import Experiment, Settings


def count_partitions(experiment: Experiment) -> list[PartitionCounts]:
    """The numbers of examples of each different partition of the runs, with the first seed that uses it."""
    users: dict[tuple[str, Options, int], list[Settings]] = {}
    for run in experiment.runs:
        users.setdefault((examples_of(run.data), run.data.partition, run.clients), []).append(run)
    counted = []
    for runs in users.values():
        parts = partition_of(runs[0].data, runs[0].clients, runs[0].seed, "cpu")
        found = counts_of(runs[0], load_data(runs[0].data, "cpu"), parts)
        if len(users) > 1:
            names = list(dict.fromkeys(run.label for run in runs))
            title = f"{found.title} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
            found = dataclasses.replace(found, title=title)
        counted.append(found)
    return counted


def counts_of(run: Settings, dataset: DataSet, partition: Sequence[Tensor]) -> PartitionCounts:
    """The numbers of examples of a run's clients, which have these rows of the data set."""
    data, strata = run.data, dataset.strata(run.data.partition.bins)
    parts = [part.cpu() for part in partition]
    # A segmentation example has many classes: only the examples are counted.
    counts = [torch.bincount(strata.train[part], minlength=len(strata.names)).tolist() for part in parts]
    options = {key: value for key, value in data.partition.model_dump().items() if value is not None}
    words = [options.pop("kind"), *(f"{key}={value}" for key, value in options.items())]
    title = f"{data.name}: {', '.join(words)}, clients={run.clients}, seed={run.seed}"
    return PartitionCounts(title, strata.names, tuple(map(tuple, counts)), _names_of(data, dataset, parts))


def _names_of(data: settings.Data, dataset: DataSet, parts: Sequence[Tensor]) -> tuple[str, ...]:
    """The clients' names in a partition by domain or column: the group that their examples belong to."""
    groups = {"domain": dataset.domains, "natural": dataset.groups}.get(data.partition.kind)
    return () if groups is None else tuple(groups.names[int(groups.train[int(part[0])])] for part in parts)
