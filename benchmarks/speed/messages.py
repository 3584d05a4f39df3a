"""Messages and aggregation without training."""

from __future__ import annotations

import importlib.util
import itertools
import os
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.serverapp.strategy.strategy_utils import aggregate_arrayrecords
from torch import nn

from fedbn_flwr.client.app import client_app
from fedbn_flwr.client.client import BNClient, Update
from fedbn_flwr.client.training import TRAINER, Trained
from fedbn_flwr.engines.local import LocalGrid
from fedbn_flwr.extensions import part
from fedbn_flwr.messages.aggregate import weighted_mean
from fedbn_flwr.messages.arrays import Arrays, pack, unpack
from fedbn_flwr.messages.protocol import Config
from fedbn_flwr.models.build import build_model
from fedbn_flwr.models.tensors import ModelTensors, initial_arrays
from fedbn_flwr.strategies import FedAvg

from .common import BATCH, Figure, Options, figure, random_images, resnet20, same_clients, seconds, train_round


def exchange(options: Options) -> Iterator[Figure]:
    """A send-and-receive of 1,376 float32 with five nodes."""
    app = ClientApp()

    @app.query("echo")
    def echo(message: Message, context: Context) -> Message:
        return Message(RecordDict({"arrays": message.content["arrays"]}), reply_to=message)

    content = RecordDict({"arrays": pack({"values": np.ones(1376, dtype=np.float32)})})

    def measured(grid: Grid, where: str, most: float) -> Figure:
        def once() -> None:
            replies = grid.send_and_receive([Message(content, node, "query.echo") for node in range(1, 6)])
            assert all(len(unpack(reply.content.array_records["arrays"])["values"]) == 1376 for reply in replies)

        once()
        values = [1000 * seconds(once) for _ in range(50 * options.repeats)]
        return figure(f"exchange with five nodes, {where}", values, "ms", most=most)

    for workers, most, where in ((0, 1.0, "in one process"), (options.workers, 3.0, f"{options.workers} workers")):
        with LocalGrid(app, 5, workers=workers) as grid:
            yield measured(grid, where, most)
    if importlib.util.find_spec("ray") is None:
        return
    with part("pools", "ray")() as cluster:
        cluster.connect()
        with LocalGrid(app, 5, pool=cluster.pool(options.workers)) as actors:
            yield measured(actors, f"{options.workers} Ray actors", 10.0)


def empty_round(options: Options) -> Iterator[Figure]:
    """A round without a step, with its aggregation, and the aggregation of large models."""
    cpu = torch.device("cpu")
    model = resnet20(cpu)
    tensors, arrays = ModelTensors(model), pack(initial_arrays(model))
    strategy = FedAvg(min_available_nodes=5)
    app = same_clients(random_images(BATCH, cpu), lambda _: tensors, steps=1)
    trainer = TRAINER.set(lambda training: Trained(0.0, BATCH, 1, ()))  # takes no step
    with LocalGrid(app, 5, threads=1) as grid:
        rounds = itertools.count(1)
        train_round(strategy, grid, next(rounds), arrays)
        values = [
            1000 * seconds(lambda: train_round(strategy, grid, next(rounds), arrays))
            for _ in range(10 * options.repeats)
        ]
    TRAINER.reset(trainer)
    yield figure("round without a step, five clients, 270k parameters", values, "ms", most=5)
    yield from _aggregation(options)


def _aggregation(options: Options) -> Iterator[Figure]:
    large = build_model("resnet18", 10, "bn")
    values = {key: value.numpy() for key, value in large.state_dict().items() if value.is_floating_point()}
    size = sum(value.size for value in values.values())
    # Bytes, as in replies from a network. Four replies are used repeatedly: a hundred would take gigabytes of memory.
    records = [ArrayRecord({key: Array(value + i) for key, value in values.items()}) for i in range(4)]
    replies = [RecordDict({"arrays": records[i % 4], "metrics": MetricRecord({"n": 1.0})}) for i in range(100)]

    def ours() -> None:
        weighted_mean((unpack(reply.array_records["arrays"]) for reply in replies), [1.0] * 100)

    def flowers() -> None:
        aggregate_arrayrecords(replies, "n")

    block = np.ones(size, dtype=np.float32)
    target = np.empty_like(block)

    def memory() -> None:  # every mean must read each reply once
        for _ in range(100):
            np.copyto(target, block)

    ratios = []

    def measured(action: Callable[[], None]) -> tuple[float, float]:
        began = time.process_time()
        return seconds(action), time.process_time() - began

    pairs = []
    for _ in range(max(1, options.repeats // 2)):
        (a, own), (b, other) = measured(ours), measured(flowers)
        pairs.append((a, b, seconds(memory)))
        ratios.append(other / own)
    name = f"mean of 100 replies of {size / 1e6:.1f} million parameters"
    yield figure(f"{name}: Flower's time / ours", [b / a for a, b, _ in pairs], "x", least=3)
    yield figure(f"{name}: Flower's processor time / ours", ratios, "x")
    yield figure(f"{name}: ours / copying them once", [a / c for a, _, c in pairs], "x")
    tracemalloc.start()
    weighted_mean((unpack(reply.array_records["arrays"]) for reply in replies[:16]), [1.0] * 16)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    yield figure(f"{name}: memory in use / one reply", [peak / (4 * size)], "x", most=8)


class _Echo(BNClient):
    """Returns the model it receives."""

    def train_round(self, arrays: Arrays, config: Config, *rest: Any, **more: Any) -> Update:
        return Update(arrays, {"num-examples": 1}, {})


def scale(options: Options) -> Iterator[Figure]:
    """10,000 registered clients, 100 of which take part in a round."""
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 10))
    arrays = pack(initial_arrays(model))

    def start(registered: int) -> Callable[[], None]:
        grid = LocalGrid(client_app(lambda context: _Echo(model, ())), registered)
        strategy = FedAvg(
            fraction_train=100 / registered, min_train_nodes=100, min_available_nodes=registered, fraction_evaluate=0.0
        )
        number = 0

        def one_round() -> None:
            nonlocal number
            number += 1
            train_round(strategy, grid, number, arrays)

        one_round()
        return one_round

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    few_round = many_round = start(200)
    before = resident()

    def begin() -> None:
        nonlocal many_round
        many_round = start(10_000)

    yield figure("10,000 registered clients: start and first round", [seconds(begin)], "s", most=5)
    yield figure("10,000 registered clients: memory of each", [(resident() - before) / 10_000 / 1024], "KiB", most=10)
    ratios = [seconds(many_round) / seconds(few_round) for _ in range(3 * options.repeats)]
    yield figure("round of 100: 10,000 registered / 200 registered", ratios, "x", most=1.5)
