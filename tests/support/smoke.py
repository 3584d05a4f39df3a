"""Shipped experiments in seconds: the first run of each row, two rounds, random examples of the form of its data."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from fedbn_flwr.data.catalogue import CATALOGUE
from fedbn_flwr.experiment.file.layers import load_experiment, parse_overrides, read_experiment
from fedbn_flwr.experiment.registry import STRATEGIES, arguments, class_of
from fedbn_flwr.experiment.settings import Experiment, Settings
from fedbn_flwr.named import is_name

ROUNDS, STEPS, BATCH = 2, 2, 4
CLIENTS = 5  # at most
EXAMPLES = 8  # of a client
SIDE = 32  # pixels
LARGER = {"alexnet": 64, "alexnet_bn": 64}  # networks that need larger images


def smoke_runs(name: str) -> Iterator[Experiment]:
    first = {run.cell.row: run for run in reversed(load_experiment(name).runs)}
    for run in reversed(first.values()):
        words = [f"{key}={json.dumps(value)}" for key, value in changes(run).items()]
        yield read_experiment(run.model_dump(mode="json"), parse_overrides(words), name=name)


def changes(run: Settings) -> dict[str, Any]:
    entry = CATALOGUE[run.data.name]
    # A partition of embedded data may have a client for each person.
    clients = run.clients if entry.embedded and run.data.group else min(run.clients, CLIENTS)
    of_images = {
        # Other partitions need some number of examples of each class, domain or shard.
        "data.partition": {"kind": "iid"},
        "data.group": None,
        "data.examples": EXAMPLES * clients,
        "data.test_examples": max(entry.classes, 2 * clients),
        "data.random": True,
    }
    found = {
        **({} if entry.embedded else of_images),
        "rounds": ROUNDS,
        "clients": clients,
        "train.lr": 0.001,  # with statistics frozen after a few steps, larger ones diverge
        "train.batch_size": min(run.train.batch_size, BATCH),
        "train.schedule.milestones": [0.5, 0.75],
        "evaluate.every": 1,
        "model.weights": None,
        "model.brn.warmup": 0,
        "strategy": strategy(run.strategy, clients),
        "engine": {"workers": 0, "device": "cpu"},
    }
    found |= {"train.epochs": 1} if run.train.steps is None else {"train.steps": min(run.train.steps, STEPS)}
    return found if is_name(run.model.name) else found | smaller_images(run)


def strategy(spec: Mapping[str, Any], clients: int) -> dict[str, Any]:
    """The arguments that would not suit fewer rounds, clients or examples."""
    found: dict[str, Any] = {"name": spec["name"]}
    for key, value in spec.items():
        if isinstance(value, int | float) and value > 0:
            if key in ("freeze_round", "fedtan_rounds"):
                found[key] = 1
            elif key in ("min_train_nodes", "min_evaluate_nodes", "min_available_nodes"):
                found[key] = min(value, clients)
            elif key in ("fraction_train", "fraction_evaluate"):
                found[key] = max(value, min(1.0, 2 / clients))
    if spec["name"] in STRATEGIES and "min_batch" in arguments(class_of(spec["name"])):
        found["min_batch"] = 1  # the statistics of a small batch reveal no example of anyone
    if isinstance(base := spec.get("base"), Mapping):
        found["base"] = strategy(base, clients)
    return found


def smaller_images(run: Settings) -> dict[str, Any]:
    data, side = run.data, LARGER.get(run.model.name, SIDE)
    if data.crop is not None:
        return {"data.size": 2 * side, "data.crop": min(data.crop, side)}
    longest = max(data.size) if isinstance(data.size, tuple) else data.size or 0
    return {"data.size": side} if longest > side else {}
