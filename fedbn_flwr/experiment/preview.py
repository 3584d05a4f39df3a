"""What an experiment will do, for `fedbn explain` and `fedbn partition`: settings, data, model, and what it sends."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from fedbn_flwr.data.partitions import Options
from fedbn_flwr.models.tensors import sent_dtype
from fedbn_flwr.norms.roles import Role, roles
from fedbn_flwr.results.folder.clients import PartitionCounts

from .data import examples_of, load_data, partition_of
from .file.layers import Setting, settings_of
from .parts import Parts, counts_of
from .prepare import prepare
from .settings import Experiment, Settings


@dataclass(frozen=True)
class Part:
    """The arrays of one role in a model."""

    arrays: int
    values: int
    bytes: int


@dataclass(frozen=True)
class ExplainedRun:
    label: str
    seeds: tuple[int, ...]
    settings: tuple[Setting, ...]
    model: dict[str, Part]  # by role
    down: tuple[str, ...]  # the roles of the arrays that a client receives in a round of training, and what else
    up: tuple[str, ...]


@dataclass(frozen=True)
class Explanation:
    partitions: tuple[PartitionCounts, ...]  # empty if the server has no data
    runs: tuple[ExplainedRun, ...]  # those of further seeds are not repeated


def explain(experiment: Experiment) -> Explanation:
    """Prepare all runs as `fedbn run` does."""
    first: dict[str, Parts] = {}
    for prepared in prepare(experiment):
        first.setdefault(prepared.run.label, prepared)
    has_data = all(prepared.dataset is not None for prepared in first.values())
    explained = []
    for label in list(first):
        prepared = first.pop(label)  # with its model, so that it is not in memory with those of the next runs
        traits, model = prepared.rule.traits, _parts_of(prepared)
        explained.append(
            ExplainedRun(
                label,
                tuple(run.seed for run in experiment.runs if run.label == label),
                tuple(settings_of(experiment, prepared.run)),
                model,
                (*(role for role in model if role not in {Role.COUNTER, *traits.kept}), *traits.besides),
                (*(role for role in model if role not in {Role.COUNTER, *traits.unsent}), *traits.besides),
            )
        )
    return Explanation(tuple(count_partitions(experiment) if has_data else ()), tuple(explained))


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
            found = replace(found, title=title)
        counted.append(found)
    return counted


def _parts_of(prepared: Parts) -> dict[str, Part]:
    tensors, by_role = prepared.model.state_dict(), dict[str, list[Tensor]]()
    for key, role in roles(prepared.model).items():
        by_role.setdefault(str(role), []).append(tensors[key])
    return {
        role: Part(
            len(found),
            sum(tensor.numel() for tensor in found),
            sum(tensor.numel() * sent_dtype(tensor.dtype).itemsize for tensor in found),
        )
        for role, found in by_role.items()
    }
