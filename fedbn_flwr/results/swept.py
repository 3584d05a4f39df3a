"""A sweep's results: accuracy against the value that it varies, one line per row, with the published figures."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .curves import Measure, is_number
from .published import published_figures
from .report import figure
from .rows import COLOURS, MARKERS, Row, deviation, endings, headline, mean
from .text import in_plot, in_words, shorten

if TYPE_CHECKING:
    from .figure import Plot  # imports matplotlib

_UNFINISHED = "not finished"


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


def tables(sweeps: Sequence[Sweep]) -> list[tuple[str, list[tuple[str, ...]]]]:
    """For each sweep a table with a column for each value."""
    found = []
    for sweep in sweeps:
        measure = _measure(sweep)
        lines: list[tuple[str, ...]] = [(sweep.key, *sweep.values)]
        for label, line in sweep.lines.items():
            cells = (line.get(word) for word in sweep.values)
            lines.append((label, *("-" if row is None else _cell(row, measure) for row in cells)))
        title = f"{Measure.of(measure).full_title} by {sweep.key}"
        found.append((title + (f", {sweep.title}" if sweep.title else ""), lines))
    return found


def _cell(row: Row, measure: str) -> str:
    return figure(row.figures(measure), 100, 2, "%", mark=row.unfinished)


def _measure(sweep: Sweep) -> str:
    """What the published figures are of; without some, what runs are compared by."""
    runs = [run for line in sweep.lines.values() for row in line.values() for run in row.runs]
    known = dict.fromkeys(key for run in runs for key in published_figures(run.config.get("published") or {}))
    first = headline(runs)
    return next((key for key in known if Measure.of(key).is_fraction), first) if first not in known else first


def plot(sweeps: Sequence[Sweep]) -> Plot:
    """A panel for each sweep; published figures are hollow markers on a dotted line, and runs that have not finished
    have a cross."""
    from .figure import Plot

    columns = min(3, len(sweeps))
    lines = -(-len(sweeps) // columns)
    picture = Plot(figsize=(1 + 5 * columns, 0.6 + 4 * lines), layout="constrained")
    panels = picture.subplots(lines, columns, squeeze=False).flatten()
    labels = list(dict.fromkeys(label for sweep in sweeps for label in sweep.lines))
    handles: dict[str, Any] = {}
    for panel, sweep in zip(panels, sweeps, strict=False):
        measure = _measure(sweep)
        for number, label in enumerate(labels):
            if label in sweep.lines:
                handles |= _draw(panel, sweep, label, measure, number)
        places = dict(zip(sweep.values, _places(sweep), strict=True))
        numbers = [float(value) for value in sweep.values.values()] if sweep.is_scale else []
        if numbers and min(numbers) > 0 and max(numbers) >= 50 * min(numbers):
            panel.set_xscale("log")
        panel.set_xticks(list(places.values()), [in_plot(shorten(word, 30)) for word in places])
        panel.minorticks_off()
        panel.set_xlabel(in_plot(sweep.key))
        panel.set_ylabel(f"{Measure.of(measure).full_title}, %")
        panel.set_title(in_plot(shorten(sweep.title, 60)), fontsize="medium")
        panel.grid(alpha=0.3)
    for panel in panels[len(sweeps) :]:
        panel.set_visible(False)
    if _UNFINISHED in handles:
        handles[_UNFINISHED] = handles.pop(_UNFINISHED)  # the last one
    names = [in_plot(shorten(label, 60)) for label in handles]
    picture.legend(handles.values(), names, loc="outside upper center", ncols=4, fontsize="small")
    return picture


def _places(sweep: Sweep) -> list[float]:
    """Where the values are on the axis: numbers at their own place, others side by side."""
    values = sweep.values.values()
    return [float(value) for value in values] if sweep.is_scale else [float(number) for number in range(len(values))]


def _draw(panel: Any, sweep: Sweep, label: str, measure: str, number: int) -> dict[str, Any]:
    line, colour = sweep.lines[label], COLOURS[number % len(COLOURS)]
    marker = MARKERS[number % len(MARKERS)]
    places = dict(zip(sweep.values, _places(sweep), strict=True))
    drawn: dict[str, Any] = {}
    measured = [
        (place, values)
        for word, place in places.items()
        if word in line and (values := line[word].figures(measure)) and math.isfinite(mean(values))
    ]
    unfinished = {place for word, place in places.items() if word in line and line[word].unfinished}
    if crossed := [(place, 100 * mean(values)) for place, values in measured if place in unfinished]:
        (drawn[_UNFINISHED],) = panel.plot(*zip(*crossed, strict=True), "kx", markersize=10, zorder=3)
    if measured:
        drawn[label] = panel.errorbar(
            [place for place, _ in measured],
            [100 * mean(values) for _, values in measured],
            [100 * (deviation(values) or 0.0) for _, values in measured],
            color=colour,
            marker=marker,
            capsize=3,
        )
    known = []
    for word, place in places.items():
        figures = published_figures(line[word].runs[0].config.get("published") or {}) if word in line else {}
        if measure in figures:
            known.append((place, *figures[measure]))
    if known:
        drawn[f"{label}, published"] = panel.errorbar(
            [place for place, _, _ in known],
            [100 * value for _, value, _ in known],
            [100 * (spread or 0.0) for _, _, spread in known],
            color=colour,
            marker=marker,
            markerfacecolor="none",
            linestyle=":",
            capsize=3,
        )
    return drawn
