"""Reads an experiment: a shipped one by name, a file, YAML text, or the `experiment` of a Flower run config."""

from __future__ import annotations

import functools
import itertools
import os
import re
import shlex
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from fedbn_flwr.errors import SettingsError, did_you_mean, locate_errors
from fedbn_flwr.named import path_of
from fedbn_flwr.results.text import shorten
from fedbn_flwr.results.yaml_text import parse_yaml
from fedbn_flwr.trees import Draft, Tree, flat_settings

from ..registry import personalises
from ..settings import (
    DERIVED,
    PAPER,
    Cell,
    Experiment,
    Layer,
    Settings,
    check_settings,
    of_catalogue,
    strategy_name,
)
from .content import KEYS_OF_A_FILE, check_mapping, drop_given, merge, nested, read_content, without, write_out
from .expansion import (
    LISTS,
    MOST,
    VALIDATION,
    at,
    cells_of,
    changes_of_size,
    lists_of,
    values_in_words,
)

COMMAND_LINE = "command line"


def load_experiment(source: str, overrides: Sequence[str] = ()) -> Experiment:
    """Read an experiment (name of a shipped one, file ending in .yaml, or YAML text) and apply the overrides."""
    content, name = read_content(source)
    return read_experiment(content, parse_overrides(overrides), name=name)


def from_run_config(run_config: Tree) -> Experiment:
    """The experiment of a Flower run, from `experiment` and `set` of its run config."""
    return load_experiment(str(run_config["experiment"]), split_changes(str(run_config.get("set", ""))))


def merge_layers(layers: Iterable[Layer]) -> Draft:
    return functools.reduce(merge, (layer.settings for layer in layers), {})


def read_experiment(content: object, overrides: Tree = MappingProxyType({}), *, name: str = "experiment") -> Experiment:
    """Check a parsed file with the changes of a caller or a command line, and expand it into its runs."""
    file, changes = write_out(check_mapping(content, name)), dict(overrides)
    size, only = str(changes.pop("size", PAPER)), changes.pop("only", None)
    rows, of_size = _rows(file, changes, size, name)
    is_seeded = any(layer.settings.get("seeds") for row in rows for layer in row.cells[0][1])
    defaults, compared = _defaults(rows), {key for row in rows for key in flat_settings(row.own)} - {"seed", "seeds"}
    runs: list[Settings] = []
    origins: dict[str, Sequence[Layer]] = {}
    for row in _select(rows, of_size if only is None else only, name):
        for cell, own in row.cells:
            layers = [*defaults(own), *own]
            runs += _runs_of(name, row.label, cell, layers, compared)
            origins[runs[-1].label] = [Layer("data set", {"data": of_catalogue(runs[-1].data.name)}), *layers]
            if len(runs) > MOST:
                raise SettingsError(f"{name}: more than {MOST:,} runs; shorten the lists of sweep and tune, or seeds")
    if overrides or size != PAPER:
        _check_different(runs, name)
    if not all(run.rounds for run in runs):
        asked = [(run.label, each) for run in runs for each in _without_training(run)]
        origins |= {each.label: origins[label] for label, each in asked}
        runs = _once([each for _, each in asked], name)
    return Experiment(runs[0].name, tuple(runs), str(file.get("description", "")), is_seeded, origins)


@dataclass(frozen=True)
class _Row:
    """One of the `runs` of an experiment, and the layers of each of its cells."""

    label: str
    own: Tree  # its changes to the file
    cells: Sequence[tuple[Cell, Sequence[Layer]]]


def _rows(content: Tree, changes: Tree, size: str, name: str) -> tuple[list[_Row], object]:
    """The rows of a file after the changes of a size and of the caller, and the `only` of the size."""
    for key in changes.keys() & {"runs", "sizes", "extends"}:
        raise SettingsError(
            f"{name}: an override cannot change {key} (= {changes[key]!r}); only=LABEL selects from the runs, "
            "size=NAME one of the sizes"
        )
    if isinstance(cell := content.get("cell"), Mapping) and changes.keys() - {"seed"}:
        content = {**without(content, "cell"), "label": cell.get("row", "")}  # settings of another run, now changed
    variants = content.get("runs") or {"": {}}
    if not isinstance(variants, Mapping) or not all(isinstance(v, Mapping | None) for v in variants.values()):
        raise SettingsError(f"{name}: runs must map a label to changes, for instance FedAvg: {{rounds: 3}}")
    places = {f"{name}, run {label!r}" if label else name: variant or {} for label, variant in variants.items()}
    of_size, *of_runs = changes_of_size(size, [(name, content), *places.items()], name)
    only = of_size.pop("only", None)
    file = Layer("file", {"name": name, **without(content, *(KEYS_OF_A_FILE.keys() - {"seeds"}))})
    rows: list[_Row] = []
    for label, (where, variant), of_run in zip(variants, places.items(), of_runs, strict=True):
        own, resized = without(variant, *LISTS, "sizes"), merge(of_size, of_run)
        resized |= {} if size == PAPER else {"size": size}
        lists = lists_of(where, own, content, variant, resized, changes)
        plain, later = without(resized, *LISTS), {**(changes.get("sweep") or {}), **(changes.get("tune") or {})}
        plain = nested(drop_given(plain, later).items()) if later else plain
        last = Layer(f"size {size}", plain), Layer(COMMAND_LINE, without(changes, *LISTS))
        first = file, Layer(f"run {label}", own)
        cells = itertools.islice(cells_of(label, len(rows), lists, merge_layers(last)), MOST + 1)
        listed = [(cell, [Layer(kind, nested(getattr(cell, kind).items())) for kind in LISTS]) for cell in cells]
        rows.append(_Row(label, own, [(cell, [*first, *layers, *last]) for cell, layers in listed]))
    return rows, only


def _defaults(rows: Sequence[_Row]) -> Callable[[Sequence[Layer]], list[Layer]]:
    """Decide from all rows how clients evaluate; a function that returns the layers below a cell's.

    If a strategy of the experiment personalises, clients evaluate in all runs, so that a table compares like with like,
    and if values are tuned, all train on the same examples; also if only some of the runs are carried out now (`only`).
    """

    def strategy(layers: Sequence[Layer]) -> Tree:
        spec = at(merge_layers(layers), "strategy")
        return {"name": "FedAvg", **(spec if isinstance(spec, Mapping) else {})}

    cells = [each for row in rows for each in row.cells]
    validation = {"evaluate": {"validation": VALIDATION}} if any(cell.tune for cell, _ in cells) else {}
    specs = {repr(spec): spec for spec in (strategy(layers) for _, layers in cells)}
    personal = {key: spec for key, spec in specs.items() if personalises(spec)}
    origin = "".join(f"default, as {strategy_name(spec)} personalises" for spec in [*personal.values()][:1])

    def below(layers: Sequence[Layer]) -> list[Layer]:
        clients = repr(strategy(layers)) in personal or "own"
        evaluation = [Layer(origin, {"evaluate": {"clients": clients}})] if personal else []
        return [Layer("default", validation), *evaluation]

    return below


def _runs_of(name: str, row: str, cell: Cell, layers: Sequence[Layer], compared: Collection[str]) -> list[Settings]:
    """A run of a cell for each seed."""
    label = ", ".join([*filter(None, [row]), *values_in_words(cell)])
    with locate_errors(f"{name}, run {label!r}" if label else name):
        return _for_each_seed(_settings_of(row, cell, layers, compared))


def _for_each_seed(settings: Draft) -> list[Settings]:
    """A run for each of its seeds."""
    seeds = settings.pop("seeds", None)
    if seeds is not None and not (isinstance(seeds, list) and seeds and {*map(type, seeds)} == {int}):
        raise SettingsError(f"seeds is {seeds!r}; expected a list of numbers, for instance [0, 1, 2]")
    if seeds is None and settings.get("seed") is None:
        first = check_settings({**settings, "seed": 0})
        if (test := first.data.held_out) is None or not test.folds or test.split is not None:
            return [first]
        seeds = range(test.folds)
    return [check_settings({**settings, "seed": seed}) for seed in seeds or [settings["seed"]]]


def _settings_of(row: str, cell: Cell, layers: Sequence[Layer], compared: Collection[str]) -> Draft:
    """The settings of a cell, with its place and its label, which names compared settings that an override changes."""
    settings = merge_layers(layers)
    if cell.tune and at(settings, "evaluate.validation") == 0:
        raise SettingsError(
            f"evaluate.validation is 0, but the best value of tune ({', '.join(cell.tune)}) is chosen by held-out "
            f"training examples; leave it out for {VALIDATION}"
        )
    spec = settings.get("strategy")
    label = row or str(settings.get("label") or strategy_name(spec if isinstance(spec, Mapping) else {}))
    if cell.values or "cell" not in settings:  # another run's settings keep their place
        # Candidates of tune are compared within a row, so a strategy that is a candidate does not name it.
        own = row if any(key.partition(".")[0] == "strategy" for key in cell.values) else label
        settings["cell"] = cell.model_copy(update={"row": own}).model_dump()
    planned, found = (flat_settings(layer) for layer in (merge_layers(layers[:-1]), settings))
    changed = [key for key in sorted(compared) if found.get(key) != planned.get(key)]
    more = [f"{key}={found[key]}" for key in changed if key in found]
    return {**settings, "label": ", ".join([label, *values_in_words(cell), *more])}


def _select(rows: Sequence[_Row], only: object, name: str) -> Sequence[_Row]:
    """The rows that `only` names, which is a label or a list of labels, in the order of the file; all if it is None."""
    known = [row.label for row in rows]
    labels = known if only is None else [str(label) for label in (only if isinstance(only, list) else [only])]
    if (unknown := [label for label in labels if label not in known]) or not labels:
        wrong = ", ".join(unknown)
        hint = did_you_mean(wrong, known) if any(known) else "it has no runs to select from"
        raise SettingsError(f"only={wrong!r} is not a label of {name}; {hint}")
    return [row for row in rows if row.label in labels]


def _check_different(runs: Sequence[Settings], name: str) -> None:
    seen: dict[str, str] = {}
    for run in runs:
        content = run.model_copy(update={"label": "", "cell": Cell()}).model_dump_json()
        if (other := seen.setdefault(content, run.label)) != run.label:
            raise SettingsError(
                f"{name}: the overrides make the runs {other!r} and {run.label!r} equal; select one with only=LABEL"
            )


# --- runs without rounds -----------------------------------------------------

# What decides how clients answer without training: runs that differ in nothing else ask the same.
_ASKED: Any = {
    **dict.fromkeys(("name", "rounds", "clients", "seed", "data", "model", "engine", "track", "size"), True),
    "train": {"loss", "channels_last"},
    "evaluate": {"server", "clients", "domains", "statistics", "metrics", "validation", "batch_size", "survey"},
}


def _without_training(run: Settings) -> list[Settings]:
    """A run for each model of `evaluate.models`, or for the initial one; a run that trains as it is."""
    return [run] if run.rounds else [_given(run, file) for file in run.evaluate.models or (run.model.weights or "",)]


def _given(run: Settings, file: str) -> Settings:
    """The run in which the clients get the model in this file, or in this run folder, and no strategy takes part."""
    weights = os.path.join(file, "model.safetensors") if file and path_of(file).is_dir() else file
    label = "survey" if run.evaluate.survey else file or "the initial model"
    clients = "own" if run.evaluate.clients is None else run.evaluate.clients
    own: Draft = {"label": label, "model": {"weights": weights or None}, "evaluate": {"clients": clients}}
    if run.evaluate.survey:  # the statistics of layers are means over training batches
        own["train"] = {"batch_size": run.train.batch_size}
    return check_settings(merge(run.model_dump(mode="json", include=_ASKED), {**own, "cell": {"row": label}}))


def _once(runs: Sequence[Settings], name: str) -> list[Settings]:
    """The runs without those that ask what another one asks."""
    found: dict[str, Settings] = {}
    for run in runs:
        if found.setdefault(run.label if not run.rounds else run.model_dump_json(), run) != run:
            raise SettingsError(
                f"{name}: rounds is 0, and the runs differ in their data or network; choose one by only=LABEL and "
                "seed=NUMBER"
            )
    return list(found.values())


# --- origins ------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    key: str
    value: object
    origin: str  # the last layer that sets it


def settings_of(experiment: Experiment, run: Settings) -> list[Setting]:
    """All settings of a run that have a value, for `fedbn explain`."""
    origins = {key: layer.origin for layer in experiment.layers[run.label] for key in flat_settings(layer.settings)}
    return [
        # `optimizer: {name: sgd}`, and the seed of `seeds`
        Setting(key, value, origins.get(key) or origins.get(f"{key}.name") or origins.get(f"{key}s", "default"))
        for key, value in flat_settings(run.model_dump(mode="json")).items()
        if key != "name" and key.partition(".")[0] not in DERIVED and value is not None
    ]


# --- changes to an experiment -------------------------------------------------


def split_changes(text: str) -> list[str]:
    """The changes in `set`, separated by blanks; a change that contains blanks is quoted, as in a shell."""
    try:
        return shlex.split(text)
    except ValueError:
        raise SettingsError(f"set={text!r} has a quote without its closing counterpart") from None


def parse_overrides(words: Sequence[str]) -> Tree:
    """`["rounds=3", "train.lr=0.1"]` as `{"rounds": 3, "train": {"lr": 0.1}}`; values are YAML."""
    if wrong := [word for word in words if not re.match("[^=]+=", word)]:
        raise SettingsError(
            f"{wrong[0]!r} is not of the form key=value, for instance rounds=3 or train.lr=0.1; put one that has "
            "blanks in quotes: 'strategy={name: FedBN}'"
        )

    def parsed(key: str, value: str) -> object:
        # A label is selected as written, even one such as `yes` or `A #2`.
        is_label = key == "only" and not value.startswith(("[", '"', "'"))
        found = value if is_label else parse_yaml(value, shorten(key, 200))
        if isinstance(found, Mapping) and (joined := [word for word in found if ":" in word and found[word] is None]):
            raise SettingsError(f"{key}={value}: YAML wants a blank after a colon: {joined[0].replace(':', ': ', 1)}")
        return found

    pairs = (word.split("=", 1) for word in words)
    return nested((key, parsed(key, value)) for key, value in pairs)
