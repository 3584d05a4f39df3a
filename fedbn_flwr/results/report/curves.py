"""The curves of a report: what was measured over the rounds, and what had been spent up to each of them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from fedbn_flwr.messages.protocol import METRICS

from ..folder.ledger import Traffic

MIB = 1024**2
POINTS = 400  # of a curve: more cannot be distinguished on a screen

# What a curve can be drawn against: key, and title.
AXES = {
    "round": "rounds",
    "communication_rounds": "communication rounds",
    "mib": "MiB down and up",
    "seconds": "seconds",
}

# Measures between 0 and 1, which are shown in percent.
_FRACTIONS = ("accuracy", *METRICS)
_WORDS = {"auc": "AUC", "mean_iou": "mean IoU", "macro_f1": "macro F1"}
_OF = {
    "clients_own_": "clients, own test examples",
    "clients_": "clients, all test examples",
    "validation_": "held-out training examples",
    "unseen_": "new clients, own test examples",
    "train_": "training",
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
        """`auc_sea` is the AUC of a domain if `accuracy_sea` is among the other `keys`, else a metric of the user."""
        prefix = next(prefix for prefix in _OF if key.startswith(prefix))
        rest = key.removeprefix(prefix)
        ending = next((ending for ending in _ENDINGS if rest.endswith(ending)), "")
        name = rest.removesuffix(ending)

        def is_of(base: str) -> bool:
            accuracy = f"{prefix}accuracy{name.removeprefix(base)}"
            return name == base or (name.startswith(base) and (accuracy == key or accuracy in keys))

        base = next(filter(is_of, _FRACTIONS), "")
        domain = name.removeprefix(f"{base}_") if base and name != base else ""
        words = _WORDS.get(base or name, (base or name).replace("_", " "))
        details = [part for part in (f"domain {domain}" if domain else "", _ENDINGS.get(ending, "")) if part]
        title = ", ".join([f"training {words}" if prefix == "train_" else words, *details])
        return cls(key, _OF[prefix], title, bool(base))

    @classmethod
    def of_client(cls, key: str, keys: Iterable[str] = ()) -> Measure:
        """A key of `clients.jsonl`."""
        return cls.of(_in_history(key), set(map(_in_history, keys)))

    @property
    def scale(self) -> float:
        """What a value is multiplied by to be shown; fractions in percent."""
        return 100 if self.is_fraction else 1

    def in_words(self, value: float) -> str:
        return f"{self.scale * value:.4g}" + ("%" if self.is_fraction else "")

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


def is_number(value: object) -> bool:
    """Whether a value can be drawn: figures of a run that diverged are not finite."""
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]
