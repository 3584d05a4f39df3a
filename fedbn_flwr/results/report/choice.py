"""Chooses among the candidates of `tune`, and words for the size of an experiment.

The best candidate of each run and condition has the highest accuracy on held-out training examples in the last
evaluated round, mean over seeds. The test examples have no part in it.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ..read.runs import Run
from .rows import Row
from .tables import Lines, figure

TITLE = "candidates: the best is chosen by the accuracy on held-out training examples, mean over seeds"


@dataclass(frozen=True)
class Choice:
    rows: list[Row]  # without the candidates that were not chosen
    candidates: Lines  # a table of all of them; empty if there are none
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
    lines: Lines = [("run", "validation accuracy", "test accuracy", "runs", "chosen")]
    for row in (row for group in groups.values() for row in group):
        ended = sum(run.summary.status == "finished" for run in row.runs)
        runs = str(len(row.runs)) if ended == len(row.runs) else f"{ended} of {len(row.runs)} finished"
        figures = (figure(values, 100, 2, "%") for values in (_validation(row), row.figures("accuracy")))
        lines.append((row.label, *figures, runs, "chosen" if any(row is each for each in best) else ""))
    kept = [row for row in rows if id(row) not in dropped]
    return Choice(kept, lines if groups else [], tuple(_notes(rows)))


def _validation(row: Row) -> list[float]:
    return [value for run in row.runs if (value := _last(run)) is not None]


def _last(run: Run) -> float | None:
    if run.summary.status == "failed":  # what it reached before says nothing about its setting
        return None
    found = [line["validation_accuracy"] for line in run.history if line.get("validation_accuracy") is not None]
    return float(found[-1]) if found and math.isfinite(found[-1]) else None


def _mean(row: Row) -> float:
    values = _validation(row)
    # A run that diverged or failed has no figure: its row is not preferred for the seeds that did not.
    return statistics.fmean(values) * len(values) / len(row.runs) if values else -math.inf


def _notes(rows: Sequence[Row]) -> list[str]:
    """A sentence for each size of the runs other than that of the file, and one on random examples."""
    runs = [run for row in rows for run in row.runs]
    notes = [
        f"Size {size}, which is smaller than the file." for size in dict.fromkeys(r.summary.size for r in runs) if size
    ]
    if any((run.config.get("data") or {}).get("random") for run in runs):
        notes.append("Random examples; figures mean nothing.")
    return notes
