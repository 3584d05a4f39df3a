"""Expands a row of an experiment, one of its `runs`, into cells: one for each combination of the values of its lists.

`sweep` lists conditions, which reports show side by side; `tune` lists hyperparameters, whose best values are chosen
for each row and condition. `sizes` has the changes that make an experiment smaller.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from fedbn_flwr.errors import SettingsError, did_you_mean
from fedbn_flwr.results.text import in_words, shorten
from fedbn_flwr.trees import Draft, Tree, flat_settings

from ..settings import PAPER, Cell
from .content import drop_given, merge, nested

LISTS = ("sweep", "tune")
_WHOLE_FILE = ("name", "label", "cell", "size", "sizes", "runs", "description", *LISTS)
MOST = 1_000  # runs of an experiment
VALIDATION = 0.1  # of the training examples, to choose among the values of `tune` if the file gives no share

Lists = Mapping[str, Mapping[str, Sequence[object]]]  # of `sweep` and `tune`: the values by key


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


# --- labels -------------------------------------------------------------------


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


# --- sizes ----------------------------------------------------------------------


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
