"""What an experiment will do, for `fedbn explain`: settings, data, model, what it sends and how long it takes.

For the last two, the run's own strategy, clients and messages are tried on the local engine: rounds of a few steps, in
which only a few of the clients take part. All clients send and receive messages of the same size.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from flwr.app import Context
from torch import Tensor

from fedbn_flwr.client.app import client_app
from fedbn_flwr.client.client import BNClient
from fedbn_flwr.client.evaluation import evaluate
from fedbn_flwr.data.batches import TestBatches
from fedbn_flwr.data.dataset import DataSet
from fedbn_flwr.engines.local import LocalGrid
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.arrays import pack
from fedbn_flwr.models.tensors import initial_arrays, sent_dtype
from fedbn_flwr.norms.roles import Role, roles
from fedbn_flwr.results.folder.clients import PartitionCounts
from fedbn_flwr.results.folder.ledger import MeteredGrid

from .counting import count_partitions
from .file.layers import Setting, settings_of
from .listeners.listener import Round, Running
from .node import Clients
from .parts import Parts, plain_loss
from .prepare import prepare
from .run.cohort import TrainedNodes
from .run.loop import train_round, workers_of
from .settings import Experiment

_LR = 1e-12  # of the trial: in rounds that follow another schedule, the model could diverge
_SECONDS = 2.0  # that the timed steps may take, if one step does not take longer


@dataclass(frozen=True)
class Part:
    """The arrays of one role in a model."""

    arrays: int
    values: int
    bytes: int


@dataclass(frozen=True)
class RoundTraffic:
    """Bytes of arrays that one client receives and sends in a round of training."""

    bytes_down: int
    bytes_up: int
    exchanges: int  # of FedTAN, and queries of extensions, besides the messages with the model


@dataclass(frozen=True)
class Costs:
    """What a run sends, and the seconds that it takes on the local engine of this machine."""

    clients: int  # that train in a round
    traffic: tuple[tuple[int, RoundTraffic], ...]  # each with the first of the rounds that have it
    rounds: int
    workers: int  # processes that train at the same time
    steps: int  # of all clients of a round; of an average choice if not all take part
    step: float  # of one client
    train: float  # a round of training
    evaluate: float  # an evaluation
    run: float  # the whole run

    def total(self) -> tuple[int, int]:
        """Bytes down and up of all clients in all rounds."""
        ends = [*(first for first, _ in self.traffic[1:]), self.rounds + 1]
        parts = [(end - first, each) for (first, each), end in zip(self.traffic, ends, strict=True)]
        down = sum(count * each.bytes_down for count, each in parts)
        return self.clients * down, self.clients * sum(count * each.bytes_up for count, each in parts)


@dataclass(frozen=True)
class ExplainedRun:
    label: str
    seeds: tuple[int, ...]
    settings: tuple[Setting, ...]
    model: dict[str, Part]  # by role
    down: tuple[str, ...]  # the roles of the arrays that a client receives, and what else
    up: tuple[str, ...]
    costs: Costs | None  # None: not measured


@dataclass(frozen=True)
class Explanation:
    experiment: Experiment
    partitions: tuple[PartitionCounts, ...]  # empty if the server has no data
    runs: tuple[ExplainedRun, ...]  # those of further seeds are not repeated


def explain(experiment: Experiment, *, trial: bool = True) -> Explanation:
    """Prepare all runs as `fedbn run` does, and try them out: a few rounds of a few steps on some of the clients."""
    first: dict[str, Parts] = {}
    for prepared in prepare(experiment):
        first.setdefault(prepared.run.label, prepared)
    has_data = all(prepared.dataset is not None for prepared in first.values())
    explained = []
    for label in list(first):
        prepared = first.pop(label)  # with its model, so that it is not in memory with those of the next runs
        dataset, traits = prepared.dataset, prepared.rule.traits
        model = _parts_of(prepared)
        more = (traits.traffic,) if traits.traffic else ()
        explained.append(
            ExplainedRun(
                label,
                tuple(run.seed for run in experiment.runs if run.label == label),
                tuple(settings_of(experiment, next(run for run in experiment.runs if run.label == label))),
                model,
                (*(role for role in model if role not in {Role.COUNTER, *traits.kept}), *more),
                (*(role for role in model if role not in {Role.COUNTER, *traits.unsent}), *more),
                try_out(prepared, dataset) if trial and dataset is not None else None,
            )
        )
    return Explanation(experiment, tuple(count_partitions(experiment) if has_data else ()), tuple(explained))


def _parts_of(prepared: Parts) -> dict[str, Part]:
    tensors, by_role = prepared.model.state_dict(), dict[str, list[Tensor]]()
    for key, role in roles(prepared.model).items():
        by_role.setdefault(str(role), []).append(tensors[key])
    return {
        role: Part(
            len(found),
            sum(tensor.numel() for tensor in found),
            sum(tensor.numel() * sent_dtype(tensor.dtype).itemsize for tensor in found),
        )
        for role, found in by_role.items()
    }


# --- the trial ----------------------------------------------------------------


def try_out(prepared: Parts, dataset: DataSet) -> Costs:
    """Train some rounds of one to twenty steps on the clients with most examples: others may have smaller batches."""
    run, rule = prepared.run, prepared.rule
    parts = prepared.partition[: run.trained]
    largest = sorted(range(run.trained), key=lambda client: -len(parts[client]))
    leaf = getattr(rule.chain[-1], "strategy", rule.chain[-1])  # Flower's own, if it is one
    needed = max(2, *(int(getattr(leaf, key, 1)) for key in ("min_train_nodes", "min_available_nodes")))
    chosen = [client + 1 for client in largest[:needed]]
    trial = _Trial(prepared)
    with LocalGrid(client_app(trial.client), run.clients, threads=run.engine.threads) as grid:
        trial.begin(MeteredGrid(TrainedNodes(grid, {*grid.get_node_ids()} - {*chosen})))
        traffic = trial.traffic_by_round()
        second = min(2, run.rounds)
        _, one = trial.round(second)
        several = max(1, min(20, int(_SECONDS / max(one, 1e-3))))
        _, longer = trial.round(second, steps=1 + several)
    step = max(longer - one, 0.05 * longer) / several / len(chosen)  # of one client
    message = max(one / len(chosen) - step, 0.0)  # of its round besides the steps
    share, least = getattr(leaf, "fraction_train", 1.0), getattr(leaf, "min_train_nodes", 1)
    clients = min(run.trained, max(int(run.trained * share), least))
    workers = min(workers_of(run) or 1, clients)
    sizes = [len(part) - round(run.evaluate.validation * len(part)) for part in parts]
    of_all = sum(run.train.steps or (run.train.epochs or 1) * math.ceil(size / run.train.batch_size) for size in sizes)
    steps = round(of_all * clients / len(parts))
    train = (steps * step + clients * message) / workers
    # On the server, and by clients, each of which tests on all examples and on its own.
    by_clients = bool(rule.traits.kept) if run.evaluate.clients is None else run.evaluate.clients
    examples = len(dataset.test.labels)
    domains = 2 if dataset.domains is not None and dataset.domains.test is not None else 1
    tested = domains * examples + (run.clients + 1) * examples / workers * by_clients
    evaluation = tested * (_time_of_test_example(prepared, dataset) if rule.traits.has_global_model else 0.0)
    whole = run.rounds * train + math.ceil(run.rounds / run.evaluate.every) * evaluation
    return Costs(clients, traffic, run.rounds, workers, steps, step, train, evaluation, whole)


class _Trial:
    def __init__(self, prepared: Parts) -> None:
        self.prepared, self.steps = prepared, 1

    def client(self, context: Context, config: Mapping[str, Any]) -> BNClient:
        run = self.prepared.run
        train = run.train.model_copy(update={"steps": self.steps, "epochs": None, "lr": _LR})
        short = Experiment(name=run.name, runs=(run.model_copy(update={"train": train}),), run_config={})
        return Clients(short)(context, {})  # without the name of the run: there is one

    def begin(self, ledger: MeteredGrid) -> None:
        self.ledger = ledger
        self.running = Running(self.prepared, ledger, {protocol.RUN: self.prepared.name, protocol.TOKEN: "trial"})
        self.arrays = pack(initial_arrays(self.prepared.model))
        self.prepared.rule.begin(self.prepared.run.rounds, self.arrays)

    def traffic_by_round(self) -> tuple[tuple[int, RoundTraffic], ...]:
        """The traffic of the first two rounds, and that of the last ones if it is different (FedTANII)."""
        last = self.prepared.run.rounds
        found = [(1, self.round(1)[0])]
        if last > 1 and (second := self.round(2)[0]) != found[-1][1]:
            found.append((2, second))
        if last > 2 and (final := self.round(last)[0]) != found[-1][1]:
            low, high = found[-1][0], last
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (low, middle) if self.round(middle)[0] == final else (middle, high)
            found.append((high, final))
        return tuple(found)

    def round(self, number: int, *, steps: int = 1) -> tuple[RoundTraffic, float]:
        """A round of training: what one client receives and sends, and the seconds that it takes."""
        self.steps, began = steps, time.perf_counter()
        at = train_round(self.running, Round(number - 1, self.arrays, self.arrays))
        seconds, counted = time.perf_counter() - began, self.ledger.take()
        self.arrays = at.arrays
        clients = len(at.trained) or 1  # a strategy may train none
        exchanges = max(0, counted.communication_rounds - 1)
        return RoundTraffic(counted.bytes_down // clients, counted.bytes_up // clients, exchanges), seconds


def _time_of_test_example(prepared: Parts, dataset: DataSet) -> float:
    run = prepared.run
    rows = torch.arange(min(run.evaluate.batch_size, len(dataset.test.labels)))
    examples = TestBatches(dataset.test, prepared.normalise, run.evaluate.batch_size, rows)
    loss, began = plain_loss(run, prepared.task), time.perf_counter()
    evaluate(prepared.model, examples, loss, prepared.device, task=prepared.task)
    return (time.perf_counter() - began) / len(rows)
