"""Expands a row of an experiment, one of its `runs`, into cells: one for each combination of the values of its lists.

`sweep` lists conditions, all of which are shown; `tune` lists hyperparameters, whose best values are chosen for each
row and condition. `sizes` has the changes that make an experiment smaller.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from fedbn_flwr.errors import SettingsError, did_you_mean
from fedbn_flwr.results.folder import flat_settings
from fedbn_flwr.results.text import in_words, shorten

from ..sections import Section
from .content import SHORT, WHOLE, written_out

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
        found = ((list(listed.get(key, ())), value) for key, value in {**cell.sweep, **cell.tune}.items())
        return [[*values, value].index(value) for values, value in found]

    def with_given(self, given: Mapping[str, Any]) -> Lists:
        """The lists after overrides: an override of a listed key leaves its value only, and so selects cells."""

        def left(lists: Mapping[str, Sequence[Any]]) -> dict[str, Sequence[Any]]:
            return {key: _selected(key, values, _at(given, key)) for key, values in lists.items()}

        return Lists(left(self.sweep), left(self.tune))

    def first(self) -> Lists:
        """Only the first value of each list."""
        return Lists(*({key: values[:1] for key, values in each.items()} for each in (self.sweep, self.tune)))


def _selected(key: str, values: Sequence[Any], value: Any) -> Sequence[Any]:
    """What an override of a listed key leaves: its value, or all values if it adds a part to each of them."""
    if value is _ABSENT:
        return values
    if same := [each for each in values if _at(written_out(nested({key: each})), key) == value]:
        return same
    if not isinstance(value, Mapping) or WHOLE.get(key.rpartition(".")[2]) in value:
        return [value]
    parts = {part for each in values if isinstance(each, Mapping) for part in flat_settings(each)}
    if both := parts & flat_settings(value).keys():
        raise SettingsError(
            f"{key}.{min(both)} is overridden, and the values listed for {key} have it; give a whole value of {key}"
        )
    return values


def lists_of(where: str, *levels: Mapping[str, Any]) -> Lists:
    """The lists in `sweep` and `tune` of each level, of which a later one replaces or, by null, removes a key."""
    found: dict[str, dict[str, Sequence[Any]]] = {kind: {} for kind in LISTS}
    for level in levels:
        for kind, lists in found.items():
            if kind not in level:
                continue
            if (given := level[kind]) is None:
                lists.clear()
                continue
            if not isinstance(given, Mapping):
                raise SettingsError(
                    f"{where}: {kind} is {given!r}; expected lists of values by key, for instance train.lr: [0.01, 0.1]"
                )
            for key, values in flat_settings(given).items():
                if key in ("seed", "seeds"):
                    raise SettingsError(f"{where}: {kind} has {key}; give seeds: [0, 1, 2] beside {kind} instead")
                if key.partition(".")[0] in _WHOLE_FILE:
                    raise SettingsError(f"{where}: {kind} has {key}, which is no setting of a run")
                if values is None:
                    lists.pop(key, None)
                else:
                    lists[key] = _checked(f"{where}: {kind}.{key}", values)
    if both := found["sweep"].keys() & found["tune"].keys():
        raise SettingsError(f"{where}: {min(both)} is in sweep and in tune; a condition is not chosen, so give one")
    keys = sorted([*found["sweep"], *found["tune"]])
    for key, longer in itertools.pairwise(keys):
        if longer.startswith(f"{key}."):
            raise SettingsError(f"{where}: {longer} is a part of {key}, and both have lists; give one of them")
    return Lists(**found)


def _checked(where: str, values: Any) -> list[Any]:
    if not isinstance(values, list) or not values:
        raise SettingsError(f"{where} is {shorten(repr(values), 200)}; expected a list of values")
    if twice := [value for number, value in enumerate(values) if value in values[:number]]:
        raise SettingsError(f"{where} has {twice[0]!r} twice; list each value once")
    return values


def check_count(name: str, counts: Mapping[str, int], seeds: int) -> None:
    """Refuse an experiment with too many runs; `counts` has the cells of each row."""
    if (total := sum(counts.values()) * seeds) > MOST:
        rows = ", ".join(f"{count} of {row or 'its run'}" for row, count in counts.items())
        raise SettingsError(
            f"{name}: {total:,} runs ({shorten(rows, 200)}, each with {seeds} seed{'s' if seeds > 1 else ''}); "
            f"expected at most {MOST:,}; shorten the lists of sweep and tune"
        )


def check_parents(settings: Mapping[str, Any], key: str) -> None:
    """SettingsError if a listed key is below one whose value in the file is no mapping, and would replace it."""
    found: Any = settings
    parts = key.split(".")
    for number, part in enumerate(parts[:-1], start=1):
        if part not in found:
            return
        found = found[part]
        if isinstance(found, str) and part in SHORT:
            return
        if not isinstance(found, Mapping):
            above = ".".join(parts[:number])
            raise SettingsError(f"{above} is {found!r}; expected a mapping, since {key} has a list of values")


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


# --- nested settings ------------------------------------------------------------


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """`{"train.lr": 0.1}` as `{"train": {"lr": 0.1}}`."""
    settings: dict[str, Any] = {}
    for key, value in values.items():
        target = settings
        *path, last = key.split(".")
        for part in path:
            target = target.setdefault(part, {})
        target[last] = value
    return settings


def _at(settings: Any, key: str) -> Any:
    """The value of a key such as `train.lr`, or _ABSENT."""
    for part in key.split("."):
        if not isinstance(settings, Mapping) or part not in settings:
            return _ABSENT
        settings = settings[part]
    return settings


_ABSENT = object()


# --- sizes ----------------------------------------------------------------------


def changes_of_size(content: Mapping[str, Any], size: str, where: str) -> dict[str, Any]:
    """The changes that `sizes` of an experiment, or of one of its runs, has for a size; the file itself is `paper`."""
    sizes = _sizes(content, where)
    if PAPER in sizes:
        raise SettingsError(f"{where}: sizes has {PAPER}, which is the file as written; name the smaller sizes only")
    for each, changes in sizes.items():
        if wrong := {"runs", "sizes", "size", "description", "published"} & (changes or {}).keys():
            raise SettingsError(f"{where}: sizes.{each} has {min(wrong)}, which a size cannot change")
    return dict(sizes.get(size) or {})


def _sizes(content: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    sizes = content.get("sizes") or {}
    if not isinstance(sizes, Mapping) or not all(isinstance(each, Mapping | None) for each in sizes.values()):
        raise SettingsError(f"{where}: sizes must map a size to changes, for instance small: {{rounds: 20}}")
    return sizes


def check_size(size: Any, contents: Sequence[Mapping[str, Any]], name: str) -> str:
    """A size that some run of the experiment defines, or one that every experiment has."""
    known = list(dict.fromkeys([PAPER, SMOKE, *(key for each in contents for key in _sizes(each, name))]))
    if size not in known:
        raise SettingsError(f"{name} has no size {size!r}; {did_you_mean(str(size), known)}")
    return str(size)


def changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The values of two settings that differ, by key."""
    old, new = flat_settings(before), flat_settings(after)
    return {key: (old.get(key), new.get(key)) for key in dict.fromkeys([*old, *new]) if old.get(key) != new.get(key)}
