"""FedAvg with clients on the local engine, in worker processes or, with 0 of them, in this one."""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context
from torch import Tensor

from fedbn_flwr import BNClient, LocalGrid, client_app
from fedbn_flwr.engines.worker import keep_freed_memory
from fedbn_flwr.messages.arrays import pack
from fedbn_flwr.models.tensors import ModelTensors, initial_arrays
from fedbn_flwr.strategies import FedAvg

from .networks import Batches, batches, build, load
from .task import CLIENTS, EXAMPLES, RATE, Task


class Epochs:
    """The same batches in the same order in each epoch, as the rivals have them."""

    num_examples = EXAMPLES

    def __init__(self, client: Batches) -> None:
        self.batches = client

    def epoch(self, server_round: int, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(self.batches)


def engine(processes: int, clients_at_once: bool) -> dict[str, Any]:
    if not clients_at_once:
        return {"workers": processes, "threads": 1}
    pool = importlib.import_module("fedbn_flwr.extensions.together.parked")
    return {"threads": 1, "pool": functools.partial(pool.TogetherPool, most=CLIENTS)}


def main(task: Task, *, clients_at_once: bool = False) -> None:
    logging.getLogger("flwr").setLevel(logging.WARNING)
    torch.set_num_threads(1)
    keep_freed_memory()  # as `fedbn run` does
    model = build(task.network)
    load(model, task)
    shared: ModelTensors = ModelTensors(model)  # one for all clients, as in an experiment
    data: Sequence[Epochs] = [Epochs(client) for client in batches(task)]

    def make_client(context: Context) -> BNClient:
        client = data[int(context.node_config["partition-id"])]
        return BNClient(shared, client, lr=RATE, channels_last=True, context=context)

    strategy = FedAvg(min_available_nodes=CLIENTS, min_train_nodes=CLIENTS)
    arrays, number = pack(initial_arrays(model)), 0
    with LocalGrid(client_app(make_client), CLIENTS, **engine(task.processes, clients_at_once)) as grid:

        def one_round() -> None:
            nonlocal arrays, number
            number += 1
            messages = list(strategy.configure_train(number, arrays, ConfigRecord(), grid))
            mean, _ = strategy.aggregate_train(number, grid.send_and_receive(messages))
            assert isinstance(mean, ArrayRecord)
            arrays = mean

        task.serve(one_round, lambda: {name: arrays[name].numpy() for name in task.initial}, "torch", "flwr")


if __name__ == "__main__":
    main(Task())
