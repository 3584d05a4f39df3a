"""Which runs a report shows together: rows of runs that differ only in their seed, candidates of `tune`, and sweeps."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from fedbn_flwr.errors import few
from fedbn_flwr.results.text import in_words
from fedbn_flwr.tasks import goodness
from fedbn_flwr.trees import Tree

from ..folder.summary import GLOBAL_MODEL
from ..metric_key import BEST, OWN, MetricKey
from ..result import Result
from .curves import is_number

_ENDING = 32  # characters of the ending of a row's name; what differs is also a table


def headline(runs: Sequence[Result]) -> MetricKey:
    """The metric that a comparison is about, which is the first in all tables and pictures.

    It is the main metric of the runs' task, or of the first one that all runs have. If clients of a run have models of
    their own, it is this metric on the clients' own examples, provided that all runs have it.
    """
    evaluated = [run.values for run in runs if run.summary.main is not None]
    mains = [run.summary.of_task.main for run in runs if run.summary.main is not None or not evaluated]
    main = next((main for main in mains if all(main in keys for keys in evaluated)), [*mains, "accuracy"][0])
    own = MetricKey(main, OWN)
    is_own = any(run.summary.personal for run in runs) and all(str(own) in keys for keys in evaluated)
    return own if evaluated and is_own else MetricKey(main)


def both(key: MetricKey, rows: Iterable[Row]) -> list[MetricKey]:
    """A metric, and the same one of the global model or on the clients' own examples, if a row has it."""
    other = key.of("" if key.whose == OWN else OWN)
    return [key, *([other] if any(row.values(other) for row in rows) else [])]


@dataclass(frozen=True)
class Row:
    """One line of the table: runs of one label that differ only in their seed.

    All of its metrics and its curve are of the same runs, which `counted` returns.
    """

    label: str
    runs: tuple[Result, ...]
    accuracy_of: str = ""  # where rows differ: whose accuracy it is, if not the global model's; a part of the label

    @cached_property
    def counted(self) -> tuple[Result, ...]:
        """The finished runs; if there are none, those that were evaluated, else those that trained a round, else all.

        Runs that diverged count only if all did.
        """
        runs = tuple(run for run in self.runs if run.summary.diverged_in is None) or self.runs
        finished = tuple(run for run in runs if run.summary.status == "finished")
        evaluated = tuple(run for run in runs if run.summary.main is not None)
        return finished or evaluated or tuple(run for run in runs if run.lines) or runs

    @property
    def diverged(self) -> bool:
        """Whether all runs diverged: the row has a curve up to then, and no results."""
        return all(run.summary.diverged_in is not None for run in self.runs)

    @property
    def divergence(self) -> str:
        """In which rounds runs diverged, in words; empty if none did."""
        rounds = sorted(run.summary.diverged_in for run in self.runs if run.summary.diverged_in is not None)
        if not rounds:
            return ""
        first, last = rounds[0], rounds[-1]
        return f"diverged in round {first}" if first == last else f"diverged in rounds {first} to {last}"

    @cached_property
    def unfinished(self) -> str:
        """The states of its runs that have not finished, for instance `failed`."""
        states = {run.summary.status for run in self.runs if run.summary.diverged_in is None} - {"finished"}
        return ", ".join(filter(None, (self.divergence, *sorted(states))))

    @property
    def marks(self) -> str:
        """What follows the label if runs have not finished, lacked clients, or are not counted."""
        left_out = f" ({repetitions(self)})" if len(self.counted) < len(self.runs) else ""
        missing = dict.fromkeys(run.summary.missing for run in self.counted)
        early = sorted({run.summary.rounds for run in self.counted if run.summary.stopped})
        ended = f"stopped after round {few(map(str, early), 5)}" if early else ""
        marks = ", ".join(filter(None, (self.unfinished, ended, *missing)))
        return (f" [{marks}]" if marks else "") + left_out

    @property
    def title(self) -> str:
        return self.label + self.marks

    @property
    def strategy(self) -> str:
        """Its name in the experiment, without swept values."""
        return str(self.first.cell.get("row") or self.first.summary.strategy) + self.accuracy_of

    @property
    def first(self) -> Result:
        """Its settings are the settings of all, except for the seed."""
        return self.runs[0]

    def values(self, metric: MetricKey) -> list[float]:
        """The value of each seed, of which repetitions count as one."""
        return list(self.by_seed(metric).values())

    def by_seed(self, metric: MetricKey) -> dict[int, float]:
        """The mean of each seed's counted runs; empty if one of them has no value, or if they diverged.

        Runs that diverged only have best values and costs.
        """
        key = str(metric)
        lacks = any(key not in run.values for run in self.counted)
        if lacks or (self.diverged and metric.whose not in BEST and key in self.first.summary.values):
            return {}
        values: dict[int, list[float]] = {}
        for run in self.counted:
            values.setdefault(run.summary.seed, []).append(float(run.values[key]))
        return {seed: mean(some) for seed, some in values.items()}


def runs_of(rows: Iterable[Row]) -> list[Result]:
    return [run for row in rows for run in row.runs]


def group(runs: Sequence[Result]) -> list[Row]:
    """A row for each label and settings, in the order of the first runs; equal labels get endings that differ."""
    rows: dict[tuple[str, str], list[Result]] = {}
    for run in runs:
        rows.setdefault((run.label, repr(sorted(run.settings.items()))), []).append(run)
    names = apart([(label, alike[0].settings) for (label, _), alike in rows.items()])
    mixed = len({run.summary.accuracy_of for run in runs}) > 1
    whose = [alike[0].summary.accuracy_of.removesuffix(", mean") for alike in rows.values()]
    notes = [f" ({model})" if mixed and model != GLOBAL_MODEL else "" for model in whose]
    return [Row(name + note, tuple(alike), note) for name, alike, note in zip(names, rows.values(), notes, strict=True)]


def apart(found: Sequence[tuple[str, Tree]]) -> list[str]:
    """The labels; equal labels with different settings get an ending: the values if they are short, else a number.

    Endings are the same if and only if the settings are.
    """
    names = [label for label, _ in found]
    for label in dict.fromkeys(names):
        same = [i for i, (other, _) in enumerate(found) if other == label]
        settings = [found[i][1] for i in same]
        keys = {key: re.sub(r"\.(name|kind)$", "", key).rpartition(".")[2] for key in differing(settings)}
        words = [", ".join(f"{keys[key]}={own[key]}" for key in keys if key in own) for own in settings]
        short = max(map(len, words)) <= _ENDING
        for i, text in zip(same, words, strict=True):
            names[i] += (text and f", {text}") if short else f" ({list(dict.fromkeys(words)).index(text) + 1})"
    return names


def differing(found: Sequence[Tree]) -> list[str]:
    """The keys whose values differ."""
    keys = dict.fromkeys(key for settings in found for key in settings)
    return [key for key in keys if any(settings.get(key) != found[0].get(key) for settings in found)]


def repetitions(row: Row) -> str:
    count, seeds = len(row.runs), len({run.summary.seed for run in row.runs})
    words = f"{seeds} {'seed' if seeds == 1 else 'seeds'}"
    share = f"{len(row.counted)} of " if len(row.counted) < count else ""
    return share + (words if count == seeds else f"{count} runs, {words}")


def mean(values: Sequence[float]) -> float:
    """Infinite or NaN if one of the values is, as a user's own metric may be."""
    return statistics.fmean(values) if all(map(math.isfinite, values)) else sum(values) / len(values)


def deviation(values: Sequence[float]) -> float | None:
    """The standard deviation of two or more finite values; else None."""
    return statistics.stdev(values) if len(values) > 1 and all(map(math.isfinite, values)) else None


# --- candidates of `tune` ---


def choose(rows: Sequence[Row]) -> list[Row]:
    """The rows with only the best candidate of each run and condition.

    The best has the best main metric of its task (accuracy, RMSE) on held-out training examples in the last evaluated
    round, mean over seeds. The test examples play no part. If no candidate was measured, all are kept.
    """
    groups: dict[str, list[Row]] = {}
    for row in candidates(rows):
        cell = row.first.cell
        place = [row.first.summary.name, cell.get("row"), cell.get("sweep"), row.first.fixed_settings]
        groups.setdefault(json.dumps(place, sort_keys=True, default=str), []).append(row)
    dropped: set[Row] = set()
    for group in groups.values():
        if any(map(validation, group)):
            dropped |= {*group} - {max(group, key=_goodness)}
    return [row for row in rows if row not in dropped]


def candidates(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if row.first.cell.get("tune")]


def validation(row: Row) -> list[float]:
    """The main metric on held-out training examples, of each run that counts and has not failed."""
    found = []
    for run in row.counted:
        key = str(MetricKey(run.summary.of_task.main, "validation"))
        values = [line[key] for line in run.lines if line.get(key) is not None]
        if run.summary.status != "failed" and values and math.isfinite(values[-1]):
            found.append(float(values[-1]))
    return found


def _goodness(row: Row) -> tuple[float, float]:
    """More measured seeds come first, so that a row is not preferred because its worst seeds diverged or failed."""
    values, main = validation(row), row.first.summary.of_task.main
    return len(values) / len(row.runs), goodness(main, statistics.fmean(values)) if values else 0.0


# --- sweeps ---


@dataclass(frozen=True)
class Sweep:
    """The rows of a report that differ in one swept value, under the same other conditions."""

    key: str  # whose values differ
    title: str  # the values of other swept keys
    values: list[str]  # in words; numbers in their order
    lines: dict[str, dict[str, Row]]  # label -> value in words -> row


def sweeps(rows: Sequence[Row]) -> list[Sweep]:
    """The sweeps among the chosen rows; if several keys have several values, the last one is compared."""
    given = [(row, swept) for row in rows if isinstance(swept := row.first.cell.get("sweep"), Mapping)]
    # `strategy.base.fraction_train` of a wrapper is `strategy.fraction_train` of another strategy.
    own = re.compile(r"^strategy\.(base\.)++(?!name$)")
    placed = [(row, {own.sub("strategy.", key): value for key, value in swept.items()}) for row, swept in given]
    keys = dict.fromkeys(key for _, condition in placed for key in condition)
    values = {key: {in_words(there[key]): there[key] for _, there in placed if key in there} for key in keys}
    found: dict[tuple[str, str], list[tuple[Row, str]]] = {}
    for row, condition in placed:
        if varied := [key for key in condition if len(values[key]) > 1]:
            rest = ", ".join(f"{key}={in_words(value)}" for key, value in condition.items() if key != varied[-1])
            found.setdefault((varied[-1], rest), []).append((row, in_words(condition[varied[-1]])))
    return [_sweep(key, rest, values[key], same) for (key, rest), same in found.items()]


def _sweep(key: str, title: str, values: Tree, rows: Sequence[tuple[Row, str]]) -> Sweep:
    """Rows of one label whose other settings differ are lines of their own, which name these settings."""
    words = [word for word in values if word in {word for _, word in rows}]
    if all(is_number(values[word]) for word in words):
        words.sort(key=float)
    names = apart([(row.strategy, row.first.fixed_settings) for row, _ in rows])
    lines: dict[str, dict[str, Row]] = {}
    for name, (row, word) in zip(names, rows, strict=True):
        is_taken = word in lines.get(name, {})  # by another candidate of `tune`, if none is chosen
        lines.setdefault(row.label if is_taken else name, {})[word] = row
    return Sweep(key, title, words, lines)
