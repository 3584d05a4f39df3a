"""Reads an experiment: a shipped one by name, a file, YAML text, or the `experiment` of a Flower run config.

Each of its `runs` has a cell for each combination of the values of its lists. `sweep` lists conditions, which reports
show side by side; `tune` lists hyperparameters, whose best values are chosen for each run and condition. A cell is a
list of layers that are merged in order, and a run for each seed.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from fedbn_flwr.errors import SettingsError, did_you_mean, locate_errors
from fedbn_flwr.named import path_of
from fedbn_flwr.results.text import in_words, shorten
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

COMMAND_LINE = "command line"
LISTS = ("sweep", "tune")
_WHOLE_FILE = ("name", "label", "cell", "size", "sizes", "runs", "description", *LISTS)
MOST = 1_000  # runs of an experiment
VALIDATION = 0.1  # of the training examples, to choose among the values of `tune` if the file gives no share

Lists = Mapping[str, Mapping[str, Sequence[object]]]  # of `sweep` and `tune`: the values by key
Layered = tuple[Cell, list[Layer]]  # the file, its run, the values of the lists, the size and the command line
OWN = 1  # the layer of the run


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
    cells, of_size = _cells(file, changes, size, name)
    is_seeded = any(layer.settings.get("seeds") for _, layers in cells for layer in layers)
    compared = {key for _, layers in cells for key in flat_settings(layers[OWN].settings)} - {"seed", "seeds"}
    runs: list[Settings] = []
    origins: dict[str, Sequence[Layer]] = {}
    for cell, layers in _select(_with_defaults(cells), of_size if only is None else only, name):
        runs += _runs_of(name, cell, layers, compared)
        origins[runs[-1].label] = [Layer("data set", {"data": of_catalogue(runs[-1].data.name)}), *layers]
        if len(runs) > MOST:
            raise SettingsError(f"{name}: more than {MOST:,} runs; shorten the lists of sweep and tune, or seeds")
    if overrides or size != PAPER:
        _check_different(runs, name)
    asked: dict[str | int, Settings] = {}  # without rounds, by label: runs of several strategies ask the same
    for number, run in enumerate(runs):
        for key, each in [(number, run)] if run.rounds else _without_training(run):
            origins[each.label] = origins[run.label]
            if asked.setdefault(key, each) != each:
                raise SettingsError(
                    f"{name}: rounds is 0, and the runs differ in their data or network; choose one by only=LABEL and "
                    "seed=NUMBER"
                )
    return Experiment(runs[0].name, tuple(asked.values()), str(file.get("description", "")), is_seeded, origins)


# --- the cells of each run ----------------------------------------------------


def _cells(content: Tree, changes: Tree, size: str, name: str) -> tuple[list[Layered], object]:
    """The cells of a file after the changes of a size and of the caller, and the `only` of the size."""
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
    found: list[Layered] = []
    for number, (label, (where, variant), of_run) in enumerate(zip(variants, places.items(), of_runs, strict=True)):
        resized = merge(of_size, of_run) | ({} if size == PAPER else {"size": size})
        lists = lists_of(where, own := without(variant, *LISTS, "sizes"), content, variant, resized, changes)
        plain, later = without(resized, *LISTS), {**(changes.get("sweep") or {}), **(changes.get("tune") or {})}
        plain = nested(drop_given(plain, later).items()) if later else plain
        last = Layer(f"size {size}", plain), Layer(COMMAND_LINE, without(changes, *LISTS))
        for cell in itertools.islice(cells_of(label, number, lists, merge_layers(last)), MOST + 1):
            chosen = (Layer(kind, nested(getattr(cell, kind).items())) for kind in LISTS)
            found.append((cell, [file, Layer(f"run {label}", own), *chosen, *last]))
    return found, only


def cells_of(row: str, number: int, lists: Lists, changes: Tree) -> Iterator[Cell]:
    """All combinations of values after the changes of a size or a command line; the last key varies fastest."""
    axes = [(kind, key, _changed(key, values, changes)) for kind in LISTS for key, values in lists[kind].items()]
    for combination in itertools.product(*(pairs for _, _, pairs in axes)):
        chosen: dict[str, Draft] = {kind: {} for kind in LISTS}
        for (kind, key, _), (_, value) in zip(axes, combination, strict=True):
            chosen[kind][key] = value
        yield Cell(row=row, **chosen, place=[number, *(place for place, _ in combination)])


def _changed(key: str, values: Sequence[object], changes: Tree) -> list[tuple[int, object]]:
    """The distinct values of a list after the changes, each with its place in the list; a new value comes last.

    A change that gives the key itself selects one value; a change of part of a section applies to each value.
    """
    found: list[tuple[int, object]] = []
    for value in values:
        changed = at(merge(nested([(key, value)]), changes), key)
        pair = [*values, changed].index(changed), changed
        found += [pair] if pair not in found else []
    return found


def at(settings: object, key: str) -> Any:
    """The value of a key such as `train.lr`; None if there is none."""
    for part in key.split("."):
        settings = settings.get(part) if isinstance(settings, Mapping) else None
    return settings


def lists_of(where: str, own: Tree, *levels: Tree) -> Lists:
    """The lists of `sweep` and `tune`, merged over the levels: a later level replaces a key, or removes it by null.

    The first level is the whole file; keys that `own` sets, entirely or in part, are left out of it.
    """
    found: dict[str, Draft] = {kind: {} for kind in LISTS}
    for number, level in enumerate(levels):
        for kind in level.keys() & found.keys():
            lists = level[kind]
            if not isinstance(lists, Mapping | None):
                raise SettingsError(
                    f"{where}: {kind} is {lists!r}; expected lists of values by key, for instance train.lr: [0.01, 0.1]"
                )
            new = flat_settings(lists or {}) if number else drop_given(lists or {}, own)
            found[kind] = {} if lists is None else {**found[kind], **new}
    if both := found["sweep"].keys() & found["tune"].keys():
        raise SettingsError(f"{where}: {min(both)} is in sweep and in tune; a condition is not chosen, so give one")
    return {
        kind: {key: _checked(where, kind, key, values) for key, values in lists.items() if values is not None}
        for kind, lists in found.items()
    }


def _checked(where: str, kind: str, key: str, values: object) -> list[object]:
    """The values of a list, with `strategy: FedTAN` written out."""
    if key in ("seed", "seeds"):
        raise SettingsError(f"{where}: {kind} has {key}; give seeds: [0, 1, 2] next to {kind} instead")
    if key.partition(".")[0] in _WHOLE_FILE:
        raise SettingsError(f"{where}: {kind} has {key}, which isn't a setting of a run")
    if not isinstance(values, list) or not values:
        raise SettingsError(f"{where}: {kind}.{key} is {shorten(repr(values), 200)}; expected a list of values")
    if twice := [value for number, value in enumerate(values) if value in values[:number]]:
        raise SettingsError(f"{where}: {kind}.{key} has {twice[0]!r} twice; list each value once")
    return [at(nested([(key, value)]), key) for value in values]


def changes_of_size(size: str, parts: Iterable[tuple[str, Tree]], name: str) -> list[Draft]:
    """The changes for a size, from the `sizes` of an experiment and of each of its runs; `paper` is the file itself."""
    known = {PAPER}
    found = []
    for where, content in parts:
        sizes = content.get("sizes") or {}
        if not isinstance(sizes, Mapping) or not all(isinstance(changes, Mapping | None) for changes in sizes.values()):
            raise SettingsError(f"{where}: sizes must map a size to changes, for instance small: {{rounds: 20}}")
        if PAPER in sizes:
            raise SettingsError(f"{where}: sizes has {PAPER}, which is the file as written; name smaller sizes only")
        known |= sizes.keys()
        found.append(dict(sizes.get(size) or {}))
        if wrong := {"runs", "sizes", "size", "description"} & found[-1].keys():
            raise SettingsError(f"{where}: sizes.{size} has {min(wrong)}, which a size cannot change")
    if size not in known:
        raise SettingsError(f"{name} has no size {size!r}; {did_you_mean(size, known)}")
    return found


def _with_defaults(cells: Sequence[Layered]) -> list[Layered]:
    """The cells with layers below their own, which say how clients evaluate and follow from all cells.

    If a strategy of the experiment personalises, clients evaluate in all runs, so that a table compares like with like,
    and if values are tuned, all train on the same examples; also if only some of the runs are carried out now (`only`).
    """
    given = [at(merge_layers(layers), "strategy") for _, layers in cells]
    specs = [{"name": "FedAvg", **(spec if isinstance(spec, Mapping) else {})} for spec in given]
    personal = [spec for spec in specs if personalises(spec)]
    origin = "".join(f"default, as {strategy_name(spec)} personalises" for spec in personal[:1])
    validation = {"evaluate": {"validation": VALIDATION}} if any(cell.tune for cell, _ in cells) else {}
    found: list[Layered] = []
    for (cell, layers), spec in zip(cells, specs, strict=True):
        clients = {"evaluate": {"clients": spec in personal or "own"}} if personal else {}
        found.append((cell, [Layer("default", validation), Layer(origin, clients), *layers]))
    return found


def _runs_of(name: str, cell: Cell, layers: Sequence[Layer], compared: Collection[str]) -> list[Settings]:
    """A run of a cell for each seed."""
    label = ", ".join([*filter(None, [cell.row]), *values_in_words(cell)])
    with locate_errors(f"{name}, run {label!r}" if label else name):
        settings = _settings_of(cell, layers, compared)
        seeds = settings.pop("seeds", None)
        if seeds is not None and not (isinstance(seeds, list) and seeds and {*map(type, seeds)} == {int}):
            raise SettingsError(f"seeds is {seeds!r}; expected a list of numbers, for instance [0, 1, 2]")
        if seeds is None and settings.get("seed") is None:
            first = check_settings({**settings, "seed": 0})
            if (test := first.data.held_out) is None or not test.folds or test.split is not None:
                return [first]
            seeds = range(test.folds)
        return [check_settings({**settings, "seed": seed}) for seed in seeds or [settings["seed"]]]


def _settings_of(cell: Cell, layers: Sequence[Layer], compared: Collection[str]) -> Draft:
    """The settings of a cell, with its place and its label, which names compared settings that an override changes."""
    settings = merge_layers(layers)
    if cell.tune and at(settings, "evaluate.validation") == 0:
        raise SettingsError(
            f"evaluate.validation is 0, but the best value of tune ({', '.join(cell.tune)}) is chosen by held-out "
            f"training examples; leave it out for {VALIDATION}"
        )
    spec = settings.get("strategy")
    label = cell.row or str(settings.get("label") or strategy_name(spec if isinstance(spec, Mapping) else {}))
    if cell.values or "cell" not in settings:  # another run's settings keep their place
        # Candidates of tune are compared within a row, so a strategy that is a candidate does not name it.
        own = cell.row if any(key.partition(".")[0] == "strategy" for key in cell.values) else label
        settings["cell"] = cell.model_copy(update={"row": own}).model_dump()
    planned, found = (flat_settings(layer) for layer in (merge_layers(layers[:-1]), settings))
    changed = [key for key in sorted(compared) if found.get(key) != planned.get(key)]
    more = [f"{key}={found[key]}" for key in changed if key in found]
    return {**settings, "label": ", ".join([label, *values_in_words(cell), *more])}


def values_in_words(cell: Cell) -> list[str]:
    """The values of a cell for its label, such as `lr=0.01`; a key is its last part if that is unambiguous."""
    short = {key: _short(key) for key in cell.values}
    names = list(short.values())
    return [
        f"{key if names.count(short[key]) > 1 else short[key]}={in_words(value)}" for key, value in cell.values.items()
    ]


def _short(key: str) -> str:
    first, _, last = key.rpartition(".")
    return first.rpartition(".")[2] if first and last in ("name", "kind") else last


def _select(cells: Sequence[Layered], only: object, name: str) -> Sequence[Layered]:
    """The cells of the runs that `only` names, a label or a list of labels, in the order of the file; None: all."""
    known = [*dict.fromkeys(cell.row for cell, _ in cells)]
    labels = known if only is None else [str(label) for label in (only if isinstance(only, list) else [only])]
    if (unknown := [label for label in labels if label not in known]) or not labels:
        wrong = ", ".join(unknown)
        hint = did_you_mean(wrong, known) if any(known) else "it has no runs to select from"
        raise SettingsError(f"only={wrong!r} is not a label of {name}; {hint}")
    return [(cell, layers) for cell, layers in cells if cell.row in labels]


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


def _without_training(run: Settings) -> Iterator[tuple[str, Settings]]:
    """A run for each model of `evaluate.models`, or for the initial one, by its label.

    The clients get the model in this file, or in this run folder, and no strategy takes part.
    """
    for file in run.evaluate.models or (run.model.weights or "",):
        weights = os.path.join(file, "model.safetensors") if file and path_of(file).is_dir() else file
        label = "survey" if run.evaluate.survey else file or "the initial model"
        clients = "own" if run.evaluate.clients is None else run.evaluate.clients
        own: Draft = {"label": label, "model": {"weights": weights or None}, "evaluate": {"clients": clients}}
        if run.evaluate.survey:  # the statistics of layers are means over training batches
            own["train"] = {"batch_size": run.train.batch_size}
        asked = merge(run.model_dump(mode="json", include=_ASKED), {**own, "cell": {"row": label}})
        yield label, check_settings(asked)


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
