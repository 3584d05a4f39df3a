"""The rows of a report: runs of one label that differ only in their seed."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..folder.summary import GLOBAL_MODEL
from ..read.runs import Run

_ENDING = 32  # characters of the ending of a row's name; what differs is also a table


def headline(runs: Iterable[Run]) -> str:
    """The measure that runs are compared by: the main figure of their task, or of one of their tasks that all have."""
    runs = list(runs)
    figures = [run.figures for run in runs if run.summary.main is not None]
    mains = list(dict.fromkeys(run.summary.of_task.main for run in runs if run.summary.main is not None or not figures))
    return next((main for main in mains if all(main in each for each in figures)), [*mains, "accuracy"][0])


@dataclass(frozen=True)
class Row:
    """One line of the table: runs of one label that differ only in their seed.

    All of its figures and its curve are of the same runs, those that `counted` returns.
    """

    label: str
    runs: tuple[Run, ...]
    accuracy_of: str = ""  # where rows differ: what `accuracy` is of, if not the global model; a part of the label

    @cached_property
    def counted(self) -> tuple[Run, ...]:
        """The finished runs; if none is, those that were evaluated, that trained a round, or all."""
        finished = tuple(run for run in self.runs if run.summary.status == "finished")
        evaluated = tuple(run for run in self.runs if run.summary.main is not None)
        return finished or evaluated or tuple(run for run in self.runs if run.history) or self.runs

    @cached_property
    def unfinished(self) -> str:
        """The states of its runs that have not finished, for instance `failed`."""
        return ", ".join(sorted({run.summary.status for run in self.runs} - {"finished"}))

    @property
    def title(self) -> str:
        """The label, and marks if runs have not finished, or are not in the figures."""
        left_out = f" ({repetitions(self)})" if len(self.counted) < len(self.runs) else ""
        return self.label + (f" [{self.unfinished}]" if self.unfinished else "") + left_out

    def figures(self, key: str) -> list[float]:
        """The values of all runs that are counted; none if one of them has no value."""
        found = [run.figures[key] for run in self.counted if key in run.figures]
        return list(map(float, found)) if len(found) == len(self.counted) else []

    def by_seed(self, key: str) -> dict[int, float]:
        """The mean over the runs of each seed."""
        found: dict[int, list[float]] = {}
        for run, value in zip(self.counted, self.figures(key), strict=False):
            found.setdefault(run.summary.seed, []).append(value)
        return {seed: mean(values) for seed, values in found.items()}


def group(runs: Sequence[Run]) -> list[Row]:
    """A row for each label and settings, in the order of the first runs; equal labels get endings that differ."""
    rows: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        rows.setdefault((run.label, repr(sorted(run.settings.items()))), []).append(run)
    ends: dict[tuple[str, str], str] = {}
    for label in {label for label, _ in rows}:
        same = [key for key in rows if key[0] == label]
        ends |= zip(same, endings([(rows[key][0], rows[key][0].settings) for key in same]), strict=True)
    mixed, found = len({run.summary.accuracy_of for run in runs}) > 1, []
    for key, alike in rows.items():
        of = alike[0].summary.accuracy_of.removesuffix(", mean")
        note = f" ({of})" if mixed and of != GLOBAL_MODEL else ""
        found.append(Row(key[0] + ends[key] + note, tuple(alike), note))
    return found


def endings(found: Sequence[tuple[Run, Mapping[str, Any]]]) -> list[str]:
    """An ending for the name of each run, short, and the same if and only if its settings are.

    That is: the values that differ, the experiment, its folder, or a number.
    """
    different = differences([settings for _, settings in found])
    names = list(dict.fromkeys(different))
    ways = (
        [each and f", {each}" for each in different],
        [f" ({run.summary.name})" for run, _ in found],
        [f" ({run.path.parent.name})" for run, _ in found],
    )
    for way in ways:
        if len(set(way)) == len(names) == len(set(zip(way, different, strict=True))) and max(map(len, way)) <= _ENDING:
            return way
    return [f" ({names.index(each) + 1})" for each in different]


def differing(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """The keys whose values differ."""
    keys = dict.fromkeys(key for each in found for key in each)
    return [key for key in keys if any(each.get(key) != found[0].get(key) for each in found)]


def differences(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """For each of several settings in words: its values where they differ; empty if they are equal."""
    keys = differing(found)
    short = [re.sub(r"^.*?([^.]+?)(\.name|\.kind)?$", r"\1", key) for key in keys]
    names = dict(zip(keys, short if len(set(short)) == len(keys) else keys, strict=True))
    return [", ".join(f"{name}={each[key]}" for key, name in names.items() if key in each) for each in found]


def repetitions(row: Row) -> str:
    count, seeds = len(row.runs), len({run.summary.seed for run in row.runs})
    words = f"{seeds} {'seed' if seeds == 1 else 'seeds'}"
    of = f"{len(row.counted)} of " if len(row.counted) < count else ""
    return of + (words if count == seeds else f"{count} runs, {words}")


def mean(values: Sequence[float]) -> float:
    """Infinite or NaN if a value is: a metric of the user may be."""
    return statistics.fmean(values) if all(map(math.isfinite, values)) else sum(values) / len(values)


def deviation(values: Sequence[float]) -> float | None:
    """The standard deviation of at least two values, all of which are finite."""
    return statistics.stdev(values) if len(values) > 1 and all(map(math.isfinite, values)) else None
