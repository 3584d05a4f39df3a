"""The size `smoke`: changes that make any experiment run in seconds, on random examples in the form of its data set.

Each client has a few of them, by chance (partition iid). It shows that an experiment works from end to end; its figures
mean nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedbn_flwr.data.catalogue import CATALOGUE
from fedbn_flwr.data.load import has_form
from fedbn_flwr.named import is_name

from ..registry import STRATEGIES, arguments
from ..settings import MILESTONES, Settings

ROUNDS, STEPS, BATCH = 2, 2, 4
CLIENTS = 10  # at most
EXAMPLES = 8  # of a client
_SIDE = 32  # pixels
_LARGER = {"alexnet": 64, "alexnet_bn": 64}  # networks that need larger images


def smoke(run: Settings, *, keep_partition: bool) -> dict[str, Any]:
    """The changes to a run."""
    own = is_name(run.data.partition.kind)  # which may need all clients
    clients = run.clients if own else min(run.clients, CLIENTS)
    entry = CATALOGUE.get(run.data.name)
    classes = run.data.classes or (entry.classes if entry is not None else 10)
    length = {"epochs": 1} if run.train.steps is None else {"steps": min(run.train.steps, STEPS)}
    data: dict[str, Any] = {"examples": EXAMPLES * clients, "test_examples": max(classes, 2 * clients)}
    if not own and not keep_partition:  # others need some number of examples of each class, domain or shard
        data["partition"] = {"kind": "iid"}
    if has_form(run.data.name, run.data.classes, run.data.channels, run.data.size):
        data["random"] = True
    return {
        "rounds": ROUNDS,
        "clients": clients,
        "data": data if is_name(run.model.name) else data | _smaller_images(run),
        "train": {
            **length,
            "batch_size": min(run.train.batch_size, BATCH),
            "compile": False,
            "schedule": {"milestones": list(MILESTONES)},
        },
        "evaluate": {"every": 1},
        "track": [],
        "model": {"weights": None, "brn": {"warmup": 0}},
        "strategy": _strategy(run.strategy, clients),
    }


def _strategy(spec: Mapping[str, Any], clients: int) -> dict[str, Any]:
    """The arguments that would not suit fewer rounds, clients or examples."""
    changes: dict[str, Any] = {"name": spec["name"]}
    for key, value in spec.items():
        if isinstance(value, int | float) and value > 0:
            if key in ("freeze_round", "fedtan_rounds"):
                changes[key] = 1
            elif key in ("min_train_nodes", "min_evaluate_nodes", "min_available_nodes"):
                changes[key] = min(value, clients)
            elif key in ("fraction_train", "fraction_evaluate"):
                changes[key] = max(value, min(1.0, 2 / clients))
    if spec["name"] in STRATEGIES and "min_batch" in arguments(STRATEGIES[spec["name"]]):
        changes["min_batch"] = 1  # the statistics of a small batch reveal no example of anyone
    if isinstance(base := spec.get("base"), Mapping):
        changes["base"] = _strategy(base, clients)
    return changes


def _smaller_images(run: Settings) -> dict[str, Any]:
    data, side = run.data, _LARGER.get(run.model.name, _SIDE)
    if data.crop is not None:
        return {"size": 2 * side, "crop": min(data.crop, side)}
    longest = max(data.size) if isinstance(data.size, tuple) else data.size or 0
    return {"size": side} if longest > side else {}
