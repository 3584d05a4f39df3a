"""Chooses among the candidates of `tune`, and words for the size of an experiment.

The best candidate of each run and condition has the best main figure of its task (accuracy, RMSE) on held-out training
examples in the last evaluated round, mean over seeds. The test examples have no part in it.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from fedbn_flwr.tasks import goodness, is_lower_better, title_of

from ..read.runs import Run
from .curves import Measure
from .rows import Row, headline
from .tables import Lines, Table, as_measured


@dataclass(frozen=True)
class Choice:
    rows: list[Row]  # without the candidates that were not chosen
    candidates: Table  # of all of them; without lines if there are none
    notes: tuple[str, ...]  # sentences on the size of the experiment


def choose(rows: Sequence[Row]) -> Choice:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        run = row.runs[0]
        if run.cell.get("tune"):
            place = [run.summary.name, run.cell.get("row"), run.cell.get("sweep"), run.fixed_settings]
            groups.setdefault(json.dumps(place, sort_keys=True, default=str), []).append(row)
    best = [max(group, key=_mean) for group in groups.values() if any(_validation(row) for row in group)]
    dropped = {id(row) for group in groups.values() for row in group if any(each in group for each in best)}
    dropped -= {id(row) for row in best}
    main = headline(run for group in groups.values() for row in group for run in row.runs)
    measure, word = Measure.of(main), title_of(main)
    lines: Lines = [("run", f"validation {word}", f"test {word}", "runs", "chosen")]
    for row in (row for group in groups.values() for row in group):
        ended = sum(run.summary.status == "finished" for run in row.runs)
        runs = str(len(row.runs)) if ended == len(row.runs) else f"{ended} of {len(row.runs)} finished"
        figures = (as_measured(measure, values) for values in (_validation(row), row.figures(main)))
        lines.append((row.label, *figures, runs, "chosen" if any(row is each for each in best) else ""))
    kept = [row for row in rows if id(row) not in dropped]
    title = f"candidates: the best is chosen by the {word} on held-out training examples, mean over seeds"
    return Choice(kept, (title, lines if groups else []), tuple(_notes(rows)))


def _validation(row: Row) -> list[float]:
    return [value for run in row.runs if (value := _last(run)) is not None]


def _last(run: Run) -> float | None:
    if run.summary.status == "failed":  # what it reached before says nothing about its setting
        return None
    key = f"validation_{run.summary.of_task.main}"
    found = [line[key] for line in run.history if line.get(key) is not None]
    return float(found[-1]) if found and math.isfinite(found[-1]) else None


def _mean(row: Row) -> float:
    values, main = _validation(row), row.runs[0].summary.of_task.main
    if not values:
        return -math.inf
    # A run that diverged or failed has no figure: its row is not preferred for the seeds that did not.
    share = len(values) / len(row.runs)
    return goodness(main, statistics.fmean(values) * (1 / share if is_lower_better(main) else share))


def _notes(rows: Sequence[Row]) -> list[str]:
    """A sentence for each smaller size, for figures that are better when lower, and on random examples."""
    runs = [run for row in rows for run in row.runs]
    notes = [
        f"Size {size}, which is smaller than the file." for size in dict.fromkeys(r.summary.size for r in runs) if size
    ]
    mains = dict.fromkeys(run.summary.of_task.main for run in runs)
    if lower := [title_of(main) for main in mains if is_lower_better(main)]:
        notes.append(f"Lower is better: {', '.join(lower)}.")
    if any((run.config.get("data") or {}).get("random") for run in runs):
        notes.append("Random examples; figures mean nothing.")
    return notes
