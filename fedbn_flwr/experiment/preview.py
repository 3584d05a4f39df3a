"""What an experiment will do, for `fedbn explain` and `fedbn partition`: settings, data, model, and what it sends."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Sequence

import torch
from rich.filesize import decimal
from torch import Tensor

from fedbn_flwr.cores import cores
from fedbn_flwr.data.kinds import Options
from fedbn_flwr.errors import few
from fedbn_flwr.extensions import part
from fedbn_flwr.models.tensors import sent_dtype
from fedbn_flwr.norms.roles import Role, roles
from fedbn_flwr.results.folder.clients import PartitionCounts
from fedbn_flwr.results.report.tables import as_text, partition_table
from fedbn_flwr.results.text import columns_in_words, duration

from .data import examples_of, load_data, rows_by_domain, shares_of
from .file.layers import Setting, settings_of
from .listeners.evaluate import Evaluate
from .parts import Parts, counts_of
from .prepare import prepare
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
        in_words = part("pools", "in_words") if prepared.run.engine.together != 1 else lambda prepared: ""
        self.tests, self.together = _tests_of(prepared), in_words(prepared)  # how many clients train at once
        self.steps, self.seconds = _steps(prepared), _seconds(prepared)  # of training, and of one step

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


def _steps(prepared: Parts) -> int | None:
    """The training steps of all clients in the run; None if the sites know the number."""
    run, unseen = prepared.run, prepared.run.evaluate.unseen.clients
    if run.train.steps is not None:
        return run.rounds * run.training_clients * run.train.steps
    if prepared.dataset is None:
        return None
    counts = [len(part) for client, part in enumerate(prepared.partition) if client not in unseen]
    return run.rounds * (run.train.epochs or 1) * sum(math.ceil(count / run.train.batch_size) for count in counts)


def _seconds(prepared: Parts) -> float:
    """About the time of a training step, on a CPU: a backward pass takes twice as long as a forward pass."""
    run, threads = prepared.run, torch.get_num_threads()
    if prepared.device.type != "cpu" or run.data.crop is not None:
        return 0.0
    inputs, model = prepared.shape.blank(run.train.batch_size), prepared.model.eval()
    torch.set_num_threads(run.engine.threads)
    try:
        with torch.inference_mode():
            model(inputs)  # the first pass takes longer
            begun = time.perf_counter()
            model(inputs)
            return 3 * (time.perf_counter() - begun)
    finally:
        torch.set_num_threads(threads)


# --- as text ------------------------------------------------------------------


def pages(
    experiment: Experiment, runs: Sequence[ExplainedRun], partitions: Sequence[PartitionCounts], *, every: bool
) -> list[str]:
    """What `fedbn explain` prints; `every`: the settings with default values too."""
    first, *others = runs
    shared = [setting for setting in first.settings if all(setting in other.settings for other in others)]
    found = [_in_short(experiment, runs)]
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


def _in_short(experiment: Experiment, runs: Sequence[ExplainedRun]) -> str:
    """Three lines: the experiment, what it compares, and how long that may take."""
    seeds, known = len(experiment.runs) // len(runs), [run for run in runs if run.steps is not None]
    labels, repeated = few((run.label for run in runs), 8), f", each with {seeds} seeds" if seeds > 1 else ""
    cost = f"{seeds * sum(run.steps or 0 for run in known):,} training steps" if known else "the sites know how long"
    if seconds := seeds * sum((run.steps or 0) * run.seconds for run in known) / cores():
        cost = f"at least {duration(seconds)} on this machine ({cost})"
    return "\n".join(
        [
            f"{experiment.name}: {experiment.description}" if experiment.description else experiment.name,
            f"compares {len(runs)} runs{repeated}: {labels}" if len(runs) > 1 else f"one run{repeated}: {labels}",
            f"takes {cost}",
        ]
    )


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
        if role != Role.COUNTER  # it never travels
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
