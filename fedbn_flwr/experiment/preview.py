"""What an experiment will do, for `fedbn explain` and `fedbn partition`: settings, data, model, and what it sends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from fedbn_flwr.data.partitions import Options
from fedbn_flwr.models.tensors import sent_dtype
from fedbn_flwr.norms.roles import Role, roles
from fedbn_flwr.results.folder.clients import PartitionCounts

from .data import examples_of, load_data, shares_of
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
    settings: tuple[Setting, ...]
    model: dict[str, Part]  # by role
    down: tuple[str, ...]  # the roles of the arrays that a client receives in a round of training, and what else
    up: tuple[str, ...]
    columns: Mapping[str, str]  # of the data, if they are here: what each is for


def explain(experiment: Experiment) -> list[ExplainedRun]:
    """Prepare all runs as `fedbn run` does; those of further seeds are not repeated."""
    found: dict[str, ExplainedRun] = {}
    for prepared in prepare(experiment):
        label, traits = prepared.run.label, prepared.rule.traits
        if label not in found:
            model = _parts_of(prepared)
            down = (*(role for role in model if role not in {Role.COUNTER, *traits.kept}), *traits.besides)
            up = (*(role for role in model if role not in {Role.COUNTER, *traits.unsent}), *traits.besides)
            columns = prepared.dataset.columns if prepared.dataset else {}
            found[label] = ExplainedRun(label, tuple(settings_of(experiment, prepared.run)), model, down, up, columns)
            prepared.release()
    return list(found.values())


def count_partitions(experiment: Experiment) -> list[PartitionCounts]:
    """The numbers of examples of each different partition of the runs, with the first seed that uses it."""
    users: dict[tuple[str, Options, int], Settings] = {}
    for run in experiment.runs:
        users.setdefault((examples_of(run.data), run.data.partition, run.clients), run)
    return [
        counts_of(run, load_data(run.data, "cpu"), shares_of(run.data, run.clients, run.seed, "cpu")[0])
        for run in users.values()
    ]


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
