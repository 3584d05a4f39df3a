"""The size `smoke`: changes that make any experiment run in seconds, on random images in the form of its data set.

It shows that an experiment works from end to end; its figures mean nothing.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

from fedbn_flwr.data.catalogue import CATALOGUE
from fedbn_flwr.data.random_images import has_form
from fedbn_flwr.named import is_name

from .settings import Data, Settings

ROUNDS, STEPS, BATCH = 2, 2, 4
CLIENTS = 10  # at most, unless the partition needs more
IMAGES = 8  # of a client
_SIDE = 32  # pixels
_LARGER = {"alexnet": 64, "alexnet_bn": 64}  # networks that need larger images
_ROUND_ARGUMENTS = ("freeze_round", "fedtan_rounds")
_NODE_ARGUMENTS = ("min_train_nodes", "min_evaluate_nodes", "min_available_nodes")


def smoke(run: Settings) -> dict[str, Any]:
    """The changes to a run."""
    clients, partition = _clients_and_partition(run)
    images, partition_changes = _images(run, clients, partition)
    data: dict[str, Any] = {"images": images, "test_images": max(_classes(run.data), 2 * clients)}
    if partition_changes:
        data["partition"] = partition_changes
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


def _clients_and_partition(run: Settings) -> tuple[int, dict[str, Any]]:
    """The number of clients for which the partition is still valid, and the options of the partition."""
    options = run.data.partition.model_dump()
    few = min(run.clients, CLIENTS)
    match options["kind"]:
        case "classes":  # together the clients need all classes
            classes, of_client = _classes(run.data), options["classes_per_client"]
            needed = math.ceil(classes / of_client) if options["assignment"] == "consecutive" else classes
            few = min(run.clients, max(few, needed))
        case "domain" if run.clients > few:
            entry = CATALOGUE.get(run.data.name)
            domains = len(run.data.domains) or (len(entry.domains) if entry is not None else run.clients)
            each = max(1, CLIENTS // domains)
            few, options["clients_per_domain"] = domains * each, each
        case "natural":  # random images have no such column
            options = {"kind": "iid"}
        case kind if is_name(kind):
            few = run.clients
    return few, options


def _images(run: Settings, clients: int, partition: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """The number of training images, and what differs from the partition of the run."""
    count = IMAGES * clients
    match partition["kind"]:
        case "classes":
            classes = _classes(run.data)
            of_class = math.ceil(clients * partition["classes_per_client"] / classes)  # clients that have a class
            count = max(count, 2 * of_class * classes)
        case "shards":
            shards = partition["shards_per_client"]
            count = clients * shards * max(1, IMAGES // shards)
        case "unbalanced_shards":
            partition["shard_size"] = 2
            count = clients * (partition["min_shards"] + partition["max_shards"])
        case "domain":
            partition["images"] = None
        case "dirichlet":  # few images in very unequal shares would leave clients without any
            partition["alpha"] = max(partition["alpha"], 0.5)
            partition["min_size"] = min(partition["min_size"], 2)
            count *= 4
    before = run.data.partition.model_dump()
    return count, partition if partition != before else {}


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
    from fedbn_flwr.strategies import STRATEGIES, describe

    if spec["name"] in STRATEGIES and any(each.name == "min_batch" for each in describe(spec["name"]).arguments):
        changes["min_batch"] = 1  # the statistics of a small batch reveal no image of anyone
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
