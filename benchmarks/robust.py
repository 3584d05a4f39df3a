"""Accuracy with 0, 1 and 2 malicious clients of ten, with and without the bounds and means of docs/robustness.md.

    python benchmarks/robust.py digits cifar10

Appends a line for each run to docs/results/robust/runs.jsonl, and doesn't repeat those that are there. tools/tables.py
writes the tables of the page. cifar10 are the first 5,000 training and 1,000 test images of CIFAR-10 in $FEDBN_DATA,
reduced to 16x16 pixels; digits-2 are the digits with two classes on each client.

The malicious clients are those of the partitions 0 and 1. They train honestly and then change what they send:

- scaled: the update of weights, gamma and beta times 1000,
- flipped: this update times -1,
- noise: weights, gamma and beta plus Gaussian noise of standard deviation 1,
- statistics: running means, and the means in FedTAN's exchanges, plus 1000; variances times a million.

In FedTAN's exchanges, scaled and flipped change the gradients likewise, and noise is added to them.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as parquet
from flwr.app import Context, Message, RecordDict
from frame import note, pending

from fedbn_flwr import LocalGrid, client_app, seeding
from fedbn_flwr.errors import FedbnError
from fedbn_flwr.experiment.node import make_client
from fedbn_flwr.experiment.run.launch import serve
from fedbn_flwr.messages.arrays import arrays_in, config_of, pack, unpack
from fedbn_flwr.norms.roles import Role, roles

FILE = "robust/runs.jsonl"
Arrays = dict[str, np.ndarray]

COMMON: dict[str, Any] = {"clients": 10, "engine": {"device": "cpu", "workers": 0, "threads": 1}}
SETS: dict[str, dict[str, Any]] = {
    "digits": {
        "rounds": 40,
        "data": {"name": "digits", "partition": {"kind": "dirichlet", "alpha": 1.0}},
        "model": {"name": "mlp", "norm": "bn"},
        "train": {"lr": 0.1, "batch_size": 32, "steps": 5},
        "evaluate": {"every": 40},
    },
    "cifar10": {
        "rounds": 30,
        "data": {"name": "cifar10", "size": 16, "partition": {"kind": "dirichlet", "alpha": 1.0}, "augment": []},
        "model": {"name": "cnn", "norm": "bn"},
        "train": {"lr": 0.05, "batch_size": 32, "steps": 5},
        "evaluate": {"every": 30},
    },
}
SETS["digits-2"] = SETS["digits"] | {
    "data": {"name": "digits", "partition": {"kind": "classes", "classes_per_client": 2}}
}
RULES: dict[str, dict[str, Any]] = {
    "FedAvg": {"name": "FedAvg"},
    "FixBN": {"name": "FixBN", "freeze_round": 0.5},
    "FedTAN": {"name": "FedTAN"},
}
OPTIONS: dict[str, dict[str, Any]] = {  # of FedAvg and FedTAN, or a strategy in place of FedAvg
    "off": {},
    "bounds": {"bounds": {"clip_factor": 2.0, "plausible": 10.0, "max_share": 0.2}},
    "trimmed": {"name": "FedTrimmedAvg", "beta": 0.2},
    "krum": {"name": "MultiKrum", "num_malicious_nodes": 2, "num_nodes_to_select": 8},
    "median": {"name": "FedMedian"},
}
# One malicious client of ten too; the other combinations have none or two.
ONE_TOO = {(name, options) for name in ("digits", "cifar10") for options in ("off", "trimmed", "bounds")}
ONLY = {"cifar10": ("off", "trimmed", "bounds")}  # the options
ATTACKED = {"digits-2": ("statistics", "flipped")}
ATTACKS = ("scaled", "statistics", "flipped", "noise")


class Attack:
    """A mod of the malicious clients."""

    def __init__(self, kind: str, clients: int) -> None:
        self.kind = kind
        self.clients = clients
        self.models: dict[int, Arrays] = {}  # the model of the round, by node: exchanges come between it and the reply

    def __call__(self, message: Message, context: Context, call_next: Callable[[Message, Context], Message]) -> Message:
        partition = int(context.node_config["partition-id"])
        for record in arrays_in(message.content).values():
            if Role.STATISTICS in roles(record).values():
                self.models[partition] = dict(unpack(record))
        reply = call_next(message, context)
        if partition >= self.clients or reply.has_error() or not arrays_in(reply.content):
            return reply
        arrays = dict(unpack(reply.content["arrays"]))
        config = config_of(reply.content)
        number = config_of(message.content).get("server-round", 0)
        random = np.random.default_rng(seeding.seed_for(0, "attack", int(number), partition))  # type: ignore[call-overload]
        kind = config.get("what")
        changed = self.model(arrays, partition, random) if kind is None else self.exchange(arrays, str(kind), random)
        return Message(RecordDict({**reply.content, "arrays": pack(changed)}), reply_to=message)

    def model(self, arrays: Arrays, partition: int, random: np.random.Generator) -> Arrays:
        role_of, sent = roles(arrays), self.models[partition]
        for key, value in arrays.items():
            if role_of[key] is Role.STATISTICS:
                arrays[key] = self.statistic(value, key.endswith("running_var"))
            elif role_of[key] is not Role.COUNTER:
                arrays[key] = self.update(value, sent[key], random)
        return arrays

    def exchange(self, arrays: Arrays, kind: str, random: np.random.Generator) -> Arrays:
        if kind == "gradients":
            return {key: self.update(value, np.zeros_like(value), random) for key, value in arrays.items()}
        return {key: self.statistic(value, key == "var") for key, value in arrays.items()}

    def statistic(self, value: np.ndarray, is_variance: bool) -> np.ndarray:
        if self.kind != "statistics":
            return value
        return value * np.float32(1e6) if is_variance else value + np.float32(1000)

    def update(self, value: np.ndarray, sent: np.ndarray, random: np.random.Generator) -> np.ndarray:
        match self.kind:
            case "scaled":
                return sent + np.float32(1000) * (value - sent)
            case "flipped":
                return sent - (value - sent)
            case "noise":
                return value + random.standard_normal(value.shape).astype(value.dtype)
            case _:
                return value


def cases(name: str) -> Iterator[dict[str, Any]]:
    for options in ONLY.get(name, OPTIONS):
        for rule in [rule for rule in RULES if rule != "FedTAN" or "name" not in OPTIONS[options]]:
            yield {"set": name, "rule": rule, "options": options, "attack": None, "malicious": 0}
            for attack in ATTACKED.get(name, ATTACKS):
                for malicious in (2, 1) if (name, options) in ONE_TOO else (2,):
                    yield {"set": name, "rule": rule, "options": options, "attack": attack, "malicious": malicious}


def measured(case: Mapping[str, Any]) -> dict[str, Any]:
    strategy = dict(RULES[case["rule"]])
    options = OPTIONS[case["options"]]
    strategy |= {"base": {"name": "FedAvg", **options}} if case["rule"] == "FixBN" else options
    mods = [Attack(case["attack"], case["malicious"])] if case["malicious"] else []
    settings = {**COMMON, **SETS[case["set"]], "strategy": strategy}
    with tempfile.TemporaryDirectory() as folder:
        if case["set"] == "cifar10":
            settings["data"] = settings["data"] | {"root": part_of_cifar10().name}
        try:
            run_config = {"experiment": json.dumps(settings), "out": f"{folder}/run"}
            with (
                redirect_stdout(sys.stderr),
                LocalGrid(client_app(make_client, mods=mods), settings["clients"], run_config=run_config) as grid,
            ):
                serve(grid, run_config)
            (file,) = Path(folder).rglob("summary.json")
            accuracy = json.loads(file.read_text())["accuracy"]
        except FedbnError as error:
            return {**case, "accuracy": None, "failed": str(error).split(":")[0]}
    return {**case, "accuracy": accuracy}


@functools.cache  # the folder is removed when the process ends
def part_of_cifar10() -> tempfile.TemporaryDirectory[str]:
    folder = tempfile.TemporaryDirectory()
    (Path(folder.name) / "cifar10").mkdir()
    for split, count in (("train", 5000), ("test", 1000)):
        table = parquet.read_table(Path(os.environ["FEDBN_DATA"]) / "cifar10" / f"{split}.parquet")
        parquet.write_table(table.slice(0, count), Path(folder.name) / "cifar10" / f"{split}.parquet")
    return folder


if __name__ == "__main__":
    for each in pending(FILE, itertools.chain(*map(cases, sys.argv[1:]))):
        note(FILE, **measured(each))
