"""The summary of a run: the content of summary.json, and how it is computed from the lines of history.jsonl."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args, get_type_hints

from fedbn_flwr.engines.metered import Traffic
from fedbn_flwr.errors import did_you_mean
from fedbn_flwr.storage import to_json
from fedbn_flwr.tasks import CLASSIFICATION, METRICS, TASKS, Task, goodness
from fedbn_flwr.trees import Draft, Json

from .files import check

Status = Literal["running", "finished", "interrupted", "failed"]

# Endings of the keys of a spread over clients, which follow the name of the metric.
SPREAD = ("_std", "_worst_tenth")

GLOBAL_MODEL = "the global model"  # a value of `accuracy_of`

# Whose statistics clients use that never train (`evaluate.unseen.statistics`).
NewcomerStatistics = Literal["mean", "batch", "own"]
UNSEEN: tuple[NewcomerStatistics, ...] = get_args(NewcomerStatistics)


def time_stamp() -> str:
    """Now, in UTC; a later one is a greater text."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


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
    accuracy_of: str  # whose `accuracy` and `loss` these are, in words
    status: Status = "running"
    error: str | None = None  # of a run that failed
    diverged_in: int | None = None  # the round, if it failed because its values were no longer finite
    personal: bool | None = None  # True if each client has a model of its own
    size: str | None = None  # of the experiment, if not the file as written
    task: str | None = None  # if not classification
    metrics: Sequence[str] = ()  # the names of evaluate.metrics
    own_data_sites: int | None = None  # sites that trained on data of their own, in place of data.name
    clients_due: int | None = None  # how many train in a round if none is missing; None if the strategy does not say
    clients: int | None = None  # how many trained in the last round, and in all since `clients_since`
    clients_since: int | None = None
    rounds_with_fewer_clients: int | None = None  # than are due
    rounds: int = 0
    seconds: float = 0.0  # of all rounds
    traffic: Traffic = field(default_factory=Traffic)
    values: Draft = field(default_factory=dict)  # the last values in the history, and the best ones
    notes: Json = field(default_factory=dict)  # decisions of the strategy, for instance `freeze_round`

    @property
    def of_task(self) -> Task:
        return TASKS[self.task] if self.task else CLASSIFICATION

    @property
    def main(self) -> float | None:
        """The metric that runs of the task are compared by."""
        return self.values.get(self.of_task.main)

    @property
    def missing(self) -> str:
        """Which clients were missing, in words; empty if none was, or if it is not known."""
        if not (self.rounds_with_fewer_clients and self.clients_due and self.clients is not None):
            return ""
        if self.clients < self.clients_due:
            return f"{self.clients} of {self.clients_due} clients since round {self.clients_since}"
        rounds = f"{self.rounds_with_fewer_clients} of {self.rounds} rounds"
        return f"fewer than {self.clients_due} clients in {rounds}"

    @property
    def accuracy(self) -> float | None:
        return self.values.get("accuracy")

    @property
    def loss(self) -> float | None:
        return self.values.get("loss")

    def __getitem__(self, key: str) -> Any:
        """A value of summary.json by its key."""
        content = self.to_json()
        if key not in content:
            raise KeyError(f"the summary has no {key!r}; {did_you_mean(key, content)}")
        return content[key]

    if not TYPE_CHECKING:  # a metric has a key that a type checker doesn't know: summary["rmse"]

        def __getattr__(self, name: str) -> float:
            values = vars(self).get("values", {})
            if name not in values:
                raise AttributeError(f"the summary has no {name!r}; {did_you_mean(name, values)}")
            return values[name]

    @property
    def domains(self) -> dict[str, float]:
        """The metrics by domain, whose keys begin with `domain_keys`."""
        return {key: value for key, value in self.values.items() if self._is_of_domain(key)}

    def account(self, line: Json) -> None:
        """Add a round of the history."""
        self.rounds = line["round"]
        self.seconds += line["seconds"]
        if (clients := line.get("clients")) is not None:
            if clients != self.clients:
                self.clients, self.clients_since = clients, self.rounds
            if self.clients_due is not None:
                fewer = self.rounds_with_fewer_clients or 0
                self.rounds_with_fewer_clients = fewer + (clients < self.clients_due)
        self.traffic.add(Traffic(**{key.name: line[key.name] for key in fields(Traffic)}))
        if found := self._metrics_of(line):  # an evaluated round replaces the metrics of earlier ones
            self.values = {key: value for key, value in self.values.items() if key in _best(self.of_task)}
        latest = {key: line[key] for key in found if line[key] is not None}
        if (main := self.of_task.main) in latest:
            best = f"best_test_{main}"
            latest[best] = max(self.values.get(best, latest[main]), latest[main], key=partial(goodness, main))
        if "best_round" in line:
            latest |= {"best_round": line["best_round"], f"best_validation_{main}": line[f"validation_{main}"]}
            latest[f"best_round_{main}"] = line.get(main)
            latest |= {f"best_round_{own}": line[own] for own in [f"clients_own_{main}"] if own in line}
        self.values |= latest

    def _metrics_of(self, line: Iterable[str]) -> list[str]:
        known = {*_LATEST, *keys_of(self.of_task, self.metrics)}
        return [key for key in line if key in known or _is_spread(key) or self._is_of_domain(key)]

    def _is_of_domain(self, key: str) -> bool:
        return key.startswith(domain_keys(self.of_task)) and not _is_spread(key)

    def to_json(self) -> Json:
        """One flat mapping: traffic, values and notes are not nested."""
        flat = {key: value for key, value in asdict(self).items() if value not in (None, ())}
        traffic, values, notes = (flat.pop(key) for key in ("traffic", "values", "notes"))
        per_round = self.traffic.broadcast_bytes / self.rounds / 2**20 if self.rounds else 0.0
        values = {key: value for key, value in values.items() if value is not None}
        return {**flat, **traffic, "broadcast_mib_per_round": per_round, **values, **notes}

    @classmethod
    def from_json(cls, content: Json, history: Sequence[Json]) -> Summary:
        """The summary from the content of `to_json`; ValueError if the lines of history.jsonl give another one."""
        own = [item for item in fields(cls) if item.name not in ("traffic", "values", "notes")]
        given = {item.name: content[item.name] for item in own if item.name in content}
        check(given, get_type_hints(cls), [item.name for item in own if item.default is MISSING])
        if given.get("task") not in (None, *TASKS):
            raise ValueError(f"task is {given['task']!r}; expected one of {', '.join(TASKS)}")
        found = cls(**given).of(history[: given.get("rounds", 0)])
        expected = found.to_json()
        known = [*expected, *_best(found.of_task), *found._metrics_of(content)]
        for key in known:
            if to_json(content.get(key)) != to_json(expected.get(key)):  # NaN is not NaN
                raise ValueError(f"{key} is {content.get(key)}, but {expected.get(key)} by the lines of history.jsonl")
        found.notes = {key: value for key, value in content.items() if key not in known}
        return found

    def of(self, history: Iterable[Json]) -> Summary:
        """The same run's summary with the metrics of this history."""
        found = replace(self, rounds=0, seconds=0.0, traffic=Traffic(), values={})
        found.clients = found.clients_since = found.rounds_with_fewer_clients = None
        for line in history:
            found.account(line)
        return found


# Keys of the history whose last value is in every summary: the loss, and the source of the statistics in the global
# model's batch norms.
_LATEST = ("loss", "evaluated_with")


def keys_of(task: Task, metrics: Iterable[str]) -> list[str]:
    """The keys of metrics in history and summary, without spreads over clients and domains.

    They are of the global model, of clients on all and on their own test examples, and of clients that never train.
    """
    places = ("", "clients_", "clients_own_", *(f"unseen_{way}_" for way in UNSEEN))
    return list(dict.fromkeys(place + name for name in (task.main, *task.reported, *metrics) for place in places))


def _best(task: Task) -> list[str]:
    """The keys of the best round by validation, and of the best metric on the test examples, an optimistic choice."""
    return ["best_round", *(f"best_{of}_{task.main}" for of in ("test", "round", "validation", "round_clients_own"))]


def domain_keys(task: Task) -> tuple[str, ...]:
    """The beginnings of the keys of metrics by domain, which end with the domain's name."""
    return f"{task.main}_", f"clients_{task.main}_", f"clients_own_{task.main}_"


def is_taken(name: str, task: Task) -> bool:
    """Whether history or summary have this key already, so that no metric of the user may have this name."""
    keys = {"round", "clients", "num_examples", "broadcast_mib_per_round", *_LATEST, *keys_of(task, ()), *_best(task)}
    keys |= {item.name for kind in (Summary, Traffic) for item in fields(kind)}
    of_domains = (f"{metric}_" for metric in METRICS)
    prefixes = (*of_domains, "clients_", "own_", "train_", "validation_", "unseen_")
    return name in keys or name.startswith(prefixes) or name.endswith((*SPREAD, "examples"))


def _is_spread(key: str) -> bool:
    return key.startswith("clients_") and key.endswith(SPREAD)
