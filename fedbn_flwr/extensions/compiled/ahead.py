"""Compiled passes on the local engine: compiling before workers begin."""

from __future__ import annotations

import logging
import multiprocessing
import signal
from contextlib import suppress
from typing import Any

from flwr.app import Context, RecordDict

from fedbn_flwr.engines.worker import fork_problem
from fedbn_flwr.errors import MessageError
from fedbn_flwr.experiment.data import partition_of, resolve
from fedbn_flwr.experiment.find import run_names
from fedbn_flwr.experiment.model import choose_device
from fedbn_flwr.experiment.node import client_of
from fedbn_flwr.experiment.prepare import make_rule
from fedbn_flwr.experiment.settings import Experiment, Settings
from fedbn_flwr.messages import protocol
from fedbn_flwr.strategies.fixbn import FREEZE  # type: ignore[import-untyped]

_PATIENCE = 600  # seconds


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
    labels = [(each.label, each.seed) for each in experiment.runs]
    name = run_names(experiment)[labels.index((run.label, run.seed))]
    parts = partition_of(resolve(run).data, run.clients, run.seed, str(choose_device(run.engine.device)))
    largest = max(range(run.clients), key=lambda client: len(parts[client]))  # others may have no batch of full size
    node: dict[str, Any] = {"partition-id": largest, "num-partitions": run.clients}
    context = Context(run_id=0, node_id=1, node_config=node, state=RecordDict(), run_config={})
    client = client_of(experiment, context, {protocol.RUN: name})
    client.epochs, client.steps = None, 1
    first = client.get_parameters({})
    with suppress(MessageError):  # a layer cannot be frozen: the strategy or a worker reports it
        for config in ({}, *({FREEZE: roles} for roles in frozen)):
            client.fit(first, config)
