"""The curves of a report: what was measured over the rounds, and what had been spent up to each of them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import TypeVar

from fedbn_flwr.engines.metered import Traffic
from fedbn_flwr.tasks import METRICS, SHARES, title_of
from fedbn_flwr.trees import Json

from ..read.runs import is_number

Item = TypeVar("Item")

MIB = 1024**2
POINTS = 400  # of a curve: more cannot be distinguished on a screen

# What a curve can be drawn against: key, and title.
AXES = {
    "round": "rounds",
    "communication_rounds": "communication rounds",
    "mib": "MiB down and up",
    "seconds": "seconds",
}

# What a metric is called, by the beginning of its key.
_TITLES = {
    "clients_own_": "{} on own data",
    "clients_": "clients' {}",
    "unseen_mean_": "newcomers' {}, mean batch norm",
    "unseen_batch_": "newcomers' {}, own statistics",
    "unseen_own_": "newcomers' {}, as the strategy has it",
    "validation_": "validation {}",
    "train_": "training {}",
    "best_test_": "best {} on test",
    "best_round_clients_own_": "{} on own data of the best round",
    "best_round_": "{} of the best round",
    "best_validation_": "best validation {}",
    "": "{}",
}
_OF_OTHERS = tuple(filter(None, _TITLES))
_ENDINGS = {"_worst_tenth": "mean of the worst tenth", "_std": "deviation over clients"}
_SPENT = {"bytes_down": ("MiB down", 1 / MIB, 2), "bytes_up": ("MiB up", 1 / MIB, 2), "seconds": ("seconds", 1, 1)}
_NO_MEASURES = {"round", "clients", "seconds", *(field.name for field in fields(Traffic))}


@dataclass(frozen=True)
class Measure:
    """A key of the history or of the summary in words, and how its values are shown."""

    key: str
    title: str
    scale: float = 1  # what a value is multiplied by; fractions are in percent
    unit: str = ""
    places: int | None = None  # digits after the point; by default as many as the values need

    @classmethod
    def of(cls, key: str) -> Measure:
        """The measure of a key: without a prefix it is of the global model; what follows a known metric is a domain."""
        if key in _SPENT:
            title, scale, places = _SPENT[key]
            return cls(key, title, scale, "", places)
        prefix = next(prefix for prefix in _TITLES if key.startswith(prefix))
        rest = key.removeprefix(prefix)
        ending = next((ending for ending in _ENDINGS if rest.endswith(ending)), "")
        name = rest.removesuffix(ending)
        base = next((base for base in METRICS if f"{name}_".startswith(f"{base}_")), name)
        domain = name.removeprefix(base).removeprefix("_")
        words = [_TITLES[prefix].format(title_of(base)), domain and f"domain {domain}", _ENDINGS.get(ending, "")]
        title = ", ".join(filter(None, words))
        return cls(key, title, 100, "%", 2) if base in SHARES else cls(key, title)

    @classmethod
    def of_client(cls, key: str) -> Measure:
        """A key of `clients.jsonl`."""
        return cls.of(key if key.startswith(("train_", "validation_")) else f"clients_{key}")

    @property
    def is_fraction(self) -> bool:
        return self.unit == "%"

    @property
    def axis(self) -> str:
        """The title of an axis of values."""
        return self.title + (", %" if self.is_fraction else "")

    def digits(self, values: Collection[float]) -> int:
        """How many digits after the point to show: about five digits in all, at most four after the point."""
        if self.places is not None:
            return self.places
        if values and all(type(value) is int for value in values):
            return 0
        largest = max((abs(value) for value in values if math.isfinite(value)), default=0.0)
        size = math.floor(math.log10(largest)) if largest else 0
        return max(0, min(4, 4 - size), min(2 - size, 8))


def measures(lines: Iterable[Json]) -> list[Measure]:
    """All measures in these lines of histories: of the global model first, of single domains after all others."""
    keys = dict.fromkeys(key for line in lines for key, value in line.items() if type(value) in (int, float))
    found = [Measure.of(key) for key in keys if key not in _NO_MEASURES]
    return sorted(found, key=lambda measure: (", domain " in measure.title, measure.key.startswith(_OF_OTHERS)))


def spent(history: Iterable[Json]) -> Iterator[dict[str, float]]:
    """For each line of a history: its round, and communication rounds, bytes, MiB and seconds up to its end."""
    total = dict.fromkeys(("communication_rounds", "bytes_down", "bytes_up", "seconds"), 0)
    for line in history:
        total = {key: before + line[key] for key, before in total.items()}
        yield {"round": line["round"], **total, "mib": (total["bytes_down"] + total["bytes_up"]) / MIB}


def curve(histories: Sequence[Sequence[Json]], key: str, axis: str) -> tuple[list[float], list[list[float]]]:
    """Places on an axis of AXES, the mean over the runs, and the values of all runs at each of them.

    Only rounds in which all runs were measured count: an interrupted run shortens the curve of its row.
    """
    found = []
    for history in histories:
        lines = zip(history, spent(history), strict=True)
        found.append({line["round"]: (at[axis], line[key]) for line, at in lines if is_number(line.get(key))})
    rounds = thin(sorted(set.intersection(*map(set, found))))
    places = [statistics.fmean(points[number][0] for points in found) for number in rounds]
    return places, [[points[number][1] for points in found] for number in rounds]


def thin(items: Sequence[Item], points: int = POINTS) -> list[Item]:
    """At most `points` of the items, evenly spaced, with the first and the last."""
    if len(items) <= points:
        return list(items)
    return [items[round(i * (len(items) - 1) / (points - 1))] for i in range(points)]
