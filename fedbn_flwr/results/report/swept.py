"""A sweep's results: the main figure against the value that it varies, one line per row."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..text import in_words
from .curves import Measure, is_number
from .published import published_figures
from .rows import Row, endings, headline
from .tables import Table, as_measured


@dataclass
class Sweep:
    """The rows of a report that differ in one swept value, under the same other conditions."""

    key: str  # whose values differ
    conditions: tuple[tuple[str, str], ...]  # the values of other swept keys
    lines: dict[str, dict[str, Row]] = field(default_factory=dict)  # label -> value in words -> row
    values: dict[str, Any] = field(default_factory=dict)  # in words, and as given

    @property
    def title(self) -> str:
        return ", ".join(f"{key}={value}" for key, value in self.conditions)

    @property
    def is_scale(self) -> bool:
        return all(is_number(value) for value in self.values.values())

    @property
    def places(self) -> dict[str, float]:
        """Where the values are on the axis: numbers at their own place, others side by side."""
        return {
            word: float(value) if self.is_scale else float(place)
            for place, (word, value) in enumerate(self.values.items())
        }

    @property
    def measure(self) -> str:
        """What the published figures are of; without some, what runs are compared by."""
        runs = [run for line in self.lines.values() for row in line.values() for run in row.runs]
        known = dict.fromkeys(key for run in runs for key in published_figures(run.config.get("published") or {}))
        first = headline(runs)
        return first if first in known else next((key for key in known if Measure.of(key).is_fraction), first)


def sweeps(rows: Sequence[Row]) -> list[Sweep]:
    """The sweeps among the rows, from which `choose` has removed the candidates of `tune` that were not chosen."""
    found_in = ((row, row.runs[0].cell.get("sweep")) for row in rows)
    placed = [(row, _of_all_rules(given)) for row, given in found_in if isinstance(given, Mapping) and given]
    values: dict[str, dict[str, Any]] = {}
    for _, condition in placed:
        for key, value in condition.items():
            values.setdefault(key, {})[in_words(value)] = value
    found: dict[tuple[str, tuple[tuple[str, str], ...]], list[tuple[Row, Any]]] = {}
    for row, condition in placed:
        # Numbers are the better axis, and among several keys the one with most values.
        key = max(condition, key=lambda key: (all(map(is_number, values[key].values())), len(values[key])))
        if len(values[key]) < 2:
            continue
        rest = tuple((other, in_words(value)) for other, value in condition.items() if other != key)
        found.setdefault((key, rest), []).append((row, condition[key]))
    return [_sweep(*place, rows) for place, rows in found.items()]


def _sweep(key: str, conditions: tuple[tuple[str, str], ...], rows: Sequence[tuple[Row, Any]]) -> Sweep:
    """Rows of one label whose other settings differ are lines of their own, which name these settings."""
    sweep = Sweep(key, conditions, values={in_words(value): value for _, value in rows})
    if sweep.is_scale:
        sweep.values = dict(sorted(sweep.values.items(), key=lambda item: float(item[1])))
    alike: dict[str, list[tuple[Row, Any]]] = {}
    for row, value in rows:
        alike.setdefault(_label(row), []).append((row, value))
    for label, same in alike.items():
        others = endings([(row.runs[0], row.runs[0].fixed_settings) for row, _ in same])
        for (row, value), other in zip(same, others, strict=True):
            line = sweep.lines.setdefault(label + other, {})
            if in_words(value) in line:  # candidates of `tune` none of which is chosen
                line = sweep.lines.setdefault(row.label, {})
            line[in_words(value)] = row
    return sweep


def _of_all_rules(condition: Mapping[str, Any]) -> dict[str, Any]:
    """The keys, with a wrapped rule's `strategy.base.fraction_train` as the `strategy.fraction_train` of others."""
    found: dict[str, Any] = {}
    for key, value in condition.items():
        short = re.sub(r"^strategy\.(base\.)+", "strategy.", key)
        found[key if short in {*condition, *found} else short] = value
    return found


def _label(row: Row) -> str:
    return str(row.runs[0].cell.get("row") or row.runs[0].summary.strategy) + row.accuracy_of


def tables(sweeps: Sequence[Sweep]) -> list[Table]:
    """For each sweep a table with a column for each value."""
    found = []
    for sweep in sweeps:
        lines: list[tuple[str, ...]] = [(sweep.key, *sweep.values)]
        for label, line in sweep.lines.items():
            cells = (line.get(word) for word in sweep.values)
            lines.append((label, *("-" if row is None else _cell(row, sweep.measure) for row in cells)))
        title = f"{Measure.of(sweep.measure).full_title} by {sweep.key}"
        found.append((title + (f", {sweep.title}" if sweep.title else ""), lines))
    return found


def _cell(row: Row, measure: str) -> str:
    return as_measured(Measure.of(measure), row.figures(measure), mark=row.unfinished)
