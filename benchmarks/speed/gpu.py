"""Training on a GPU in one process and in several, beside plain PyTorch."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from flwr.app import Context
from torch import nn

from fedbn_flwr.client.app import client_app
from fedbn_flwr.client.client import BNClient
from fedbn_flwr.data.batches import ClientBatches
from fedbn_flwr.data.examples import InMemory
from fedbn_flwr.engines.local import LocalGrid
from fedbn_flwr.experiment.run.cohort import TrainedNodes
from fedbn_flwr.messages.arrays import pack
from fedbn_flwr.models.build import build_model
from fedbn_flwr.models.tensors import ModelTensors, initial_arrays
from fedbn_flwr.strategies import FedAvg

from .common import MOMENTS, BareLoop, Figure, Options, figure, random_images, seconds, train_round
from .training import five_clients


@dataclass(frozen=True)
class Case:
    model: str
    batch: int
    compile: bool


CASES = [
    Case(model, batch, compiled)
    for compiled in (False, True)
    for model in ("cnn", "resnet18")
    for batch in (10, 20, 32)
]


def gpu(options: Options) -> Iterator[Figure]:
    """On a GPU: client steps per second in one process and in several, relative to the bare loop; FedTAN's round."""
    if options.device.type == "cuda":
        yield from five_clients(options)
        yield from processes(options)


def processes(
    options: Options, cases: Sequence[Case] = CASES, clients: int = 50, counts: Sequence[int] = (1, 2, 4)
) -> Iterator[Figure]:
    """Rounds of `clients` clients, by any number of processes on any device; the bare loop is eager in one process.

    Processes have nodes for all cases, so that each is started once.
    """
    torch.set_num_threads(1)
    data = random_images(max(case.batch for case in cases) * options.steps, options.device)
    app = client_app(functools.partial(_client, data, tuple(cases), clients, options.steps))
    for count in counts:
        if count > options.workers:
            return
        nodes, on_gpu = clients * len(cases), options.device.type == "cuda"
        if count == 1:
            grid = LocalGrid(app, nodes, threads=1)
        else:
            grid = LocalGrid(app, nodes, workers=count, gpus=1 if on_gpu else 0, start="spawn")
        with grid:
            for number, case in enumerate(cases):
                own = range(number * clients + 1, (number + 1) * clients + 1)
                speeds, ratios = _measure(options, case, data, grid, own)
                how = "compiled" if case.compile else "eager"
                where = f"{case.model}, batch {case.batch}, {how}, {count} process{'es' if count > 1 else ''}"
                yield figure(f"client steps per second, {where}", speeds, "1/s")
                goal = 5 if case.compile and count == max(counts) else None
                yield figure(f"client steps per second / bare loop, {where}", ratios, "x", least=goal)


def _measure(
    options: Options, case: Case, data: InMemory, grid: LocalGrid, nodes: range
) -> tuple[list[float], list[float]]:
    """Client steps per second of rounds of these nodes, and their ratio to the steps per second of the bare loop."""
    bare = BareLoop(data, case.batch, _build(case, options.device))
    first = pack(initial_arrays(bare.model))
    part = TrainedNodes(grid, set(grid.get_node_ids()) - set(nodes))
    strategy = FedAvg(min_available_nodes=len(nodes), min_train_nodes=len(nodes))
    train_round(strategy, part, 1, first)  # compiles
    bare(options.steps)
    speeds, ratios = [], []
    for _ in range(options.repeats):
        plain = options.steps / seconds(lambda: bare(options.steps))
        speeds.append(len(nodes) * options.steps / seconds(lambda: train_round(strategy, part, 1, first)))
        ratios.append(speeds[-1] / plain)
    return speeds, ratios


def _client(data: InMemory, cases: tuple[Case, ...], clients: int, steps: int, context: Context) -> BNClient:
    partition = int(context.node_config["partition-id"])
    case = cases[partition // clients]
    rows = torch.arange(case.batch * steps)
    batches = ClientBatches(data, rows, MOMENTS, batch_size=case.batch, client=partition, seed=0)
    model = _model(case, data.device)
    return BNClient(model, batches, lr=0.01, momentum=0.9, steps=steps, compile=case.compile, context=context)


@functools.cache
def _model(case: Case, device: torch.device) -> ModelTensors:
    """A model for all clients of a process, as in an experiment."""
    return ModelTensors(_build(case, device))


def _build(case: Case, device: torch.device) -> nn.Module:
    return build_model(case.model, 10, "bn", in_channels=3, image_size=32).to(device)
