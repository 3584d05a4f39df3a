"""What secure aggregation costs in bytes and seconds; docs/strategies/secure.md.

    python benchmarks/secure.py local   a round without training steps on the local engine: what the server receives
                                        and sends per client, and the processor time of all clients and the server
    python benchmarks/secure.py nodes   rounds on a real SuperLink and SuperNodes on this machine

Appends one line per measurement to docs/results/secure/local.jsonl or nodes.jsonl.
"""

from __future__ import annotations

import copy
import json
import logging
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from flwr.app import ConfigRecord, Context

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.frame import note  # noqa: E402
from fedbn_flwr import BNClient, LocalGrid, build_model, client_app  # noqa: E402
from fedbn_flwr.experiment.metered import MeteredGrid  # noqa: E402
from fedbn_flwr.messages.arrays import pack  # noqa: E402
from fedbn_flwr.models.tensors import initial_arrays  # noqa: E402
from fedbn_flwr.strategies import FedAvg, Rule, Secure  # noqa: E402
from tests.support.network import Deployment  # noqa: E402

# --- bytes and processor time, on the local engine ---


def local() -> None:
    torch.set_num_threads(1)
    cases = [("resnet20", n) for n in (3, 5, 10, 20, 50)] + [("resnet18", n) for n in (3, 10)]
    for model, clients in cases:
        for secure in (False, True):
            note(
                "secure/local.jsonl",
                model=model,
                clients=clients,
                rule="FedAvg",
                secure=secure,
                **measure(model, clients, secure),
            )


def measure(name: str, clients: int, secure: bool) -> dict[str, Any]:
    model = build_model(name, 10)
    batch = [(torch.randn(2, 3, 32, 32), torch.arange(2))]

    def make_client(context: Context) -> BNClient:
        return BNClient(copy.deepcopy(model), batch, lr=0.01, steps=1, context=context)

    base = FedAvg(fraction_evaluate=0.0)
    rule: Rule = Secure(base) if secure else base
    grid = MeteredGrid(LocalGrid(client_app(make_client), clients, threads=1))
    arrays = pack(initial_arrays(model))
    rule.begin(3, arrays)
    seconds, traffic = [], grid.take()
    for number in (1, 2, 3):
        began = time.process_time()
        messages = list(rule.configure_train(number, arrays, ConfigRecord(), grid))
        rule.aggregate_train(number, grid.send_and_receive(messages))
        seconds.append(time.process_time() - began)
        traffic = grid.take()
    return {
        "communication_rounds": traffic.communication_rounds,
        "bytes_up_per_client": traffic.bytes_up // clients,
        "bytes_down_per_client": traffic.bytes_down // clients,
        "processor_seconds": round(statistics.median(seconds), 3),  # of a round, of the server and all clients
    }


# --- seconds on real nodes ---

RUNS = {
    "FedAvg": {"strategy": {"name": "FedAvg"}},
    "Secure": {"strategy": {"name": "Secure", "base": {"name": "FedAvg"}}},
}


def nodes() -> None:
    with tempfile.TemporaryDirectory() as folder, Deployment(Path(folder)) as deployment:
        for label, run in RUNS.items():
            settings = {
                "rounds": 2,
                "clients": 3,
                "data": {"name": "digits", "partition": {"kind": "iid"}},
                "model": {"name": "cnn", "norm": "bn"},
                "train": {"lr": 0.02, "batch_size": 32, "steps": 1},
                "evaluate": {"every": 1000},
                "engine": {"device": "cpu"},
                "runs": {label: run},
            }
            done = deployment.run_app({"experiment": json.dumps(settings)}, seconds=900)
            rounds = [json.loads(line) for line in (done / "history.jsonl").read_text().splitlines()]
            note(
                "secure/nodes.jsonl",
                nodes=3,
                run=label,
                communication_rounds=rounds[-1]["communication_rounds"],
                seconds=[round(line["seconds"], 1) for line in rounds],
                loss=rounds[-1]["train_loss"],
            )


if __name__ == "__main__":
    logging.getLogger("flwr").setLevel(logging.ERROR)
    {"local": local, "nodes": nodes}[sys.argv[1]]()
