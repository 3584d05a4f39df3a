"""The summary of a run: the content of summary.json, and how it is computed from the lines of history.jsonl."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from typing import Any, Literal, get_type_hints

from .files import check_keys, check_types, with_nan
from .ledger import Traffic

Status = Literal["running", "finished", "interrupted", "failed"]

# Accuracies by domain: the beginning of the key, which ends with the domain's name, and a description.
BY_DOMAIN = {
    "accuracy_": "accuracy of the global model, by domain",
    "clients_own_accuracy_": "accuracy of clients on test examples of their own, by domain",
}

# Keys of the history whose last value is in the summary, beside metrics, spreads over clients and domains.
_LATEST = (
    "accuracy",
    "loss",
    "evaluated_with",  # the source of the statistics in the global model's batch norms
    "mean_iou",
    "clients_accuracy",  # means over clients: on all test examples, and on their own
    "clients_own_accuracy",
    "clients_mean_iou",
    "unseen_accuracy",  # of clients that never trained: the global model's on their own test examples
    "unseen_accuracy_tuned",  # and after fine-tuning
)

# The best round by validation; and the best accuracy on the test examples, an optimistic choice.
_BEST = ("best_test_accuracy", "best_round", "best_round_accuracy", "best_validation_accuracy")

# Endings of the keys of a spread over clients, which follow the name of the metric.
SPREAD = ("_std", "_worst_tenth")

GLOBAL_MODEL = "the global model"  # a value of `accuracy_of`


@dataclass
class Summary:
    """A run so far; summary.json leaves out fields that are None."""

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
    examples: str | None = None  # of random ones

    # Options in use that make training faster and change results.
    memory_format: str | None = None
    precision: str | None = None
    compiled: bool | None = None

    metrics: Sequence[str] = ()  # the names of evaluate.metrics
    rounds: int = 0
    seconds: float = 0.0  # of all rounds
    traffic: Traffic = field(default_factory=Traffic)
    figures: dict[str, Any] = field(default_factory=dict)  # the last values in the history, and the best ones
    notes: dict[str, Any] = field(default_factory=dict)  # decisions of the strategy, for instance `freeze_round`

    @property
    def accuracy(self) -> float | None:
        return self.figures.get("accuracy")

    @property
    def loss(self) -> float | None:
        return self.figures.get("loss")

    @property
    def domains(self) -> dict[str, float]:
        """The accuracies by domain, whose keys begin with those of BY_DOMAIN."""
        return {key: value for key, value in self.figures.items() if _is_of_domain(key)}

    def account(self, line: Mapping[str, Any]) -> None:
        """Add a round of the history."""
        self.rounds = line["round"]
        self.seconds += line["seconds"]
        self.traffic.add(Traffic(**{key.name: line[key.name] for key in fields(Traffic)}))
        latest = {key: line[key] for key in self._figures_of(line) if line[key] is not None}
        if "accuracy" in latest:
            latest["best_test_accuracy"] = max(self.figures.get("best_test_accuracy", 0.0), latest["accuracy"])
        if "best_round" in line:
            latest |= {"best_round": line["best_round"], "best_validation_accuracy": line["validation_accuracy"]}
            latest["best_round_accuracy"] = line.get("accuracy")
        self.figures |= latest

    def _figures_of(self, line: Iterable[str]) -> list[str]:
        known = {*_LATEST, *keys_of(self.metrics)}
        return [key for key in line if key in known or _is_spread(key) or _is_of_domain(key)]

    def to_json(self) -> dict[str, Any]:
        """One flat mapping, in which traffic, figures and notes are not nested."""
        flat = {key: value for key, value in asdict(self).items() if value not in (None, ())}
        traffic, figures, notes = (flat.pop(key) for key in ("traffic", "figures", "notes"))
        per_round = self.traffic.broadcast_bytes / self.rounds / 2**20 if self.rounds else 0.0
        figures = {key: value for key, value in figures.items() if value is not None}
        return {**flat, **traffic, "broadcast_mib_per_round": per_round, **figures, **notes}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Summary:
        """The summary from what `to_json` returned; ValueError if a key is missing or its value is of another type."""
        check_keys(content, [item.name for item in fields(cls) if item.default is item.default_factory is MISSING])
        rest = {key: value for key, value in content.items() if key != "broadcast_mib_per_round"}
        types = get_type_hints(cls)
        own = with_nan({key: rest.pop(key) for key in types.keys() - {"traffic", "figures", "notes"} if key in rest})
        check_types(own, types)
        traffic = {item.name: rest.pop(item.name) for item in fields(Traffic) if item.name in rest}
        check_types(traffic, get_type_hints(Traffic))
        found = cls(**own, traffic=Traffic(**traffic))
        keys = [*(key for key in _BEST if key in rest), *found._figures_of(rest)]
        found.figures = with_nan({key: rest.pop(key) for key in keys})
        check_types(found.figures, dict.fromkeys(found.figures, float) | {"evaluated_with": str, "best_round": int})
        found.notes = rest
        return found

    def of(self, history: Iterable[Mapping[str, Any]]) -> Summary:
        """The same run's summary with the figures of this history."""
        found = replace(self, rounds=0, seconds=0.0, traffic=Traffic(), figures={})
        for line in history:
            found.account(line)
        return found

    def check(self, history: Sequence[Mapping[str, Any]]) -> None:
        """ValueError if these are not the figures of the history."""
        found, again = self.to_json(), self.of(history[: self.rounds]).to_json()
        for key in {**again, **found}:
            if repr(found.get(key)) != repr(again.get(key)):  # NaN is not NaN
                raise ValueError(f"{key} is {found.get(key)}, but {again.get(key)} by the lines of history.jsonl")


def keys_of(metrics: Iterable[str]) -> list[str]:
    """The keys of metrics in history and summary: of the global model, and of clients on all and on own test examples.

    Without those that every summary has.
    """
    keys = [prefix + name for name in metrics for prefix in ("", "clients_", "clients_own_")]
    return [key for key in keys if key not in _LATEST]


def is_taken(name: str) -> bool:
    """Whether a metric of the user with this name would have the key of another figure in history or summary."""
    keys = {"round", "clients", "num_examples", "broadcast_mib_per_round", *_LATEST, *_BEST}
    keys |= {item.name for of in (Summary, Traffic) for item in fields(of)}
    prefixes = ("accuracy_", "clients_", "own_", "train_", "validation_", "unseen_", "tuned_")
    return name in keys or name.startswith(prefixes) or name.endswith((*SPREAD, "examples"))


def _is_spread(key: str) -> bool:
    return key.startswith("clients_") and key.endswith(SPREAD)


def _is_of_domain(key: str) -> bool:
    return key.startswith(tuple(BY_DOMAIN)) and not _is_spread(key)
