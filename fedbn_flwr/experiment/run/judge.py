"""Judges given models at all sites, without training: `rounds: 0`, and `fedbn evaluate`.

Each site evaluates every model on its own test examples, on any engine. A model in a run folder brings the moments by
which it normalises inputs; for weights alone the sites agree on them first, as before training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from flwr.app import ArrayRecord
from flwr.serverapp import Grid

from fedbn_flwr.client import evaluation
from fedbn_flwr.engines.capabilities import capabilities
from fedbn_flwr.engines.metered import MeteredGrid
from fedbn_flwr.errors import RunFailed, SettingsError, UserError, log_once
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.arrays import pack
from fedbn_flwr.models.build import load_weights, read_weights
from fedbn_flwr.models.tensors import initial_arrays
from fedbn_flwr.results.folder.clients import by_metric
from fedbn_flwr.results.folder.files import write_text
from fedbn_flwr.results.folder.reader import RunReader
from fedbn_flwr.results.folder.writer import RunFolder
from fedbn_flwr.results.metric_key import MetricKey
from fedbn_flwr.results.report.tables import Paired, as_measured, as_text, paired
from fedbn_flwr.storage import to_json

from ..listeners.evaluate import ByClient, mean_by_examples, values_of
from ..listeners.listener import Running
from ..listeners.unseen import evaluated_by
from ..parts import Parts
from ..prepare import prepare
from ..settings import Experiment
from .federation import failures, meet

FILE = "evaluation.json"


@dataclass(frozen=True)
class Judged:
    """What the sites measured, by model as it was given; the first model is the one that others are compared with."""

    main: str  # the metric by which the task compares models
    clients: Mapping[str, ByClient]  # the metrics on the client's own test examples, and the number of these
    weighted: Mapping[str, Mapping[str, float]]  # means over all clients' test examples
    differences: Mapping[str, Mapping[str, Paired]]  # of other models to the first one, paired by client

    @classmethod
    def of(cls, main: str, clients: Mapping[str, ByClient]) -> Judged:
        tables = {model: by_metric(values) for model, values in clients.items()}
        first, *others = tables
        weighted = {
            model: {
                key: mean_by_examples(values, table["examples"]) for key, values in table.items() if key != "examples"
            }
            for model, table in tables.items()
        }
        differences = {
            model: {key: paired(tables[model][key], tables[first][key]) for key in weighted[model]} for model in others
        }
        return cls(main, clients, weighted, differences)

    def __str__(self) -> str:
        """A table of the main metric, with a column for each model, and a line for each difference."""
        key, (first, *others) = MetricKey(self.main), self.clients
        rows = [("client", "examples", *self.clients)]
        for client, values in sorted(self.clients[first].items()):
            found = [measured[client][self.main] for measured in self.clients.values()]
            rows.append((str(client), f"{values['examples']:,}", *(as_measured(key, [value]) for value in found)))
        total = f"{sum(values['examples'] for values in self.clients[first].values()):,}"
        rows.append(("weighted", total, *(as_measured(key, [means[self.main]]) for means in self.weighted.values())))
        lines = [f"{key.title} on each client's own test examples", as_text(rows)]
        for model in others:
            pair = self.differences[model][self.main]
            middle, low, high = (as_measured(key, [value]) for value in (pair.difference, pair.low, pair.high))
            tested = f"; 95 % interval {low} to {high}, p = {pair.p:.2g}" if math.isfinite(pair.p) else ""
            lines.append(f"{model} minus {first}: {middle}, the mean of {pair.pairs} clients{tested}")
        return "\n".join(lines)


def judge(
    experiment: Experiment,
    make_grid: Callable[[Parts], AbstractContextManager[Grid]],
    out: Path,
    *,
    own_data: bool = False,
) -> Judged:
    """Let all clients evaluate the models of `evaluate.models`, and write what they measured to evaluation.json."""
    initial = experiment.runs[0].model.weights or ""
    with without_training(experiment, make_grid, out, own_data, [initial]) as (running, given):
        parts = running.prepared
        agreed, found = parts.agreed, dict[str, ByClient]()
        for file, (arrays, folder) in given.items():
            parts.agreed = agreed
            if folder is not None:
                normalise_as(parts, folder)
            found[file or "the initial model"] = _measured(running, file, arrays)
    judged = Judged.of(parts.task.main, found)
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / FILE, to_json(asdict(judged), indent=2) + "\n")
    return judged


Given = tuple[ArrayRecord, RunReader | None]  # a model and, if it is in one, its run folder


@contextmanager
def without_training(
    experiment: Experiment,
    make_grid: Callable[[Parts], AbstractContextManager[Grid]],
    out: Path,
    own_data: bool,
    otherwise: Sequence[str] = (),
) -> Iterator[tuple[Running, Mapping[str, Given]]]:
    """The clients of the experiment's only run, and the models of `evaluate.models` or `otherwise`, by their files.

    Clients know the run by its name, and no strategy takes part.
    """
    run, *others = experiment.runs
    if others:
        labels = ", ".join(dict.fromkeys(each.label for each in experiment.runs))
        raise SettingsError(
            f"{experiment.name} has {len(experiment.runs)} runs ({labels}), and one of them describes data and "
            "network; give only=LABEL, or seed=0"
        )
    plain = run.model_copy(update={"strategy": {"name": "FedAvg"}})
    (parts,) = prepare(replace(experiment, runs=(plain,)), own_data=own_data)
    given = {file: _given(parts, file) for file in run.evaluate.models or otherwise}
    with make_grid(parts) as grid:
        capabilities(grid).start()
        begun = Running(parts, MeteredGrid(grid), RunFolder(out), {protocol.RUN: parts.name})
        yield meet(begun, 0, agrees=any(folder is None for _, folder in given.values())), given


def _given(parts: Parts, file: str) -> Given:
    """The model of this file; without a file, the experiment's initial model."""
    model, path = parts.model, Path(file).expanduser()
    folder = RunReader(path if path.is_dir() else path.parent)
    known = bool(file) and (folder.path / "model.json").exists()
    if known and (summary := folder.summary()) is not None and summary.personal:
        log_once(f"{file}: with {summary.label} each client has a model of its own; this is the global one")
    if file and path.is_dir() and not known:
        raise UserError(f"{file!r} is not a run folder: it has no model.json")
    if file:
        weights = str(path / "model.safetensors" if path.is_dir() else path)
        state, own = read_weights(weights), model.state_dict()
        for key in sorted(state.keys() & own.keys()):
            if state[key].shape != own[key].shape:
                found, expected = list(state[key].shape), list(own[key].shape)
                raise SettingsError(
                    f"{file!r} does not fit the experiment's network: {key!r} has shape {found}, expected {expected}"
                )
        load_weights(model, state, weights)
    arrays = pack(initial_arrays(model))
    parts.release()
    return arrays, folder if known else None


def normalise_as(parts: Parts, folder: RunReader) -> None:
    """Clients normalise as in this run; SettingsError if it was on other inputs or classes than the data have."""
    described = folder.model_description()
    schema = parts.of_sites if parts.dataset is None else parts.dataset.schema
    for key in ("inputs", "classes"):
        theirs, ours = [*(described.get(key) or ())], [*(schema.get(key) or ())]
        if theirs and ours and theirs != ours:
            raise SettingsError(f"{str(folder.path)!r} was trained on the {key} {theirs}, and the data have {ours}")
    parts.agreed = None if parts.run.data.normalise == "own" else folder.agreed()


def _measured(running: Running, file: str, arrays: ArrayRecord) -> ByClient:
    """The metrics of a model on each client's own test examples."""
    nodes = running.federation.nodes
    replies = evaluated_by(running, nodes.values(), arrays, {**running.config, protocol.OWN_TESTS: True})
    if problems := failures(running.run, len(nodes), replies):
        raise RunFailed(f"{file!r} could not be evaluated everywhere:" + "".join(f"\n  - {each}" for each in problems))
    names = ("loss", *running.prepared.task.reported, *map(evaluation.name_of, running.prepared.metrics))
    keys = {name: str(MetricKey(name, "own")) for name in ("examples", *names)}
    found: ByClient = {}
    for client, values in values_of(replies, "test_examples").items():
        if examples := values.get(keys["examples"]):
            own = {name: values[keys[name]] for name in names if keys[name] in values}
            found[client] = {"examples": int(examples), **own}
    if not found:
        raise RunFailed(f"{file!r} could not be evaluated: no client has test examples of its own")
    return found
