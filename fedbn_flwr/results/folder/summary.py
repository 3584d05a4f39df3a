"""The summary of a run: the content of summary.json, and how it is computed from the lines of history.jsonl."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, Literal, get_type_hints

from fedbn_flwr.errors import did_you_mean
from fedbn_flwr.results.folder.traffic import Traffic
from fedbn_flwr.storage import to_json
from fedbn_flwr.tasks import CLASSIFICATION, TASKS, Task, goodness
from fedbn_flwr.trees import Draft, Tree

from ..metric_key import BEST, CLIENTS, EVALUATED, OWN, MetricKey
from .files import check

Status = Literal["running", "finished", "interrupted", "failed"]

GLOBAL_MODEL = "the global model"  # a value of `accuracy_of`


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
    stopped: str | None = None  # why it ended before its last round (`evaluate.patience`), in words
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
    notes: Tree = field(default_factory=dict)  # decisions of the strategy, for instance `freeze_round`

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

    @property
    def domains(self) -> dict[MetricKey, float]:
        """The main metric by domain."""
        found = {self._key(key): value for key, value in self.values.items()}
        return {key: value for key, value in found.items() if key.domain and not key.statistic}

    def account(self, line: Tree) -> None:
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
            best = [key for key in self.values if key == "best_round" or self._key(key).whose in BEST]
            self.values = {key: self.values[key] for key in best}
        latest = {key: line[key] for key in found if line[key] is not None}
        if (main := MetricKey(self.of_task.main)).name in latest:
            value, best_test = latest[main.name], str(main.of("best_test"))
            latest[best_test] = max(self.values.get(best_test, value), value, key=partial(goodness, main.name))
        if "best_round" in line:
            latest[str(main.of("best_validation"))] = line[str(main.of("validation"))]
            own = [main.of(OWN)] if str(main.of(OWN)) in line else []
            latest |= {str(key.of_best_round): line.get(str(key)) for key in (main, *own)}
        self.values |= latest

    def _metrics_of(self, line: Iterable[str]) -> list[str]:
        """The keys whose last value is in the summary: of the loss, and of the metrics that the run was asked for."""
        main = self.of_task.main
        known = {main, *self.of_task.reported, *self.metrics}

        def is_shown(key: MetricKey) -> bool:
            if key.statistic:
                return key.whose in (CLIENTS, OWN)
            if key.domain or key.whose in BEST:
                return key.name == main and key.whose in (*EVALUATED[:3], *BEST)
            return key.name in known and key.whose in EVALUATED

        return [key for key in line if key in _LATEST or is_shown(self._key(key))]

    def _key(self, key: str) -> MetricKey:
        return MetricKey.parse(key, self.of_task.main, *self.metrics)

    def to_json(self) -> Tree:
        """One flat mapping: traffic, values and notes are not nested."""
        flat = {key: value for key, value in asdict(self).items() if value not in (None, ())}
        traffic, values, notes = (flat.pop(key) for key in ("traffic", "values", "notes"))
        per_round = self.traffic.broadcast_bytes / self.rounds / 2**20 if self.rounds else 0.0
        values = {key: value for key, value in values.items() if value is not None}
        return {**flat, **traffic, "broadcast_mib_per_round": per_round, **values, **notes}

    @classmethod
    def from_json(cls, content: Tree, history: Sequence[Tree]) -> Summary:
        """The summary from the content of `to_json`; ValueError if the lines of history.jsonl give another one."""
        own = [item for item in fields(cls) if item.name not in ("traffic", "values", "notes")]
        given = {item.name: content[item.name] for item in own if item.name in content}
        check(given, get_type_hints(cls), [item.name for item in own if item.default is MISSING])
        if given.get("task") not in (None, *TASKS):
            raise ValueError(f"task is {given['task']!r}; expected one of {', '.join(TASKS)}")
        found = cls(**given).of(line for line in history if line["round"] <= given.get("rounds", 0))
        expected = found.to_json()
        known = [*expected, *found._metrics_of(content)]
        for key in known:
            if to_json(content.get(key)) != to_json(expected.get(key)):  # NaN is not NaN
                raise ValueError(f"{key} is {content.get(key)}, but {expected.get(key)} by the lines of history.jsonl")
        found.notes = {key: value for key, value in content.items() if key not in known}
        return found

    def of(self, history: Iterable[Tree]) -> Summary:
        """The same run's summary with the metrics of this history."""
        found = replace(self, rounds=0, seconds=0.0, traffic=Traffic(), values={})
        found.clients = found.clients_since = found.rounds_with_fewer_clients = None
        for line in history:
            found.account(line)
        return found


# Other keys of the history whose last value is in the summary: the loss, the source of the statistics in the global
# model's batch norms, and the best round by validation.
_LATEST = ("loss", "evaluated_with", "best_round")


def is_taken(name: str, task: Task) -> bool:
    """Whether history or summary have this key already, so that no metric of the user may have this name."""
    own = {item.name for kind in (Summary, Traffic) for item in fields(kind)}
    keys = {*own, *_LATEST, *task.reported, "round", "broadcast_mib_per_round"}
    return name in keys or name.endswith("examples") or MetricKey.parse(name) != MetricKey(name)
