"""The examples that an experiment trains on, known without its data: the measure of its cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedbn_flwr.data.catalogue import CATALOGUE

from ..settings import Experiment, Settings


@dataclass(frozen=True)
class Cost:
    runs: int
    examples: int | None  # to train on in all runs; None: not known without the data


def cost_of(experiment: Experiment) -> Cost:
    known = [examples for run in experiment.runs if (examples := examples_of(run)) is not None]
    return Cost(len(experiment.runs), sum(known) if len(known) == len(experiment.runs) else None)


def examples_of(run: Settings) -> int | None:
    """The examples that all clients of a run train on, one example counted each time; None if they are not known.

    Exact if all clients take part in each round, and else expected. Smaller last batches count as whole ones.
    """
    if (clients := trained_in_a_round(run)) is None:
        return None
    if run.train.steps is not None:
        return run.rounds * clients * run.train.steps * run.train.batch_size
    entry, held = CATALOGUE.get(run.data.name), run.data.examples
    if (of_each := getattr(run.data.partition, "examples", None)) is not None:
        held = of_each * run.clients
    elif held is None and entry is not None and not run.data.domains:
        held = entry.examples
    if held is None:
        return None
    trained = held * (1 - run.evaluate.validation) * clients / run.clients
    return round(run.rounds * (run.train.epochs or 1) * trained)


def trained_in_a_round(run: Settings) -> int | None:
    """The number of clients that the strategy chooses; None if it will be refused."""
    strategy: Mapping[str, Any] = run.strategy
    while isinstance(base := strategy.get("base"), Mapping):  # the innermost one chooses
        strategy = base
    least, share = strategy.get("min_train_nodes", min(2, run.trained)), strategy.get("fraction_train", 1)
    if not isinstance(least, int) or not isinstance(share, int | float) or not 0 <= share <= 1:
        return None
    return min(run.trained, max(int(run.trained * share), least))
