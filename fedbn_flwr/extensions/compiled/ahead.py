"""Compiled passes on the local engine: whether `train.compile: auto` uses them, and compiling before workers begin."""

from __future__ import annotations

import logging
import math
import multiprocessing
import signal
from contextlib import suppress
from typing import Any

import torch
from flwr.app import Context, RecordDict

from fedbn_flwr.engines.worker import fork_problem
from fedbn_flwr.errors import MessageError
from fedbn_flwr.experiment.data import load_data, partition_of
from fedbn_flwr.experiment.model import choose_device, make_model
from fedbn_flwr.experiment.node import client_of
from fedbn_flwr.experiment.prepare import make_rule
from fedbn_flwr.experiment.settings import Experiment, Settings
from fedbn_flwr.messages import protocol
from fedbn_flwr.strategies.fixbn import FREEZE  # type: ignore[import-untyped]

# Compiling takes about a minute of a core and saves about a third of the passes, which a core computes at some 10^11
# operations per second: with this many, about five minutes are saved.
_LONG = 1e14
_PATIENCE = 600  # seconds


def decided(run: Settings) -> Settings:
    """The run with true or false in place of `train.compile: auto`.

    It depends on the settings and the data only, because the last bits of the results depend on it.
    """
    if run.train.compile != "auto":
        return run
    worth = run.evaluate.server and _operations(run) > _LONG  # without data in this process: unknown
    return run.model_copy(update={"train": run.train.model_copy(update={"compile": worth})})


def fill_cache(experiment: Experiment, run: Settings) -> None:
    """Compile the model in a process of its own; PyTorch's cache on disk then has it for all workers.

    Not in this process: PyTorch refuses backward passes in a process that is forked after one. For later runs with this
    model, PyTorch finds all in its cache, which takes seconds.
    """
    freezes = make_rule(run).traits.freezes
    frozen = [protocol.join(freezes)] if freezes else []
    process = multiprocessing.get_context("fork").Process(target=_compile, args=(experiment, run, frozen), daemon=True)
    process.start()
    process.join(_PATIENCE)
    if process.is_alive():
        process.kill()  # the workers will compile, or log why they cannot


def _compile(experiment: Experiment, run: Settings, frozen: list[str]) -> None:
    for stop in (signal.SIGINT, signal.SIGTERM):  # which may reach all processes; the server says that it stops
        signal.signal(stop, signal.SIG_DFL)
    if fork_problem() is not None:  # the workers will report it
        return
    logging.getLogger("flwr").setLevel(logging.CRITICAL)  # the workers log why a model cannot be compiled
    name = next(name for name, each in experiment.named.items() if each == run)
    parts = partition_of(run.data, run.clients, run.seed, str(choose_device(run.engine.device)))
    largest = max(range(run.clients), key=lambda client: len(parts[client]))  # others may have no batch of full size
    node: dict[str, Any] = {"partition-id": largest, "num-partitions": run.clients}
    context = Context(run_id=0, node_id=1, node_config=node, state=RecordDict(), run_config={})
    client = client_of(experiment, context, {protocol.RUN: name})
    client.epochs, client.steps = None, 1
    first = client.get_parameters({})
    with suppress(MessageError):  # a layer cannot be frozen: the strategy or a worker reports it
        for config in ({}, *({FREEZE: roles} for roles in frozen)):
            client.fit(first, config)


def _operations(run: Settings) -> float:
    """The floating point operations of all training passes of a run."""
    from torch.utils.flop_counter import FlopCounterMode  # imports a second's worth of modules

    device = choose_device(run.engine.device)
    dataset = load_data(run.data, str(device))
    model = make_model(run, dataset)
    height, width = dataset.size if isinstance(dataset.size, tuple) else (dataset.size, dataset.size)
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        model.eval()(torch.zeros(1, dataset.channels, height, width))
    if run.train.steps is not None:
        images = float(run.train.steps * run.train.batch_size * run.trained)
    else:
        parts = partition_of(run.data, run.clients, run.seed, str(device))[: run.trained]
        images = (run.train.epochs or 1) * math.fsum(len(part) for part in parts)
    fraction = run.strategy.get("fraction_train", 1.0)
    share = float(fraction) if isinstance(fraction, int | float) else 1.0
    return 3 * counter.get_total_flops() * images * share * run.rounds  # the backward pass is twice the forward pass
