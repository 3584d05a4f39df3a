"""What an experiment will do, for `fedbn explain` and `fedbn partition`: settings, data, model, and what it sends."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.filesize import decimal
from torch import Tensor

from fedbn_flwr.data.partitions import Options
from fedbn_flwr.models.tensors import sent_dtype
from fedbn_flwr.norms.roles import Role, roles
from fedbn_flwr.results.folder.clients import PartitionCounts
from fedbn_flwr.results.report.tables import as_text, partition_table
from fedbn_flwr.text import columns_in_words

from .data import examples_of, load_data, rows_by_domain, shares_of
from .file.layers import Setting, settings_of
from .listeners.evaluate import Evaluate
from .parts import Parts, counts_of
from .prepare import prepare
from .run.at_once import best_at_once, why_one
from .settings import Experiment, Settings


@dataclass(frozen=True)
class RoleSize:
    """The size of the arrays of one role in a model, or of those of it that stay on the clients."""

    arrays: int
    values: int
    bytes: int


@dataclass(frozen=True)
class ExplainedRun:
    label: str
    settings: tuple[Setting, ...]
    model: dict[str, RoleSize]  # by role; "own" before the role: those that stay, if others of the role do not
    down: tuple[str, ...]  # what a client receives in a round of training: roles of arrays, and other records
    up: tuple[str, ...]
    columns: Mapping[str, str]  # the use of each column; empty without the data
    tests: tuple[str, int | None]  # on which examples clients evaluate, and how many these are in all, if it is known
    together: str  # how many clients train at once, or why only one does; empty unless `engine.together` is set


def explain(experiment: Experiment) -> list[ExplainedRun]:
    """Prepare all runs as `fedbn run` does, and explain each label once, not for every seed."""
    found: dict[str, ExplainedRun] = {}
    for prepared in prepare(experiment):
        label, traits = prepared.run.label, prepared.rule.traits
        if label not in found:
            model, kept = _by_role(prepared)
            down = (*(role for role in model if role not in {Role.COUNTER, *kept}), *traits.also_sent)
            unsent = {Role.COUNTER, *(() if traits.sent_back else kept)}
            up = (*(role for role in model if role not in unsent), *traits.also_sent)
            columns = prepared.dataset.columns if prepared.dataset else {}
            settings, tests = tuple(settings_of(experiment, prepared.run)), _tests_of(prepared)
            found[label] = ExplainedRun(label, settings, model, down, up, columns, tests, _together(prepared))
            prepared.release()
    return list(found.values())


def count_partitions(experiment: Experiment) -> list[PartitionCounts]:
    """The numbers of examples of each different partition of the runs, with the first seed that uses it."""
    users: dict[tuple[str, Options, int], Settings] = {}
    for run in experiment.runs:
        users.setdefault((examples_of(run.source), run.data.partition, run.clients), run)
    return [
        counts_of(run, load_data(run.source, "cpu"), shares_of(run.source, run.clients, run.seed, "cpu")[0])
        for run in users.values()
    ]


def _by_role(prepared: Parts) -> tuple[dict[str, RoleSize], set[str]]:
    """The model by role, and the names of the roles that stay on the clients."""
    tensors, by_role, role_of = prepared.model.state_dict(), dict[str, list[Tensor]](), roles(prepared.model)
    stays = prepared.rule.traits.local_keys(tensors)
    shared = {role for key, role in role_of.items() if key not in stays}
    names = {key: f"own {role}" if key in stays and role in shared else str(role) for key, role in role_of.items()}
    for key, name in names.items():
        by_role.setdefault(name, []).append(tensors[key])
    sizes = {
        role: RoleSize(
            len(found),
            sum(tensor.numel() for tensor in found),
            sum(tensor.numel() * sent_dtype(tensor.dtype).itemsize for tensor in found),
        )
        for role, found in by_role.items()
    }
    return sizes, {names[key] for key in stays}


def _tests_of(prepared: Parts) -> tuple[str, int | None]:
    asked, run, dataset = Evaluate(prepared), prepared.run, prepared.dataset
    if not asked.asks_clients:
        return "none", 0
    domains = len(rows_by_domain(dataset)) if dataset else 0
    on_all = 0 if asked.only_own else run.clients * (1 + (run.evaluate.domains and domains > 0))
    on_own = 1 + (domains > 0)
    return "own" if asked.only_own else "all, own", (on_all + on_own) * len(dataset.test) if dataset else None


def _together(prepared: Parts) -> str:
    if prepared.run.engine.together == 1:
        return ""
    if (problem := why_one(prepared)) is not None:
        return f"clients train one after the other: {problem}"
    if (clients := min(best_at_once(prepared), prepared.run.clients)) == 1:
        return "each process trains one client at a time"
    copies = 3 if prepared.run.train.momentum else 2  # values, gradients and momentum
    size = copies * clients * sum(value.nbytes for value in prepared.model.parameters())
    return f"{clients} clients train at once, with {decimal(size)} for their models"


# --- as text ------------------------------------------------------------------


def pages(
    experiment: Experiment, runs: Sequence[ExplainedRun], partitions: Sequence[PartitionCounts], *, every: bool
) -> list[str]:
    """What `fedbn explain` prints; `every`: the settings with default values too."""
    first, *others = runs
    shared = [setting for setting in first.settings if all(setting in other.settings for other in others)]
    found = [f"{experiment.name}: {experiment.description}" if experiment.description else experiment.name]
    found.append(_settings("settings", shared, every))
    if others:
        for run in runs:
            found.append(
                _settings(f"run {run.label}", [setting for setting in run.settings if setting not in shared], True)
            )
    found += [f"data {partition_table(partition)}" for partition in partitions]
    found += dict.fromkeys("\n".join(columns_in_words(run.columns)) for run in runs if run.columns)
    found += dict.fromkeys(as_text(_model(run)) for run in runs)
    found += [as_text(_traffic(run)) for run in runs]
    found += [as_text(_tests(runs))] if any(run.tests[1] != 0 for run in runs) else []
    return found + [f"run {run.label}: {run.together}" for run in runs if run.together]


def _settings(title: str, settings: Sequence[Setting], every: bool) -> str:
    shown = [setting for setting in settings if every or setting.origin != "default"]
    values = [setting.value if isinstance(setting.value, str) else json.dumps(setting.value) for setting in shown]
    rows = [(setting.key, value, setting.origin) for setting, value in zip(shown, values, strict=True)]
    hidden = len(settings) - len(shown)
    rest = f"\n... and {hidden} with default values (--all)" if hidden else ""
    return as_text([(title, "value", "given in"), *rows]) + rest


def _model(run: ExplainedRun) -> list[tuple[str, ...]]:
    values = {setting.key: setting.value for setting in run.settings}
    rows = [(role, str(size.arrays), f"{size.values:,}", decimal(size.bytes)) for role, size in run.model.items()]
    title = f"model {values['model.name']}, {values['model.norm']}"
    return [(title, "arrays", "values", "size"), *rows]


def _traffic(run: ExplainedRun) -> list[tuple[str, ...]]:
    """What a client receives and sends in a round, by role of the arrays."""
    rows: list[tuple[str, ...]] = [(f"run {run.label}, a round", "size", "arrays")]
    for title, sent in (("a client receives", run.down), ("a client sends", run.up)):
        size = sum(each.bytes for role, each in run.model.items() if role in sent)
        rows.append((title, decimal(size), ", ".join(sent) or "none"))
    return rows


def _tests(runs: Sequence[ExplainedRun]) -> list[tuple[str, ...]]:
    """How many examples the clients of each run evaluate, which takes time."""
    rows = [(run.label, run.tests[0], "?" if run.tests[1] is None else f"{run.tests[1]:,}") for run in runs]
    return [("clients evaluate, in an evaluated round", "test examples", "of all clients"), *rows]
