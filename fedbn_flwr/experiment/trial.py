"""Trains a few steps of a run to measure what its rounds send and how long they take, for `fedbn explain`.

The run's own strategy, clients and messages are used on the local engine; only a few of the clients take part, each
with few steps. All clients send and receive messages of the same size.
"""

from __future__ import annotations

import contextlib
import re
import resource
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedbn_flwr.client.app import client_app
from fedbn_flwr.client.client import BNClient
from fedbn_flwr.client.model_tensors import initial_arrays
from fedbn_flwr.data.batches import TestBatches
from fedbn_flwr.engines.base import GridAround
from fedbn_flwr.engines.local import LocalGrid
from fedbn_flwr.errors import RunFailed
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.arrays import arrays_in, pack, unpack
from fedbn_flwr.messages.serialization import dump
from fedbn_flwr.norms.roles import roles
from fedbn_flwr.results.folder.ledger import MeteredGrid
from fedbn_flwr.strategies import CannotSave, Rule

from .data import normalisation_of, partition_of
from .node import client_of
from .prepare import Prepared
from .settings import Experiment

_LR = 1e-12
_SECONDS = 2.0  # that the timed steps may take, if one step does not take longer


@dataclass(frozen=True)
class RoundTraffic:
    """Bytes of arrays that one client receives and sends in a round of training."""

    down: Mapping[str, int]  # by role of the model's arrays, by name of other records
    up: Mapping[str, int]
    exchanges: int  # of FedTAN, and queries of extensions, besides the messages with the model
    exchanges_down: int
    exchanges_up: int

    @property
    def bytes_down(self) -> int:
        return sum(self.down.values()) + self.exchanges_down

    @property
    def bytes_up(self) -> int:
        return sum(self.up.values()) + self.exchanges_up


@dataclass(frozen=True)
class Measured:
    clients: int  # that train in a round
    traffic: tuple[tuple[int, RoundTraffic], ...]  # each with the first of the rounds that have it
    rounds: int
    step: float  # seconds of a step of one client
    message: float  # seconds of a client's round besides its steps
    test_image: float | None  # seconds to evaluate one test image; None: the server does not evaluate
    memory: int  # bytes: the peak of this process, or of PyTorch on the GPU
    states: int  # bytes of the states of the strategy and of all clients in a checkpoint

    def total(self) -> tuple[int, int]:
        """Bytes down and up of all clients in all rounds."""
        ends = [*(first for first, _ in self.traffic[1:]), self.rounds + 1]
        parts = [(end - first, each) for (first, each), end in zip(self.traffic, ends, strict=True)]
        down = sum(count * each.bytes_down for count, each in parts)
        up = sum(count * each.bytes_up for count, each in parts)
        return self.clients * down, self.clients * up


def try_out(prepared: Prepared) -> Measured:
    """Train some rounds of one to twenty steps; the server needs data, from which the clients' parts are taken."""
    run, rule = prepared.run, prepared.rule
    assert prepared.dataset is not None
    _begin_peak(prepared.device)
    demand = _demand(rule)
    training = run.clients - run.evaluate.unseen  # the last ones never train
    sizes = [len(part) for part in partition_of(run.data, run.clients, run.seed, str(prepared.device))]
    # The clients with most images: batches of the others may be smaller.
    largest = sorted(range(training), key=lambda client: -sizes[client])
    chosen = sorted(largest[: max(2, demand.trained, demand.connected)])
    trial = _Trial(prepared)
    with LocalGrid(client_app(trial.client), run.clients, threads=run.engine.threads) as grid:
        trial.begin(_Some(grid, [client + 1 for client in chosen]))
        traffic = trial.traffic_by_round()
        second = min(2, run.rounds)
        _, one = trial.round(second)
        steps = max(1, min(20, int(_SECONDS / max(one, 1e-3))))
        _, several = trial.round(second, steps=1 + steps)
        of_chosen = sum(len(dump(grid.node_states().read_state(client + 1))) for client in chosen)
    step = max(several - one, 0.05 * several) / steps / len(chosen)
    return Measured(
        clients=min(training, max(int(training * demand.fraction), demand.trained)),
        traffic=traffic,
        rounds=run.rounds,
        step=step,
        message=max(one / len(chosen) - step, 0.0),
        test_image=_time_of_test_image(prepared) if rule.traits.has_global_model else None,
        memory=_peak(prepared.device),
        states=of_chosen * training // len(chosen) + _state_of(rule),
    )


def _state_of(rule: Rule) -> int:
    try:
        return len(dump(rule.state()))
    except CannotSave:
        return 0


class _Trial:
    def __init__(self, prepared: Prepared) -> None:
        self.prepared = prepared
        self.steps = 1
        self.identity = {protocol.RUN: prepared.name, protocol.TOKEN: "trial"}

    def client(self, context: Context, config: Mapping[str, Any]) -> BNClient:
        run = self.prepared.run
        # The model stays as it is: in a few rounds, which follow another schedule, it could diverge.
        train = run.train.model_copy(update={"steps": self.steps, "epochs": None, "lr": _LR})
        short = Experiment(name=run.name, runs=(run.model_copy(update={"train": train}),), run_config={})
        return client_of(short, context, {})  # without the name of the run: there is one

    def begin(self, grid: _Some) -> None:
        self.grid, self.ledger = grid, MeteredGrid(grid)
        self.arrays = pack(initial_arrays(self.prepared.model))
        self.roles = roles(self.arrays)
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
        self.steps, self.grid.sent = steps, []
        rule, began = self.prepared.rule, time.perf_counter()
        config = ConfigRecord({**self.identity, protocol.KEPT_ROUND: 0})
        messages = list(rule.configure_train(number, self.arrays, config, self.ledger))
        replies = list(self.ledger.send_and_receive(messages, timeout=self.prepared.run.engine.timeout))
        arrays, _ = rule.aggregate_train(number, replies)
        seconds = time.perf_counter() - began
        counted = self.ledger.take()
        failed = [reply.error.reason for reply in replies if reply.has_error()]
        if failed:
            raise RunFailed(f"a trial of run {self.prepared.run.label!r} failed: {failed[0]}")
        self.arrays = self.arrays if arrays is None else arrays
        if not messages:  # the strategy trains nothing
            return RoundTraffic({}, {}, 0, 0, 0), seconds
        # Other records are in the last message to a client, and the model in its first one: FedTAN's last message has
        # the values of an exchange.
        model = next((sent for sent in self.grid.sent if "arrays" in sent), {})
        last = {name: record for name, record in arrays_in(messages[0].content).items() if name != "arrays"}
        down = self._parts({"arrays": model["arrays"], **last} if "arrays" in model else last)
        up = self._parts(arrays_in(replies[0].content))
        return RoundTraffic(
            down,
            up,
            exchanges=counted.communication_rounds - 1,
            exchanges_down=counted.bytes_down // len(messages) - sum(down.values()),
            exchanges_up=counted.bytes_up // len(messages) - sum(up.values()),
        ), seconds

    def _parts(self, records: Mapping[str, ArrayRecord]) -> dict[str, int]:
        sizes: dict[str, int] = {}
        for name, record in records.items():
            for key, value in unpack(record).items():
                part = str(self.roles[key]) if name == "arrays" and key in self.roles else name
                sizes[part] = sizes.get(part, 0) + value.nbytes
        return sizes


class _Some(GridAround):
    """A grid of which only some nodes are connected. It records the arrays of the messages that are sent."""

    def __init__(self, inner: Grid, nodes: list[int]) -> None:
        super().__init__(inner)
        self.nodes = nodes
        self.sent: list[dict[str, ArrayRecord]] = []

    def get_node_ids(self) -> list[int]:
        return list(self.nodes)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        self.sent += [arrays_in(message.content) for message in messages]
        return super().push_messages(messages)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        messages = list(messages)
        self.sent += [arrays_in(message.content) for message in messages]
        return super().send_and_receive(messages, timeout=timeout)


@dataclass(frozen=True)
class _Demand:
    trained: int  # nodes at least
    connected: int  # likewise
    fraction: float  # of the nodes to train


def _demand(rule: Strategy) -> _Demand:
    """The nodes that a strategy needs; that of the innermost one counts."""
    while isinstance(inner := getattr(rule, "strategy", None), Strategy):
        rule = inner
    return _Demand(
        trained=int(getattr(rule, "min_train_nodes", 1)),
        connected=int(getattr(rule, "min_available_nodes", 1)),
        fraction=float(getattr(rule, "fraction_train", 1.0)),
    )


def _time_of_test_image(prepared: Prepared) -> float | None:
    run, dataset = prepared.run, prepared.dataset
    assert dataset is not None
    rows = torch.arange(min(run.evaluate.batch_size, len(dataset.test.labels)))
    model, began = prepared.model, time.perf_counter()
    model.eval()
    with torch.no_grad():
        for images, _ in TestBatches(dataset.test, normalisation_of(run, dataset), run.evaluate.batch_size, rows):
            model(images.to(prepared.device)).cpu()
    return (time.perf_counter() - began) / len(rows)


def _begin_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with contextlib.suppress(OSError):  # other systems than Linux: the peak includes the runs before
        Path("/proc/self/clear_refs").write_text("5")


def _peak(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with contextlib.suppress(OSError):
        if found := re.search(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE):
            return 1024 * int(found[1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
