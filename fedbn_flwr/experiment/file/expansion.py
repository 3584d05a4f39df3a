"""Expands a row of an experiment, one of its `runs`, into cells: one for each combination of the values of its lists.

`sweep` lists conditions, all of which are shown; `tune` lists hyperparameters, whose best values are chosen for each
row and condition. `sizes` has the changes that make an experiment smaller.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from fedbn_flwr.errors import SettingsError, did_you_mean
from fedbn_flwr.results.folder import flat_settings
from fedbn_flwr.results.text import in_words, shorten
from fedbn_flwr.schema import Section

from .content import merge, nested, written_out

PAPER, SMOKE = "paper", "smoke"
LISTS = ("sweep", "tune")
_WHOLE_FILE = ("name", "label", "cell", "size", "sizes", "runs", "description", "published", *LISTS)
MOST = 1_000  # runs of an experiment
VALIDATION = 0.1  # of the training examples, to choose among the values of `tune` if the file gives no share


class Cell(Section):
    """The place of a run in its experiment."""

    row: str = ""  # the label in `runs`
    sweep: Mapping[str, Any] = Field(default_factory=dict)  # its condition: a value for each key
    tune: Mapping[str, Any] = Field(default_factory=dict)  # the values that it tries
    place: Sequence[int] = ()  # the numbers of its row and of its values in the whole file, which a report sorts by


@dataclass(frozen=True)
class Lists:
    """The lists of values of a row, by key. A key with one value only is still part of the labels."""

    sweep: Mapping[str, Sequence[Any]]
    tune: Mapping[str, Sequence[Any]]

    def __len__(self) -> int:
        return math.prod(map(len, [*self.sweep.values(), *self.tune.values()]))

    def cells(self, row: str) -> Iterator[Cell]:
        """All combinations; values of the last key change first."""
        for condition in itertools.product(*self.sweep.values()):
            for candidate in itertools.product(*self.tune.values()):
                yield Cell(
                    row=row,
                    sweep=dict(zip(self.sweep, condition, strict=True)),
                    tune=dict(zip(self.tune, candidate, strict=True)),
                )

    def place(self, cell: Cell) -> list[int]:
        """The number of each value of a cell in its list; a value that the list lacks comes after it."""
        listed = {**self.sweep, **self.tune}
        return [[*listed[key], value].index(value) for key, value in {**cell.sweep, **cell.tune}.items()]

    def each(self, change: Callable[[str, Sequence[Any]], Sequence[Any]]) -> Lists:
        return Lists(*({key: change(key, each) for key, each in lists.items()} for lists in (self.sweep, self.tune)))


def overridden(key: str, values: Sequence[Any], changes: Mapping[str, Any]) -> list[Any]:
    """The different values of a list after changes: one that replaces them selects a cell, a part is added to each."""

    def written(value: Any) -> dict[str, Any]:
        return written_out(nested({key: value}))

    found: list[Any] = []
    for value in values:
        changed = _at(merge(written(value), changes), key)
        left = next((each for each in values if _at(written(each), key) == changed), changed)
        found += [left] if left not in found else []
    return found


def _at(settings: Any, key: str) -> Any:
    """The value of a key such as `train.lr`; None if there is none."""
    for part in key.split("."):
        settings = settings.get(part) if isinstance(settings, Mapping) else None
    return settings


def lists_of(where: str, own: Mapping[str, Any], *levels: Mapping[str, Any]) -> Lists:
    """The lists in `sweep` and `tune` of each level, of which a later one replaces or, by null, removes a key.

    The first level is the whole file, without the keys of which `own` gives the value or a part of it.
    """
    given = [f"{key}." for key in flat_settings(own)]
    found: dict[str, dict[str, Any]] = {kind: {} for kind in LISTS}
    for number, level in enumerate(levels):
        for kind in level.keys() & found.keys():
            lists = level[kind]
            if not isinstance(lists, Mapping | None):
                raise SettingsError(
                    f"{where}: {kind} is {lists!r}; expected lists of values by key, for instance train.lr: [0.01, 0.1]"
                )
            new = flat_settings(lists or {})
            if number == 0:
                new = {key: new[key] for key in new if not any(_overlap(f"{key}.", each) for each in given)}
            found[kind] = {} if lists is None else {**found[kind], **new}
    sweep, tune = ({key: each for key, each in lists.items() if each is not None} for lists in found.values())
    for kind, lists in zip(LISTS, (sweep, tune), strict=True):
        for key, values in lists.items():
            _check(where, kind, key, values)
    if both := sweep.keys() & tune.keys():
        raise SettingsError(f"{where}: {min(both)} is in sweep and in tune; a condition is not chosen, so give one")
    for key, longer in itertools.pairwise(sorted([*sweep, *tune])):
        if longer.startswith(f"{key}."):
            raise SettingsError(f"{where}: {longer} is a part of {key}, and both have lists; give one of them")
    return Lists(sweep, tune)


def _overlap(key: str, other: str) -> bool:
    return key.startswith(other) or other.startswith(key)


def _check(where: str, kind: str, key: str, values: Any) -> None:
    if key in ("seed", "seeds"):
        raise SettingsError(f"{where}: {kind} has {key}; give seeds: [0, 1, 2] beside {kind} instead")
    if key.partition(".")[0] in _WHOLE_FILE:
        raise SettingsError(f"{where}: {kind} has {key}, which is no setting of a run")
    if not isinstance(values, list) or not values:
        raise SettingsError(f"{where}: {kind}.{key} is {shorten(repr(values), 200)}; expected a list of values")
    if twice := [value for number, value in enumerate(values) if value in values[:number]]:
        raise SettingsError(f"{where}: {kind}.{key} has {twice[0]!r} twice; list each value once")


def check_count(name: str, lists: Mapping[str, Lists], seeds: int) -> None:
    """Refuse an experiment with too many runs; `lists` has those of each row."""
    if (total := sum(map(len, lists.values())) * seeds) > MOST:
        rows = ", ".join(f"{len(each)} of {row or 'its run'}" for row, each in lists.items())
        raise SettingsError(
            f"{name}: {total:,} runs ({shorten(rows, 200)}, each with {seeds} seed{'s' if seeds > 1 else ''}); "
            f"expected at most {MOST:,}; shorten the lists of sweep and tune"
        )


def left_sweep(cell: Cell, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The changes for settings of another run that no longer have the values of its place in a sweep."""
    values = flat_settings(written_out(nested({**cell.sweep, **cell.tune})))
    now = flat_settings(settings)
    if all(now.get(key) == value for key, value in values.items()):
        return {}
    label = str(settings.get("label", ""))
    return {"cell": Cell().model_dump(), "label": cell.row if label.startswith(f"{cell.row}, ") else label}


# --- labels -------------------------------------------------------------------


def values_in_words(cell: Cell) -> list[str]:
    """The values of a cell for its label, such as `lr=0.01`: a key by its last part if that is unambiguous."""
    values = {**cell.sweep, **cell.tune}
    short = {key: _short(key) for key in values}
    names = list(short.values())
    return [f"{key if names.count(short[key]) > 1 else short[key]}={in_words(value)}" for key, value in values.items()]


def _short(key: str) -> str:
    first, _, last = key.rpartition(".")
    return first.rpartition(".")[2] if first and last in ("name", "kind") else last


# --- sizes ----------------------------------------------------------------------


def changes_of_size(size: str, parts: Iterable[tuple[str, Mapping[str, Any]]], name: str) -> list[dict[str, Any]]:
    """What `sizes` of an experiment and of each of its runs have for a size; the file itself is `paper`."""
    known = {PAPER: None, SMOKE: None}  # which every experiment has
    found = []
    for where, content in parts:
        sizes = content.get("sizes") or {}
        if not isinstance(sizes, Mapping) or not all(isinstance(each, Mapping | None) for each in sizes.values()):
            raise SettingsError(f"{where}: sizes must map a size to changes, for instance small: {{rounds: 20}}")
        if PAPER in sizes:
            raise SettingsError(f"{where}: sizes has {PAPER}, which is the file as written; name smaller sizes only")
        for each, changes in sizes.items():
            if wrong := {"runs", "sizes", "size", "description", "published"} & (changes or {}).keys():
                raise SettingsError(f"{where}: sizes.{each} has {min(wrong)}, which a size cannot change")
        known |= dict.fromkeys(sizes)
        found.append(dict(sizes.get(size) or {}))
    if size not in known:
        raise SettingsError(f"{name} has no size {size!r}; {did_you_mean(size, known)}")
    return found
