"""How evenly the local engine shares out the clients of a round among its workers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedbn_flwr.client.app import client_app
from fedbn_flwr.client.client import BNClient
from fedbn_flwr.data.batches import ClientBatches, TestBatches
from fedbn_flwr.data.examples import Examples
from fedbn_flwr.engines.local import LocalGrid
from fedbn_flwr.messages.arrays import metrics_in, pack
from fedbn_flwr.models.tensors import ModelTensors, initial_arrays
from fedbn_flwr.strategies import FedAvg, FedBN

from .common import BATCH, MOMENTS, Figure, Options, figure, random_images, resnet20, seconds

_MEAN = 0.05  # seconds of a client that sleeps
_REGISTERED = 100
_EACH = 5  # clients of a round per worker
_SECONDS = "seconds"  # the record of a reply that has the client's own time


def sharing(options: Options) -> Iterator[Figure]:
    """The time of a round over its lower bound: the work of a worker, or the longest client."""
    random = np.random.default_rng(0)
    sizes = {
        "equal clients": np.ones(_REGISTERED),
        "Dirichlet 0.1": random.dirichlet([0.1] * 10, 10).reshape(-1) + 0.01,
        "unbalanced shards": random.permutation(np.repeat([1.0, 3.0, 9.0, 20.0], _REGISTERED // 4)),
    }
    relative = {name: values / values.mean() for name, values in sizes.items()}
    yield from _sleeping(options, relative, random)
    if options.workers > 1:
        yield from _training(options, relative)


def _lower_bound(durations: Sequence[float], workers: int) -> float:
    return max(sum(durations) / workers, *durations)


# --- clients that sleep ---


def _sleeping(options: Options, sizes: dict[str, np.ndarray], random: np.random.Generator) -> Iterator[Figure]:
    for name, relative in sizes.items():
        durations = _MEAN * relative
        for workers in (2, 16):
            values = []
            with LocalGrid(_sleepers(durations), _REGISTERED, workers=workers, work=durations.tolist()) as grid:
                grid.start()
                for _ in range(options.repeats):
                    chosen = random.choice(_REGISTERED, size=_EACH * workers, replace=False)
                    lower = _lower_bound(durations[chosen].tolist(), workers)
                    messages = [Message(RecordDict(), int(node) + 1, "train") for node in chosen]
                    values.append(seconds(lambda: grid.send_and_receive(messages)) / lower)  # noqa: B023
            yield figure(f"round / lower bound, sleeping, {name}, {workers} workers", values, "x", most=1.05)


def _sleepers(durations: np.ndarray) -> ClientApp:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        time.sleep(durations[int(context.node_config["partition-id"])])
        return Message(RecordDict({"metrics": MetricRecord({"done": 1})}), reply_to=message)

    return app


# --- clients that train and evaluate ---


def _training(options: Options, sizes: dict[str, np.ndarray]) -> Iterator[Figure]:
    """Ten of the clients train a ResNet-20 for `steps / 4` steps on average.

    The lower bound is computed from the times that the clients took in the same round, so that it contains what workers
    cost each other, for instance in memory bandwidth.
    """
    mean = max(1, options.steps // 4)
    steps = {name: np.maximum(1, np.rint(mean * relative)).astype(int) for name, relative in sizes.items()}
    data = random_images(BATCH * max(int(each.max()) for each in steps.values()), torch.device("cpu"))
    chosen = min(_REGISTERED, _EACH * options.workers)
    kinds: dict[str, tuple[type[FedAvg], dict[str, Any], float]] = {
        "": (FedAvg, {}, 1.05),
        ", FedBN with momentum": (FedBN, {"keep_momentum": True}, 1.10),
    }
    torch.set_num_threads(1)
    for name in sizes:
        for kind, (strategy, how, most) in kinds.items():
            rounds = Rounds(data, steps[name], strategy, chosen, options.workers, how)
            with rounds.grid:
                rounds.train(1)
                values = [rounds.train(2 + i) for i in range(options.repeats)]
                yield figure(f"round / lower bound, training, {name}{kind}", values, "x", most=most)
                if not kind:
                    values = [rounds.evaluate(options.repeats + 1 + i) for i in range(options.repeats + 1)][1:]
                    yield figure(f"round / lower bound, evaluation by clients, {name}", values, "x", most=most)


class Rounds:
    """Rounds of `chosen` clients, client i with `steps[i]` batches of its own."""

    def __init__(
        self, data: Examples, steps: np.ndarray, strategy: type[FedAvg], chosen: int, workers: int, how: dict[str, Any]
    ) -> None:
        tensors = ModelTensors(resnet20(data.device))

        def make_client(context: Context) -> BNClient:
            client = int(context.node_config["partition-id"])
            rows = torch.arange(BATCH * int(steps[client]))
            batches = ClientBatches(data, rows, MOMENTS, batch_size=BATCH, client=client, seed=0)
            test = TestBatches(data, MOMENTS, 100, rows)
            return BNClient(tensors, batches, test, lr=0.01, momentum=0.9, context=context, **how)

        self.grid = LocalGrid(
            client_app(make_client, mods=[_timed]),
            _REGISTERED,
            workers=workers,
            work=steps.tolist(),
            threads=1,
        )
        self.workers = max(1, workers)
        share = chosen / _REGISTERED
        self.strategy = strategy(fraction_train=share, fraction_evaluate=share, min_available_nodes=_REGISTERED)
        self.arrays: ArrayRecord = pack(initial_arrays(tensors.model))
        self.strategy.begin(1_000, self.arrays)

    def train(self, number: int) -> float:
        """A round with its mean; returns the time until all clients have replied, over the lower bound."""
        messages = list(self.strategy.configure_train(number, self.arrays, ConfigRecord(), self.grid))
        ratio, replies = self._carry_out(messages)
        arrays, _ = self.strategy.aggregate_train(number, replies)
        assert arrays is not None
        self.arrays = arrays
        return ratio

    def evaluate(self, number: int) -> float:
        messages = list(self.strategy.configure_evaluate(number, self.arrays, ConfigRecord(), self.grid))
        return self._carry_out(messages)[0]

    def _carry_out(self, messages: list[Message]) -> tuple[float, list[Message]]:
        began = time.perf_counter()
        replies = list(self.grid.send_and_receive(messages))
        took = time.perf_counter() - began
        return took / _lower_bound(list(map(_take_time, replies)), self.workers), replies


def _timed(message: Message, context: Context, call_next: Callable[[Message, Context], Message]) -> Message:
    """A mod that adds the client's own time to its reply."""
    began = time.perf_counter()
    reply = call_next(message, context)
    reply.content[_SECONDS] = MetricRecord({_SECONDS: time.perf_counter() - began})
    return reply


def _take_time(reply: Message) -> float:
    """Remove the client's own time from its reply."""
    own = metrics_in(reply.content)[_SECONDS][_SECONDS]
    del reply.content[_SECONDS]
    assert isinstance(own, float)
    return own
