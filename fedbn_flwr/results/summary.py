"""The summary of a run: the content of summary.json, and how it is computed from the lines of history.jsonl."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from typing import Any, Literal, get_type_hints

from .files import check_types, with_nan
from .ledger import Traffic

Status = Literal["running", "finished", "interrupted", "failed"]

# Accuracies by domain: the beginning of the key, which ends with the domain's name, and a description.
BY_DOMAIN = {
    "accuracy_": "accuracy of the global model, by domain",
    "clients_own_accuracy_": "accuracy of clients on test images of their own, by domain",
}

# Keys whose value in the summary is that of the last evaluated round.
_LATEST = (
    "accuracy",
    "loss",
    "evaluated_with",
    "mean_iou",
    "clients_accuracy",
    "clients_own_accuracy",
    "clients_mean_iou",
    "unseen_accuracy",
    "unseen_accuracy_tuned",
)

_BEST = ("best_test_accuracy", "best_round", "best_round_accuracy", "best_validation_accuracy")

# The fields that follow from the history, and their values before its first line.
_OF_HISTORY: Mapping[str, Callable[[], Any]] = {
    "rounds": int,
    "seconds": float,
    "traffic": Traffic,
    "measured": dict,
    "spread": dict,
    "domains": dict,
    **dict.fromkeys((*_LATEST, *_BEST), lambda: None),
}

# Endings of the keys of a spread over clients, which follow the name of the metric.
SPREAD = ("_std", "_worst_tenth")


GLOBAL_MODEL = "the global model"  # a value of `accuracy_of`


@dataclass
class Summary:
    """The figures of a run so far; summary.json leaves out fields that are None."""

    name: str  # of the experiment
    label: str
    strategy: str  # with the one that it wraps: FixBN(FedProx)
    model: str
    norm: str
    seed: int
    parameters: int
    device: str
    began: str  # ISO 8601, UTC
    accuracy_of: str  # the models that `accuracy` and `loss` are of, in words
    status: Status = "running"
    error: str | None = None  # of a run that failed

    stopped_early: str | None = None  # the reason why a finished run has fewer rounds than it might have had

    size: str | None = None  # of the experiment, if not that of the file
    images: str | None = None  # of random ones

    # Options in use that make training faster and change results.
    memory_format: str | None = None
    precision: str | None = None
    compiled: bool | None = None

    rounds: int = 0
    seconds: float = 0.0  # of all rounds
    accuracy: float | None = None
    best_test_accuracy: float | None = None  # over all rounds; a choice by test images, so it is optimistic
    best_round: int | None = None  # the one with the highest validation accuracy
    best_validation_accuracy: float | None = None
    best_round_accuracy: float | None = None  # on the test images, of the model of that round
    unseen_accuracy: float | None = None  # of clients that never trained: the global model's on their own test images
    unseen_accuracy_tuned: float | None = None  # and after fine-tuning
    loss: float | None = None
    evaluated_with: str | None = None  # the source of the statistics in the global model's batch norms
    mean_iou: float | None = None
    clients_accuracy: float | None = None  # means over clients: on all test images, and on their own
    clients_own_accuracy: float | None = None
    clients_mean_iou: float | None = None
    spread: dict[str, float] = field(default_factory=dict)  # over clients: clients_own_accuracy_std, ...
    metrics: tuple[str, ...] = ()  # the names of evaluate.metrics
    measured: dict[str, float] = field(default_factory=dict)  # their last values, also of clients: clients_own_auc, ...
    domains: dict[str, float] = field(default_factory=dict)  # the keys begin with those of BY_DOMAIN
    traffic: Traffic = field(default_factory=Traffic)
    notes: dict[str, Any] = field(default_factory=dict)  # decisions of the strategy, for instance `freeze_round`

    def account(self, line: Mapping[str, Any]) -> None:
        """Add a round of the history."""
        self.rounds = line["round"]
        self.seconds += line["seconds"]
        self.traffic.add(Traffic(**{key.name: line[key.name] for key in fields(Traffic)}))
        for key in _LATEST:
            if line.get(key) is not None:
                setattr(self, key, line[key])
        if line.get("accuracy") is not None:
            self.best_test_accuracy = max(self.best_test_accuracy or 0.0, line["accuracy"])
        self.measured |= {key: line[key] for key in keys_of(self.metrics) if line.get(key) is not None}
        if "best_round" in line:
            self.best_round, self.best_round_accuracy = line["best_round"], line.get("accuracy")
            self.best_validation_accuracy = line["validation_accuracy"]
        spread = {key: value for key, value in line.items() if _is_spread(key)}
        self.spread |= spread
        self.domains |= {
            key: value for key, value in line.items() if key.startswith(tuple(BY_DOMAIN)) and key not in spread
        }

    def to_json(self) -> dict[str, Any]:
        """One flat mapping, in which traffic, metrics, spread, domains and notes are not nested."""
        flat = {key: value for key, value in asdict(self).items() if value not in (None, ())}
        nested = ("traffic", "measured", "spread", "domains", "notes")
        traffic, measured, spread, domains, notes = (flat.pop(key) for key in nested)
        per_round = self.traffic.broadcast_bytes / self.rounds / 2**20 if self.rounds else 0.0
        return {**flat, **traffic, "broadcast_mib_per_round": per_round, **measured, **spread, **domains, **notes}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Summary:
        """The summary from what `to_json` returned; ValueError if a key is missing or its value is of another type."""
        required = [item.name for item in fields(cls) if item.default is item.default_factory is MISSING]
        if missing := [key for key in required if key not in content]:
            raise ValueError(f"it lacks {', '.join(missing)}")
        rest = {key: value for key, value in content.items() if key != "broadcast_mib_per_round"}
        nested = {"traffic", "measured", "spread", "domains", "notes"}
        own = with_nan({key: rest.pop(key) for key in get_type_hints(cls).keys() - nested if key in rest})
        check_types(own, get_type_hints(cls))
        own["metrics"] = tuple(own.get("metrics", ()))
        traffic = {item.name: rest.pop(item.name) for item in fields(Traffic) if item.name in rest}
        measured = with_nan({key: rest.pop(key) for key in keys_of(own["metrics"]) if key in rest})
        spread = with_nan({key: rest.pop(key) for key in list(rest) if _is_spread(key)})
        domains = with_nan({key: rest.pop(key) for key in list(rest) if key.startswith(tuple(BY_DOMAIN))})
        check_types(traffic, dict.fromkeys(traffic, int))
        for figures in (measured, spread, domains):
            check_types(figures, dict.fromkeys(figures, float))
        return cls(**own, traffic=Traffic(**traffic), measured=measured, spread=spread, domains=domains, notes=rest)

    def of(self, history: Iterable[Mapping[str, Any]]) -> Summary:
        """The same run's summary with the figures of this history."""
        found = replace(self, **{key: empty() for key, empty in _OF_HISTORY.items()})
        for line in history:
            found.account(line)
        return found

    def check(self, history: Sequence[Mapping[str, Any]]) -> None:
        """ValueError if these are not the figures of the history, which has checksums."""
        again = self.of(history[: self.rounds])
        for key in _OF_HISTORY:
            if repr(found := getattr(self, key)) != repr(expected := getattr(again, key)):  # NaN is not NaN
                raise ValueError(f"{key} is {found}, but {expected} by the lines of history.jsonl")


def keys_of(metrics: Iterable[str]) -> list[str]:
    """The keys of metrics in history and summary: of the global model, and of clients on all and on own test images.

    Without those that every summary has.
    """
    keys = [prefix + name for name in metrics for prefix in ("", "clients_", "clients_own_")]
    return [key for key in keys if key not in _LATEST]


def is_taken(name: str) -> bool:
    """Whether a metric of the user with this name would have the key of another figure in history or summary."""
    keys = {"round", "clients", "num_examples", "broadcast_mib_per_round"}
    keys |= {item.name for of in (Summary, Traffic) for item in fields(of)}
    prefixes = ("accuracy_", "clients_", "own_", "train_", "validation_", "unseen_", "tuned_")
    return name in keys or name.startswith(prefixes) or name.endswith((*SPREAD, "images"))


def _is_spread(key: str) -> bool:
    return key.startswith("clients_") and key.endswith(SPREAD)
