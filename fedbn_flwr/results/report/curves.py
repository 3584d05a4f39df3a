"""The curves of a report: what was measured over the rounds, and what had been spent up to each of them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from fedbn_flwr.tasks import MAINS, METRICS, SHARES, title_of

from ..folder.ledger import Traffic
from ..read.runs import is_number

MIB = 1024**2
POINTS = 400  # of a curve: more cannot be distinguished on a screen

# What a curve can be drawn against: key, and title.
AXES = {
    "round": "rounds",
    "communication_rounds": "communication rounds",
    "mib": "MiB down and up",
    "seconds": "seconds",
}

_OF = {
    "clients_own_": "clients, own test examples",
    "clients_": "clients, all test examples",
    "validation_": "held-out training examples",
    "unseen_": "new clients, own test examples",
    "train_": "training",
    "best_test_": "global model",
    "best_round_": "global model",
    "best_validation_": "held-out training examples",
    "": "global model",
}
_ENDINGS = {"_worst_tenth": "mean of the worst tenth", "_std": "deviation over clients", "_tuned": "fine-tuned"}
_NO_MEASURES = {"round", "clients", "seconds", *(field.name for field in fields(Traffic))}


@dataclass(frozen=True)
class Measure:
    """A key of the history, in words."""

    key: str
    group: str  # the models and examples that it is of
    title: str
    is_fraction: bool

    @classmethod
    def of(cls, key: str, keys: Collection[str] = ()) -> Measure:
        """`auc_sea` is the AUC of a domain if the main figure of a task has that domain too, `accuracy_sea` among the
        other `keys`, else a metric of the user."""
        prefix = next(prefix for prefix in _OF if key.startswith(prefix))
        rest = key.removeprefix(prefix)
        ending = next((ending for ending in _ENDINGS if rest.endswith(ending)), "")
        name = rest.removesuffix(ending)

        def is_of(base: str) -> bool:
            mains = [f"{prefix}{main}{name.removeprefix(base)}" for main in MAINS]
            return name == base or (name.startswith(f"{base}_") and not {key, *keys}.isdisjoint(mains))

        base = next(filter(is_of, METRICS), "")
        domain = name.removeprefix(f"{base}_") if base and name != base else ""
        words = title_of(base or name)
        details = [part for part in (f"domain {domain}" if domain else "", _ENDINGS.get(ending, "")) if part]
        before = "training " if prefix == "train_" else prefix.replace("_", " ") if prefix.startswith("best_") else ""
        title = ", ".join([before + words, *details])
        return cls(key, _OF[prefix], title, base in SHARES)

    @classmethod
    def of_client(cls, key: str, keys: Iterable[str] = ()) -> Measure:
        """A key of `clients.jsonl`."""
        return cls.of(_in_history(key), set(map(_in_history, keys)))

    @property
    def scale(self) -> float:
        """What a value is multiplied by to be shown; fractions in percent."""
        return 100 if self.is_fraction else 1

    @property
    def unit(self) -> str:
        return "%" if self.is_fraction else ""

    @property
    def axis(self) -> str:
        """The title of an axis of values."""
        return self.full_title + (", %" if self.is_fraction else "")

    def in_words(self, value: float) -> str:
        return f"{self.scale * value:.4g}{self.unit}"

    def digits(self, values: Iterable[float], of_share: int = 2) -> int:
        """The digits after the point with which values are shown: so many of a percentage, of others about five in all.

        Of values below 10 they are four.
        """
        largest = max((abs(value) for value in values if math.isfinite(value)), default=0.0)
        if self.is_fraction or not largest:
            return of_share if self.is_fraction else 4
        size = math.floor(math.log10(largest))
        return max(0, min(4, 4 - size), min(2 - size, 8))

    @property
    def full_title(self) -> str:
        return self.title if self.group == "training" else f"{self.title} ({self.group})"

    @property
    def of_clients(self) -> str:
        """The title where it is clear that the figure is of clients."""
        return self.full_title.replace("(clients, ", "(")


def _in_history(key: str) -> str:
    return key if key.startswith(("train_", "validation_", "unseen_")) else f"clients_{key}"


def measures(histories: Iterable[Sequence[Mapping[str, Any]]]) -> list[Measure]:
    """All measures of the runs: those of the global model first, those of single domains after all others."""
    lines = (line for history in histories for line in history)
    keys = dict.fromkeys(key for line in lines for key, value in line.items() if type(value) in (int, float))
    found = [Measure.of(key, keys) for key in keys if key not in _NO_MEASURES]
    groups = ["global model", *(group for group in _OF.values() if group != "global model")]
    return sorted(found, key=lambda measure: (", domain " in measure.title, groups.index(measure.group)))


def spent(history: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, float]]:
    """For each line of a history: rounds, communication rounds, MiB and seconds up to its end."""
    rounds, size, seconds = 0, 0, 0.0
    for line in history:
        rounds += int(line["communication_rounds"])
        size += int(line["bytes_down"]) + int(line["bytes_up"])
        seconds += float(line["seconds"])
        yield {"round": line["round"], "communication_rounds": rounds, "mib": size / MIB, "seconds": seconds}


def curve(
    histories: Sequence[Sequence[Mapping[str, Any]]], key: str, axis: str
) -> tuple[list[float], list[list[float]]]:
    """Places on an axis of AXES, the mean over the runs, and the values of all runs at each of them.

    Only of rounds in which all runs were measured: an interrupted run shortens the curve of its row.
    """
    found = []
    for history in histories:
        lines = zip(history, spent(history), strict=True)
        found.append({line["round"]: (at[axis], line[key]) for line, at in lines if is_number(line.get(key))})
    rounds = thinned(sorted(set.intersection(*map(set, found))))
    places = [statistics.fmean(each[number][0] for each in found) for number in rounds]
    return places, [[each[number][1] for each in found] for number in rounds]


def thinned(items: Sequence[Any], points: int = POINTS) -> list[Any]:
    """At most `points` of the items, evenly spaced, with the first and the last."""
    if len(items) <= points:
        return list(items)
    return [items[round(i * (len(items) - 1) / (points - 1))] for i in range(points)]
