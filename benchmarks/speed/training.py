"""Training through the local engine beside plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from flwr.app import Context
from torch import nn
from torch.nn import functional as F

from fedbn_flwr.client.app import client_app
from fedbn_flwr.client.client import BNClient
from fedbn_flwr.engines.local import LocalGrid
from fedbn_flwr.errors import RunFailed
from fedbn_flwr.messages.arrays import pack
from fedbn_flwr.models.tensors import ModelTensors, initial_arrays
from fedbn_flwr.strategies import FedAvg, FedTAN

from .common import (
    BATCH,
    BareLoop,
    Figure,
    Options,
    figure,
    random_images,
    resnet20,
    same_clients,
    seconds,
    train_round,
)


def overhead(options: Options) -> Iterator[Figure]:
    """Steps per second of training on the local engine, relative to the bare loop."""
    steps, device = options.steps, options.device
    data = random_images(BATCH * steps, device)
    bare = BareLoop(data)
    model = ModelTensors(resnet20(device))  # one for all clients, as in an experiment
    first = pack(initial_arrays(bare.model))

    def rounds(workers: int, clients: int) -> Iterator[float]:
        strategy = FedAvg(min_available_nodes=clients, min_train_nodes=clients)
        app = same_clients(data, lambda _: model, steps)
        with LocalGrid(app, clients, workers=workers, threads=1) as grid:
            arrays, number = first, 0

            def one_round() -> None:
                nonlocal arrays, number
                number += 1
                arrays = train_round(strategy, grid, number, arrays)

            one_round()
            while True:
                yield clients * steps / seconds(one_round)

    def ratios(workers: int, clients: int) -> list[float]:
        torch.set_num_threads(1)
        federated = rounds(workers, clients)
        bare(min(steps, 5))
        measured = []
        for _ in range(options.repeats):
            speed = next(federated)
            measured.append(speed * seconds(lambda: bare(steps)) / steps)
        return measured

    yield figure("steps per second / bare loop, one process", ratios(0, 1), "x", least=0.97)
    if device.type == "cpu" and (n := options.workers) > 1:
        yield figure(f"steps per second / bare loop on one core, {n} workers", ratios(n, n), "x", least=0.9 * n)


def compiled(options: Options) -> Iterator[Figure]:
    """Steps per second of compiled training, relative to the eager bare loop in float32; compiles for minutes."""
    from fedbn_flwr.extensions.compiled.passes import uncompiled

    steps, device = options.steps, options.device
    torch.set_num_threads(1)
    goals = {
        (20, False, "bn"): 1.4,
        (20, True, "bn"): None,
        (128, False, "bn"): None,
        (128, True, "bn"): 1.8,
        (128, False, "gn"): None,
    }
    for (batch, fast, norm), goal in goals.items():
        data = random_images(batch * steps, device)
        bare = BareLoop(data, batch, resnet20(device, norm))
        first = pack(initial_arrays(bare.model))
        how: dict[str, Any] = {"precision": torch.bfloat16, "channels_last": True} if fast else {}
        model = resnet20(device, norm)
        if fast:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        tensors = ModelTensors(model)
        app = same_clients(data, lambda _: tensors, steps, batch=batch, compile=True, **how)  # noqa: B023
        grid, strategy = LocalGrid(app, 1), FedAvg(min_available_nodes=1, min_train_nodes=1)
        for number in (1, 2):
            train_round(strategy, grid, number, first)  # compiles
        if uncompiled:
            raise RunFailed("PyTorch cannot compile ResNet-20 here, for the reason above: there is nothing to measure")
        bare(min(steps, 5))
        ratios = [
            seconds(lambda: bare(steps)) / seconds(lambda: train_round(strategy, grid, 3, first))  # noqa: B023
            for _ in range(options.repeats)
        ]
        name = ("bfloat16 and channels-last" if fast else "float32") + (", group norm" if norm == "gn" else "")
        yield figure(f"steps per second / bare loop, batch {batch}, {name}", ratios, "x", least=goal)


def _iterations(options: Options, clients: int, batch: int) -> list[float]:
    """How many times as long as plain passes FedTAN's rounds of one step take."""
    device = options.device
    data = random_images(clients * batch, device)
    batches = [
        ((data.inputs[rows].float() - 128) / 64, data.labels[rows])
        for rows in torch.arange(clients * batch).split(batch)
    ]
    tensors = [ModelTensors(resnet20(device)) for _ in range(clients)]  # kept for all rounds, as in an experiment
    plain = resnet20(device)

    def make_client(context: Context) -> BNClient:
        client = int(context.node_config["partition-id"])
        batch = [batches[client]]
        return BNClient(tensors[client], batch, steps=1, lr=0.01, channels_last=False, context=context)

    def passes() -> None:
        for inputs, labels in batches:
            plain.zero_grad()
            F.cross_entropy(plain(inputs), labels).backward()
        if device.type == "cuda":
            torch.cuda.synchronize()

    strategy = FedTAN(min_available_nodes=clients, min_batch=1)
    one_round = rounds_of(strategy, LocalGrid(client_app(make_client), clients), plain)
    for way in (one_round, one_round, passes):
        way()
    return [1 / seconds(passes) * seconds(one_round) for _ in range(options.repeats)]


def fedtan(options: Options) -> Iterator[Figure]:
    """FedTAN's round relative to plain passes (E = 1), and on workers to FedAvg's round (E = 5)."""
    torch.set_num_threads(1)
    device = options.device
    for clients, batch, goal in ((5, 128, 1.1), (5, 20, None), (10, 20, None)):
        what = f"FedTAN iteration / plain passes, {clients} clients, batch {batch}"
        yield figure(what, _iterations(options, clients, batch), "x", most=goal)
    if device.type != "cpu" or options.workers < 2:
        return
    clients, models = 5, [resnet20(device) for _ in range(5)]
    tensors = [ModelTensors(model) for model in models]  # kept for all rounds, as in an experiment
    batch, steps = 32, 5
    few = random_images(batch * steps, device)
    app = same_clients(few, lambda client: tensors[client], steps, batch=batch)
    with ExitStack() as stack:
        grids = [stack.enter_context(LocalGrid(app, clients, workers=options.workers)) for _ in range(2)]
        tan = rounds_of(FedTAN(min_available_nodes=clients), grids[0], models[0])
        avg = rounds_of(FedAvg(min_available_nodes=clients), grids[1], models[0])

        def second(one_round: Callable[[], None]) -> float:
            # After another round, as in a run: workers return their memory while the other strategy trains.
            one_round()
            return seconds(one_round)

        ratios = [second(tan) / second(avg) for _ in range(options.repeats)]
    name = f"round of five steps, five clients, batch {batch}, {options.workers} workers: FedTAN / FedAvg"
    yield figure(name, ratios, "x", most=1.15)


def rounds_of(strategy: FedAvg, grid: LocalGrid, model: nn.Module) -> Callable[[], None]:
    """A function that trains one round on `grid`, always from the arrays of `model`."""
    arrays = pack(initial_arrays(model))
    strategy.begin(1, arrays)

    def one_round() -> None:
        train_round(strategy, grid, 1, arrays)

    return one_round
