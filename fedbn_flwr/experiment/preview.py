"""What an experiment will do, for `fedbn explain` and `fedbn partition`: settings, data, model, and what it sends."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

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
from .run.side_by_side import best_at_once, why_one
from .settings import Experiment, Settings


class ExplainedRun:
    """A prepared run: its settings, its model by role, and what its clients receive, send and evaluate."""

    def __init__(self, experiment: Experiment, prepared: Parts) -> None:
        traits, tensors, role_of = prepared.rule.traits, prepared.model.state_dict(), roles(prepared.model)
        stays, kept = traits.local_keys(tensors), set[str]()
        shared = {role for key, role in role_of.items() if key not in stays}
        self.label, self.settings = prepared.run.label, settings_of(experiment, prepared.run)
        self.model: dict[str, list[Tensor]] = {}  # without values; "own ROLE": what stays if others of the role do not
        for key, role in role_of.items():
            name = f"own {role}" if key in stays and role in shared else str(role)
            self.model.setdefault(name, []).append(tensors[key].to("meta"))
            kept |= {name} if key in stays else set()
        unsent = {Role.COUNTER, *(() if traits.sent_back else kept)}
        # What a client receives and sends in a round of training: roles of arrays, and other records.
        self.down = (*(role for role in self.model if role not in {Role.COUNTER, *kept}), *traits.also_sent)
        self.up = (*(role for role in self.model if role not in unsent), *traits.also_sent)
        self.columns = prepared.dataset.columns if prepared.dataset else {}  # the use of each; empty without the data
        self.tests, self.together = _tests_of(prepared), _together(prepared)

    def bytes_of(self, sent: Iterable[str]) -> int:
        """As the arrays of these roles travel."""
        tensors = (tensor for role in sent for tensor in self.model.get(role, ()))
        return sum(tensor.numel() * sent_dtype(tensor.dtype).itemsize for tensor in tensors)


def explain(experiment: Experiment) -> list[ExplainedRun]:
    """Prepare all runs as `fedbn run` does, and explain each label once, not for every seed."""
    found: dict[str, ExplainedRun] = {}
    for prepared in prepare(experiment):
        if prepared.run.label not in found:
            found[prepared.run.label] = ExplainedRun(experiment, prepared)
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


def _tests_of(prepared: Parts) -> tuple[str, int | None]:
    """On which examples clients evaluate, and how many these are in all, if it is known."""
    asked, run, dataset = Evaluate(prepared), prepared.run, prepared.dataset
    if not asked.asks_clients:
        return "none", 0
    domains = len(rows_by_domain(dataset)) if dataset else 0
    on_all = 0 if asked.only_own else run.clients * (1 + (run.evaluate.domains and domains > 0))
    on_own = 1 + (domains > 0)
    return "own" if asked.only_own else "all, own", (on_all + on_own) * len(dataset.test) if dataset else None


def _together(prepared: Parts) -> str:
    """How many clients train at once, or why only one does; empty unless `engine.together` is set."""
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
    rows = [
        (role, str(len(found)), f"{sum(each.numel() for each in found):,}", decimal(run.bytes_of([role])))
        for role, found in run.model.items()
    ]
    title = f"model {values['model.name']}, {values['model.norm']}"
    return [(title, "arrays", "values", "size"), *rows]


def _traffic(run: ExplainedRun) -> list[tuple[str, ...]]:
    """What a client receives and sends in a round, by role of the arrays."""
    rows: list[tuple[str, ...]] = [(f"run {run.label}, a round", "size", "arrays")]
    for title, sent in (("a client receives", run.down), ("a client sends", run.up)):
        rows.append((title, decimal(run.bytes_of(sent)), ", ".join(sent) or "none"))
    return rows


def _tests(runs: Sequence[ExplainedRun]) -> list[tuple[str, ...]]:
    """How many examples the clients of each run evaluate, which takes time."""
    rows = [(run.label, run.tests[0], "?" if run.tests[1] is None else f"{run.tests[1]:,}") for run in runs]
    return [("clients evaluate, in an evaluated round", "test examples", "of all clients"), *rows]
