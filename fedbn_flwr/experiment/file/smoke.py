"""The size `smoke`: changes that make any experiment run in seconds, on random examples in the form of its data set.

Each client has a few of them, by chance (partition iid). It shows that an experiment works from end to end; its figures
mean nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from fedbn_flwr.data.catalogue import CATALOGUE
from fedbn_flwr.data.random_images import has_form
from fedbn_flwr.named import is_name

from ..settings import Data, Settings

ROUNDS, STEPS, BATCH = 2, 2, 4
CLIENTS = 10  # at most
EXAMPLES = 8  # of a client
_SIDE = 32  # pixels
_LARGER = {"alexnet": 64, "alexnet_bn": 64}  # networks that need larger images
_ROUND_ARGUMENTS = ("freeze_round", "fedtan_rounds")
_NODE_ARGUMENTS = ("min_train_nodes", "min_evaluate_nodes", "min_available_nodes")


def smoke(run: Settings, *, keep_partition: bool) -> dict[str, Any]:
    """The changes to a run."""
    own = is_name(run.data.partition.kind)  # which may need all clients
    clients = run.clients if own else min(run.clients, CLIENTS)
    data: dict[str, Any] = {"examples": EXAMPLES * clients, "test_examples": max(_classes(run.data), 2 * clients)}
    if not own and not keep_partition:  # others need some number of examples of each class, domain or shard
        data["partition"] = {"kind": "iid"}
    changes: dict[str, Any] = {
        "rounds": ROUNDS,
        "clients": clients,
        "data": data,
        "train": _training(run),
        "evaluate": {"every": 1},
        "track": [],
        "model": {"weights": None, "brn": {"warmup": 0}},
    }
    if has_form(run.data.name, run.data.classes, run.data.channels, run.data.size):
        data["random"] = True
    if not is_name(run.model.name):
        _shrink(run, data, changes["model"])
    if run.evaluate.unseen:
        changes["evaluate"]["unseen"] = min(max(1, run.evaluate.unseen * clients // run.clients), clients - 1)
    if strategy := _strategy(run.strategy, run.rounds, clients - changes["evaluate"].get("unseen", 0)):
        changes["strategy"] = strategy
    return changes


def _classes(data: Data) -> int:
    entry = CATALOGUE.get(data.name)
    return data.classes or (entry.classes if entry is not None else 10)


def _training(run: Settings) -> dict[str, Any]:
    train = run.train
    changes: dict[str, Any] = {"batch_size": min(train.batch_size, BATCH), "compile": False}
    changes |= {"epochs": 1} if train.steps is None else {"steps": min(train.steps, STEPS)}
    schedule: dict[str, Any] = {"warmup": min(train.schedule.warmup, ROUNDS - 1)}
    if any(each > 1 for each in train.schedule.milestones):
        schedule["milestones"] = [
            each if each <= 1 else min(each / run.rounds, 1.0) for each in train.schedule.milestones
        ]
    return {**changes, "schedule": schedule}


def _strategy(spec: Mapping[str, Any], rounds: int, clients: int) -> dict[str, Any]:
    """The arguments that would not suit fewer rounds or clients."""
    changes: dict[str, Any] = {}
    for key in _ROUND_ARGUMENTS:
        value = spec.get(key)
        if isinstance(value, int) and value > 0:
            changes[key] = min(max(1, value * ROUNDS // rounds), ROUNDS)
        elif isinstance(value, float) and 0 < value * ROUNDS < 1:  # a fraction of the rounds: at least one
            changes[key] = 1 / ROUNDS
    for key in _NODE_ARGUMENTS:
        if isinstance(value := spec.get(key), int) and value > clients:
            changes[key] = clients
    for key in ("fraction_train", "fraction_evaluate"):
        if isinstance(value := spec.get(key), float | int) and 0 < value * clients < 2 <= clients:
            changes[key] = 2 / clients
    from fedbn_flwr.experiment.registry import STRATEGIES, describe

    if spec["name"] in STRATEGIES and any(each.name == "min_batch" for each in describe(spec["name"]).arguments):
        changes["min_batch"] = 1  # the statistics of a small batch reveal no example of anyone
    if isinstance(base := spec.get("base"), Mapping) and (inner := _strategy(base, rounds, clients)):
        changes["base"] = inner
    return changes


def _shrink(run: Settings, data: dict[str, Any], model: dict[str, Any]) -> None:
    """Smaller images, on which the network keeps the first layers that it has on the large ones."""
    from fedbn_flwr.models.build import MODELS

    entry = CATALOGUE.get(run.data.name)
    if (crop := run.data.crop or (entry.crop if entry is not None else None)) is not None:
        data |= {"size": 2 * _SIDE, "crop": min(crop, _SIDE)}
        return
    size = run.data.size or (entry.size if entry is not None else None)
    longest = max(size) if isinstance(size, tuple) else size
    side = _LARGER.get(run.model.name, _SIDE)
    if longest is None or longest <= side:
        return
    data["size"] = side
    takes_stem = run.model.name in MODELS and "stem" in inspect.signature(MODELS[run.model.name]).parameters
    if takes_stem and run.model.stem == "auto" and longest > 64:
        model["stem"] = "large"
