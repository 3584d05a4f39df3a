"""Reads an experiment: a shipped one by name, a file, YAML text, or the `experiment` of a Flower run config."""

from __future__ import annotations

import copy
import functools
import json
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedbn_flwr.errors import SettingsError, did_you_mean
from fedbn_flwr.results.folder import flat_settings
from fedbn_flwr.results.text import shorten
from fedbn_flwr.results.yaml_text import DEPTH, parse_yaml

from ..faults import KEYS_OF_A_FILE, Faults, check_settings
from ..settings import DERIVED, Experiment, Layer, Settings, of_catalogue, resolve
from .content import WHOLE, checked_mapping, merge, nested, put, read_content, without, written_out
from .expansion import (
    LISTS,
    PAPER,
    SMOKE,
    VALIDATION,
    Cell,
    Lists,
    changes_of_size,
    check_count,
    left_sweep,
    lists_of,
    overridden,
    values_in_words,
)
from .figures import condition, figures_by_label, with_set_up
from .smoke import smoke

COMMAND_LINE = "command line"


def load_experiment(source: str, overrides: Sequence[str] = ()) -> Experiment:
    """Read an experiment (name of a shipped one, file ending in .yaml, or YAML text) and apply the overrides."""
    content, name = read_content(source)
    return read_experiment(content, overrides, name=name)


def from_run_config(run_config: Mapping[str, Any]) -> Experiment:
    """The experiment of a Flower run, from `experiment` and `set` of its run config."""
    return _from_run_config(str(run_config["experiment"]), str(run_config.get("set", "")))


# Cached, because a client is made for each message.
@functools.lru_cache(maxsize=8)
def _from_run_config(source: str, changes: str) -> Experiment:
    return load_experiment(source, split_changes(changes))


def merged(layers: Iterable[Layer]) -> dict[str, Any]:
    return functools.reduce(merge, (layer.settings for layer in layers), {})


@dataclass(frozen=True)
class _Row:
    """One of the `runs` of an experiment: what it gives, in the file and for the size, and its lists of values."""

    label: str
    number: int
    variant: Mapping[str, Any]  # what differs from the other rows
    layers: Sequence[Layer]  # in the file
    of_size: Mapping[str, Any]
    lists: Lists
    whole: Lists  # before overrides selected from them


@dataclass(frozen=True)
class _Plan:
    """What the rows of an experiment have in common."""

    size: str
    changes: Mapping[str, Any]  # of the command line
    compared: Collection[str]  # keys in which the rows differ
    tuned: bool
    figures: Mapping[str, Any]


def read_experiment(content: Any, overrides: Sequence[str] = (), *, name: str = "experiment") -> Experiment:
    """Check a parsed file with the overrides of a command line, and expand it into its runs."""
    content = written_out(checked_mapping(content, name))
    variants = content.get("runs") or {"": {}}
    if not isinstance(variants, Mapping) or not all(isinstance(v, Mapping | None) for v in variants.values()):
        raise SettingsError(f"{name}: runs must map a label to changes, for instance FedAvg: {{rounds: 3}}")
    changes = parse_overrides(overrides)
    for key in ("runs", "sizes", "extends"):
        if key in changes:
            raise SettingsError(
                f"{name}: an override cannot change {key} (= {changes[key]!r}); only=LABEL selects from the runs, "
                "size=NAME one of the sizes"
            )
    places = {f"{name}, run {label!r}" if label else name: variant or {} for label, variant in variants.items()}
    size = str(changes.pop("size", PAPER))
    of_size, *of_runs = changes_of_size(size, [(name, content), *places.items()], name)
    given = {COMMAND_LINE: changes, f"size {size}": of_size, "file": content}
    seeded_by = next((origin for origin, layer in given.items() if "seeds" in layer), None)
    if "seed" in changes and seeded_by != COMMAND_LINE:  # which replaces `seeds` of the file
        seeded_by = None
    seeds = None if seeded_by is None else given[seeded_by]["seeds"]
    if seeded_by and not (isinstance(seeds, list) and seeds and all(type(seed) is int for seed in seeds)):
        raise SettingsError(f"{name}: seeds is {seeds!r}; expected a list of numbers, for instance [0, 1, 2]")
    own_changes = without(changes, "seeds", "only", *LISTS)
    file = Layer("file", {"name": name, **without(content, "published", *KEYS_OF_A_FILE)})
    rows, in_file = {}, {}
    for number, (label, (where, variant), of_run) in enumerate(zip(variants, places.items(), of_runs, strict=True)):
        own, resized = without(variant, *LISTS, "sizes"), merge(of_size, of_run)
        in_file[label] = lists_of(where, own, content, variant)
        lists = whole = lists_of(where, own, content, variant, resized, changes)
        resized = without(resized, "seeds", "only", *LISTS)
        for each in (resized, own_changes):
            lists = lists.each(functools.partial(overridden, changes=each))
        if size == SMOKE:
            lists = lists.each(lambda _, values: values[:1])
        rows[label] = _Row(label, number, own, (file, Layer(f"run {label}", own)), resized, lists, whole)
    if (published := content.get("published")) is not None:  # whose labels are compared with those of all cells
        check_count(name, in_file, 1)
    plan = _Plan(
        size,
        own_changes,
        compared={key for row in rows.values() for key in flat_settings(row.variant)},
        tuned=any(row.lists.tune for row in rows.values()),
        figures=figures_by_label(published, in_file, name),
    )
    only = changes.get("only", of_size.get("only"))
    as_written = [word.partition("=")[2] for word in overrides if word.startswith("only=")]
    if as_written and as_written[-1] in rows:  # not as YAML, in which "A #2" is A
        only = as_written[-1]
    chosen = rows if only is None else _select(rows, only, name)
    if seeds and size == SMOKE:
        seeds = seeds[:1]
    check_count(name, {label: row.lists for label, row in chosen.items()}, len(seeds or [0]))
    runs, layers, faults = [], {}, Faults()
    for row in chosen.values():
        for found in row.lists.cells(row.label):
            cell = found.model_copy(update={"place": [row.number, *row.whole.place(found)]})
            with faults.of(", ".join([*filter(None, [row.label]), *values_in_words(cell)])):
                given_by, settings = _settings_of(row, cell, plan)
                for seed in seeds or [settings.get("seed", 0)]:
                    run = check_settings({**settings, "seed": seed})
                    runs.append(resolve(run))
                data_set = Layer("data set", {"data": of_catalogue(run.data)})
                by_seeds = [Layer(seeded_by, {"seed": seeds[0]})] if seeded_by and seeds else []
                layers[run.label] = [data_set, *given_by, *by_seeds]
    faults.refuse(name)
    if size != SMOKE and (changes or size != PAPER):  # two rounds are too few for some differences
        _check_different(runs, name)
    return Experiment(
        name=runs[0].name,
        runs=tuple(runs),
        # Nodes on other machines cannot read the file: they receive its content.
        run_config={"experiment": json.dumps({"name": name, **content}), "set": shlex.join(overrides)},
        description=str(content.get("description", "")),
        seeded=seeds is not None or "seeds" in content,
        layers=layers,
    )


@functools.cache
def _defaults() -> dict[str, Any]:
    return Settings().model_dump(mode="json")


def _settings_of(row: _Row, cell: Cell, plan: _Plan) -> tuple[list[Layer], dict[str, Any]]:
    """The layers of a cell: its row, its values, the changes of the size, and the overrides; and what they give."""
    values = {**cell.sweep, **cell.tune}
    for key in values:
        put(copy.deepcopy(merged(row.layers)), key, None)  # a section in the file may be no mapping
    layers = [*row.layers, *(Layer(kind, written_out(nested(getattr(cell, kind)))) for kind in LISTS)]
    if plan.tuned:  # all rows train on the same examples, also those without a choice
        layers.insert(0, Layer("default", {"evaluate": {"validation": VALIDATION}}))
    of_size, written, changes = row.of_size, merged(layers), plan.changes
    if plan.size == SMOKE:
        of_size = merge(
            smoke(check_settings(merge(written, changes)), keep_partition="partition" in changes.get("data", {})),
            of_size,
        )
    layers += [Layer(f"size {plan.size}", of_size), Layer(COMMAND_LINE, changes)]
    planned, settings = merged(layers[:-1]), merged(layers)
    if cell.tune and flat_settings(settings).get("evaluate.validation") == 0:
        raise SettingsError(
            f"evaluate.validation is 0, but the best value of tune ({', '.join(cell.tune)}) is chosen by held-out "
            f"training examples; leave it out for {VALIDATION}"
        )
    if not values and "cell" in settings:
        settings |= left_sweep(check_settings({"cell": settings["cell"]}).cell, settings)
    label = row.label or str(settings.get("label") or _strategy_name(settings))
    if plan.size != PAPER:
        settings["size"] = plan.size
    if (known := plan.figures.get(condition(cell), plan.figures.get(row.label))) is not None:
        settings["published"] = with_set_up(known, plan.size, merge(_defaults(), written), merge(_defaults(), settings))
    if not any("cell" in layer.settings for layer in row.layers) or values:  # another run's settings keep their place
        # Candidates of tune are compared within a row, so a strategy that is a candidate does not name it.
        own = row.label if any(key.partition(".")[0] == "strategy" for key in values) else label
        settings["cell"] = cell.model_copy(update={"row": own}).model_dump()
    more = _changed_by_overrides(row, flat_settings(planned), flat_settings(settings), plan.compared)
    return layers, {**settings, "label": ", ".join([label, *values_in_words(cell)]) + more}


def _select(known: Mapping[str, _Row], only: Any, name: str) -> dict[str, _Row]:
    """The rows that `only` names, which is a label or a list of labels, in the order of the file."""
    labels = [str(label) for label in (only if isinstance(only, list) else [only])]
    if not labels:
        raise SettingsError(f"only=[] selects no run of {name}; expected one or more of {', '.join(known)}")
    for label in labels:
        if label not in known:
            hint = did_you_mean(label, known) if any(known) else "it has no runs to select from"
            raise SettingsError(f"only={label!r} is not a label of {name}; {hint}")
    return {label: row for label, row in known.items() if label in labels}


def _changed_by_overrides(
    row: _Row, planned: Mapping[str, Any], settings: Mapping[str, Any], compared: Collection[str]
) -> str:
    """An addition to the label of a run: what the overrides change of the keys that the runs compare.

    A run that is named after its strategy or partition cannot get another one.
    """
    changed = [key for key in sorted(compared) if settings.get(key) != planned.get(key)]
    variant = flat_settings(row.variant)
    for key in changed:
        if key in variant and key.rpartition(".")[2] in WHOLE.values():
            raise SettingsError(
                f"{key} is {variant[key]!r} in this run, which its label says; an override must not replace "
                f"it by {settings.get(key)!r}. Leave the override out, select other runs with only=LABEL, or copy the "
                "experiment and change its runs"
            )
    return "".join(f", {key}={settings[key]}" for key in changed if key in settings)


def _check_different(runs: Sequence[Settings], name: str) -> None:
    seen: dict[str, str] = {}
    for run in runs:
        content = run.model_copy(update={"label": "", "cell": Cell()}).model_dump_json()
        if (other := seen.setdefault(content, run.label)) != run.label:
            raise SettingsError(
                f"{name}: the overrides make the runs {other!r} and {run.label!r} equal; select one with only=LABEL"
            )


def _strategy_name(settings: Mapping[str, Any]) -> str:
    strategy = settings.get("strategy")
    return str(strategy.get("name", "")) if isinstance(strategy, Mapping) else "FedAvg"


# --- origins ------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    key: str
    value: Any
    origin: str  # of the last layer that has it


def settings_of(experiment: Experiment, run: Settings) -> list[Setting]:
    """All settings of a run that have a value, for `fedbn explain`."""
    origins = {key: each.origin for each in experiment.layers[run.label] for key in flat_settings(each.settings)}
    return [
        Setting(key, value, origins.get(key) or origins.get(f"{key}.name", "default"))  # `optimizer: {name: sgd}`
        for key, value in flat_settings(run.model_dump(mode="json")).items()
        if key != "name" and key.partition(".")[0] not in (*DERIVED, "published") and value is not None
    ]


# --- changes to an experiment -------------------------------------------------


def split_changes(text: str) -> list[str]:
    """The changes in `set`, separated by blanks; one that has blanks is in quotes, as in a shell."""
    try:
        return shlex.split(text)
    except ValueError:
        raise SettingsError(f"set={text!r} has a quote without its closing counterpart") from None


def parse_overrides(words: Sequence[str]) -> dict[str, Any]:
    """`["rounds=3", "train.lr=0.1"]` as `{"rounds": 3, "train": {"lr": 0.1}}`; values are YAML."""
    changes: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise SettingsError(f"{word!r} is not of the form key=value, for instance rounds=3 or train.lr=0.1")
        if key.count(".") >= DEPTH:
            raise SettingsError(f"{shorten(word, 200)!r}: the key has more than {DEPTH} parts")
        put(changes, key, parse_yaml(value, shorten(key, 200)))
        changes = written_out(changes)
    return changes
