"""Trains with some of our strategies in Flower's simulation, of any version, and prints the digest of each model.

`python other_flower.py`, in an environment with the wheel and `flwr[simulation]`; with `--local` on the local engine.
"""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from torch import nn

from fedbn_flwr import BNClient, client_app, strategies

CLIENTS, ROUNDS = 3, 2
STRATEGIES = {
    "FedAvg": lambda: strategies.FedAvg(),
    "FixBN": lambda: strategies.FixBN(strategies.FedAvg(), freeze_round=1),
    "FedBN": lambda: strategies.FedBN(),
    "Scaffold": lambda: strategies.Scaffold(),
    "FedTAN": lambda: strategies.FedTAN(min_batch=1),
}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


def batches(client: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    draws = torch.Generator().manual_seed(client)
    return [(torch.randn(8, 4, generator=draws) + client, torch.randint(0, 3, (8,), generator=draws)) for _ in range(3)]


def make_client(context: Context) -> BNClient:
    torch.set_num_threads(1)
    data = batches(int(context.node_config["partition-id"]))
    return BNClient(network(), data, data, lr=0.05, momentum=0.9, context=context)


def client() -> ClientApp:
    return client_app(make_client)


def train(name: str, grid: Grid) -> str:
    """The digest of the model after the last round."""
    result: Any = STRATEGIES[name]().start(
        grid=grid,
        initial_arrays=ArrayRecord(network().state_dict()),
        num_rounds=ROUNDS,
        train_config=ConfigRecord({}),
    )
    digest = hashlib.sha256()
    for key, array in sorted(result.arrays.items()):
        digest.update(key.encode() + array.numpy().tobytes())
    return digest.hexdigest()


def on_the_local_engine() -> dict[str, str]:
    from fedbn_flwr import LocalGrid  # which not all versions have

    return {name: train(name, LocalGrid(client(), CLIENTS)) for name in STRATEGIES}


def in_flowers_simulation() -> dict[str, str]:
    from flwr.simulation import run_simulation  # it takes seconds

    digests: dict[str, str] = {}
    app = ServerApp()

    @app.main()
    def serve(grid: Grid, context: Context) -> None:
        digests.update({name: train(name, grid) for name in STRATEGIES})

    # One CPU each: the nodes share the machine's.
    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server_app=app, client_app=client(), num_supernodes=CLIENTS, backend_config=resources)
    return digests


if __name__ == "__main__":
    print(json.dumps(on_the_local_engine() if "--local" in sys.argv else in_flowers_simulation()))
