"""The curves of a report: what was measured over the rounds, and what had been spent up to each of them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from typing import TypeVar

from fedbn_flwr.results.folder.traffic import Traffic
from fedbn_flwr.trees import Tree

from ..metric_key import MIB, MetricKey

Item = TypeVar("Item")

POINTS = 400  # of a curve: more cannot be distinguished on a screen

# What a curve can be drawn against: key, and title.
AXES = {
    "round": "rounds",
    "communication_rounds": "communication rounds",
    "mib": "MiB down and up",
    "seconds": "seconds",
}

_NO_MEASURES = {"round", "clients", "seconds", *(field.name for field in fields(Traffic))}


def measures(lines: Iterable[Tree]) -> list[MetricKey]:
    """All metrics in these lines of histories: of the global model first, of single domains after all others."""
    keys = dict.fromkeys(key for line in lines for key, value in line.items() if type(value) in (int, float))
    found = [MetricKey.parse(key) for key in keys if key not in _NO_MEASURES]
    return sorted(found, key=lambda key: (key.domain != "", key.whose != ""))


def spent(history: Iterable[Tree]) -> Iterator[dict[str, float]]:
    """For each line of a history: its round, and communication rounds, bytes, MiB and seconds up to its end."""
    total = dict.fromkeys(("communication_rounds", "bytes_down", "bytes_up", "seconds"), 0)
    for line in history:
        total = {key: before + line[key] for key, before in total.items()}
        yield {"round": line["round"], **total, "mib": (total["bytes_down"] + total["bytes_up"]) / MIB}


def curve(histories: Sequence[Sequence[Tree]], key: MetricKey, axis: str) -> tuple[list[float], list[list[float]]]:
    """Places on an axis of AXES, the mean over the runs, and the values of all runs at each of them.

    Only rounds in which all runs were measured count: an interrupted run shortens the curve of its row.
    """
    found, name = [], str(key)
    for history in histories:
        lines = zip(history, spent(history), strict=True)
        found.append({line["round"]: (at[axis], line[name]) for line, at in lines if is_number(line.get(name))})
    rounds = thin(sorted(set.intersection(*map(set, found))))
    places = [statistics.fmean(points[number][0] for points in found) for number in rounds]
    return places, [[points[number][1] for points in found] for number in rounds]


def is_number(value: object) -> bool:
    """Whether a value can be drawn: metrics of a run that diverged are not finite."""
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]


def thin(items: Sequence[Item], points: int = POINTS) -> list[Item]:
    """At most `points` of the items, evenly spaced, with the first and the last."""
    if len(items) <= points:
        return list(items)
    return [items[round(i * (len(items) - 1) / (points - 1))] for i in range(points)]
