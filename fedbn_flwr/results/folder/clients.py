"""Clients as individuals: the values of each client, and their spread.

`clients.jsonl` has a line per round, {"round": 3, "clients": {"0": {"examples": 96, "train_loss": 0.4, ...}, ...}}.
Everything here gives each client the same weight. It describes the clients that took part, so a deviation has the
divisor n of a whole population.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

from fedbn_flwr.data.schema import Problem, Section
from fedbn_flwr.tasks import is_lower_better
from fedbn_flwr.trees import Tree

from .files import Whole

Client = TypeVar("Client")  # its number, or that as text

OWN_TRAINING = ("batch_size", "epochs", "steps", "lr_factor")  # what a client reports if it trains unlike the others


class PartitionCounts(Section):
    """How many examples of each class the clients of a partition have: the content of partition.json."""

    title: str
    classes: tuple[str, ...]
    counts: tuple[tuple[Whole, ...], ...]  # [clients][classes]
    clients: tuple[str, ...] = ()  # names, if clients have any (a domain, a city)

    def problems(self) -> Iterator[Problem]:
        ragged = any(len(row) != len(self.classes) for row in self.counts)
        yield ragged, "a client's counts are not one for each class"
        yield len(self.clients) not in (0, len(self.counts)), "its clients have neither a name each nor none"

    @property
    def sizes(self) -> list[int]:
        return [sum(row) for row in self.counts]

    @property
    def names(self) -> list[str]:
        """The clients' numbers, with their names if they have any."""
        return [f"{i} {name}" for i, name in enumerate(self.clients)] or list(map(str, range(len(self.counts))))


class Spread(NamedTuple):
    mean: float
    deviation: float
    worst_tenth: float  # the mean of the worst tenth of the clients, rounded up to whole clients


def spread(values: Sequence[float], metric: str) -> Spread:
    """The spread of a metric over clients; the worst losses and errors are the highest."""
    if not all(map(math.isfinite, values)):  # a client diverged
        return Spread(math.nan, math.nan, math.nan)
    mean = statistics.fmean(values)
    worst = sorted(values, reverse=is_lower_better(metric))[: math.ceil(len(values) / 10)]
    return Spread(mean, math.sqrt(statistics.fmean((value - mean) ** 2 for value in values)), statistics.fmean(worst))


def by_metric(clients: Mapping[Client, Mapping[str, float]]) -> dict[str, dict[Client, float]]:
    """Each metric's values by client; a client may lack some metrics."""
    metrics = dict.fromkeys(metric for values in clients.values() for metric in values)
    return {name: {client: values[name] for client, values in clients.items() if name in values} for name in metrics}


def last_values(lines: Sequence[Tree]) -> dict[str, dict[str, float]]:
    """Each metric's values by client, from the last round in which it was measured."""
    found: dict[str, dict[str, float]] = {}
    for line in lines:
        found |= by_metric(line["clients"])
    return found
