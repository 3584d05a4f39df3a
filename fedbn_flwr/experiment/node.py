"""Makes the client of a node from the settings: its data, its model and its training."""

from __future__ import annotations

import difflib
import functools
import threading
import weakref
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from flwr.app import Context
from torch import Tensor, nn

from fedbn_flwr import named
from fedbn_flwr.client.client import BNClient, is_known
from fedbn_flwr.client.model_tensors import ModelTensors
from fedbn_flwr.data.batches import TestBatches
from fedbn_flwr.data.dataset import DataSet
from fedbn_flwr.data.partition.indices import hold_out
from fedbn_flwr.data.partition.kinds import KINDS
from fedbn_flwr.errors import SettingsError, did_you_mean
from fedbn_flwr.messages import protocol
from fedbn_flwr.named import is_name

from .data import (
    LoadedData,
    check_labels,
    client_batches,
    load_data,
    normalisation_of,
    own_test,
    partition_of,
    rows_by_domain,
)
from .find import from_run_config
from .model import choose_device, make_model
from .settings import Experiment, Settings
from .training import learning_rate, loss_of, metrics_of, plain_loss

NODE_KEYS = ("partition-id", "num-partitions", "data-path", "domain", "state", "min-batch")


def make_client(context: Context, config: Mapping[str, Any]) -> BNClient:
    """The client of a node, for the experiment in its run config."""
    return client_of(from_run_config(context.run_config), context, config)


@dataclass(frozen=True)
class Clients:
    """Makes the clients of an experiment. A process that unpickles it has the `examples` without loading them."""

    experiment: Experiment
    examples: LoadedData | None = None

    def __call__(self, context: Context, config: Mapping[str, Any]) -> BNClient:
        return client_of(self.experiment, context, config)


def client_of(experiment: Experiment, context: Context, config: Mapping[str, Any]) -> BNClient:
    """The client of a node, for the run that the message's `config` names, else the first one."""
    run = run_of(experiment, config)
    _import_rule(run, config)
    torch.set_num_threads(run.engine.threads)
    device = choose_device(run.engine.device)
    node = context.node_config
    check_node_keys(node)
    client = number_of(context, run.clients)
    dataset, indices, own = data_of(run, node, client, str(device))
    indices, held = hold_out(indices, run.evaluate.validation if trains(run, client) else 0.0, run.seed, client)
    pool, tensors = _model_of(run, dataset, device)
    made = BNClient(
        tensors,
        client_batches(run, dataset, indices, client),
        functools.partial(_tests_of, run, dataset, own, held),
        lr=functools.partial(learning_rate, run),
        epochs=run.train.epochs,
        steps=run.train.steps,
        optimizer=run.train.optimizer,
        momentum=run.train.momentum,
        weight_decay=run.train.weight_decay,
        norm_weight_decay=run.train.norm_weight_decay,
        bias_weight_decay=run.train.bias_weight_decay,
        keep_momentum=run.train.keep_momentum,
        clip=run.train.clip,
        loss=loss_of(run, dataset, indices),
        task=dataset.task,
        eval_loss=plain_loss(run, dataset.task),
        metrics=metrics_of(run),
        channels_last=run.train.channels_last,
        precision=torch.bfloat16 if run.train.precision == "bfloat16" else None,
        compile=run.train.compile,
        seed=run.seed,
        min_batch=min_batch_of(node),
        share_personal=run.evaluate.matrix,
        device=device,
        context=context,
    )
    if not _is_own(run):
        pool.lend(tensors, made)
    return made


def _import_rule(run: Settings, config: Mapping[str, Any]) -> None:
    """Import the user's strategy if a message has keys of an unknown rule: its module imports the client's half."""
    if not all(map(is_known, config)):
        spec: Any = run.strategy
        while isinstance(spec, Mapping):
            if is_name(name := str(spec["name"])):
                named.load("strategy.name", name)
            spec = spec.get("base")


def run_of(experiment: Experiment, config: Mapping[str, Any]) -> Settings:
    runs = experiment.named
    name = str(config.get(protocol.RUN, next(iter(runs))))
    if name not in runs:
        raise SettingsError(
            f"the server asks for the run {name!r}, but this client's experiment has the runs {list(runs)}"
        )
    return runs[name]


def check_node_keys(node: Mapping[str, Any]) -> None:
    """Refuse keys that resemble one of NODE_KEYS; other keys may belong to other apps on the node."""
    for key in node:
        if key not in NODE_KEYS and difflib.get_close_matches(key, NODE_KEYS):
            raise SettingsError(f"this node's config has the unknown key {key!r}; {did_you_mean(key, NODE_KEYS)}")


def min_batch_of(node: Mapping[str, Any]) -> int:
    """The node's own limit for exchanges of statistics; a site with its own data has one even if it sets none."""
    least = node.get("min-batch", protocol.MIN_BATCH if "data-path" in node else 1)
    if not isinstance(least, int) or isinstance(least, bool) or least < 1:
        raise SettingsError(f"this node's config has min-batch={least!r}; expected a number of examples, 1 or more")
    return least


def number_of(context: Context, clients: int) -> int:
    """The number of a node's client, from which its random draws are derived: its partition.

    A node with its own data needs no partition-id (the convention of Flower's hub); its number is then the node id.
    """
    node = context.node_config
    if "data-path" in node and "partition-id" not in node:
        return context.node_id
    client, partitions = node.get("partition-id"), node.get("num-partitions", clients)
    if type(client) is not int or partitions != clients or not 0 <= client < clients:
        found = f"has partition-id={client!r} and num-partitions={partitions!r}"
        if client is None:
            found = "has no partition-id"
        raise SettingsError(
            f"this node {found}, but the experiment has clients={clients}; set --node-config "
            f'"partition-id=... num-partitions={clients}", or "data-path=\'...\'" for a site with its own data'
        )
    return client


def data_of(run: Settings, node: Mapping[str, Any], client: int, device: str) -> tuple[DataSet, Tensor, Tensor]:
    """The data set of a client, and the indices of its training examples and of its own test examples."""
    if "data-path" not in node and "domain" not in node:
        dataset = load_data(run.data, device)
        indices = partition_of(run.data, run.clients, run.seed, device)[client]
        return dataset, indices, own_test(run.data, run.clients, run.seed, device)[client]
    # A site with its own data: the client trains on all of it.
    changes: dict[str, Any] = {"partition": KINDS["iid"].options()}
    changes["domains"] = (str(node["domain"]),) if "domain" in node else ()
    if "data-path" in node:
        changes |= {
            "name": str(node["data-path"]),
            "root": None,
            "examples": None,
            "test_examples": None,
            "random": False,
        }
    dataset = load_data(run.data.model_copy(update=changes), device)
    check_labels(run, dataset)
    return dataset, torch.arange(len(dataset.train)), torch.arange(len(dataset.test))


def _model_of(run: Settings, dataset: DataSet, device: torch.device) -> tuple[ModelPool, ModelTensors]:
    """A model with the initial values of the run, and the pool that it belongs to."""
    last = run.train.channels_last
    pool = _pool((run.model, run.seed, last, dataset.shape, dataset.tokens, dataset.outputs), str(device))
    if (tensors := pool.take()) is not None:
        return pool, tensors

    def build() -> nn.Module:
        model = make_model(run, dataset).to(device)
        if last:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return model

    if _is_own(run):
        return pool, ModelTensors(build())
    return pool, ModelTensors(build(), build=build)


def _is_own(run: Settings) -> bool:
    """Whether the model has modules of the user, which may have state outside of their state dict."""
    return is_name(run.model.name) or is_name(run.model.norm)


def trains(run: Settings, client: int) -> bool:
    return not run.evaluate.unseen or client < run.trained


def _tests_of(run: Settings, dataset: DataSet, own: Tensor, held: Tensor) -> dict[str, TestBatches]:
    """A client's test sets: all test examples, its own, its own of each domain, and the training examples held out."""
    normalisation = normalisation_of(run, dataset)
    test = functools.partial(TestBatches, dataset.test, normalisation, run.evaluate.batch_size)
    tests = {"": test(), protocol.OWN: test(own)} if len(own) else {"": test()}
    for domain, rows in rows_by_domain(dataset).items():
        if len(both := own[torch.isin(own, rows)]):
            tests[f"{protocol.OWN}@{domain}"] = test(both)
    if len(held):
        tests[protocol.VALIDATION] = TestBatches(dataset.train, normalisation, run.evaluate.batch_size, held)
    return tests


class ModelPool:
    """Models that clients use one after another, because building one can take longer than a round of training.

    A model is free again when the client that used it no longer exists.
    """

    def __init__(self) -> None:
        self._lent: list[tuple[ModelTensors, weakref.ref[BNClient]]] = []
        self._lock = threading.Lock()  # clients of a FedTAN round are made concurrently

    def take(self) -> ModelTensors | None:
        """A free model, or None."""
        with self._lock:
            free = next((entry for entry in self._lent if entry[1]() is None), None)
            if free is None:
                return None
            self._lent.remove(free)
        tensors = free[0]
        tensors.use.client = None  # the values stay until the next client loads its own or reads them
        return tensors

    def lend(self, tensors: ModelTensors, client: BNClient) -> None:
        """Record that `client` uses a model, which is new or was returned by `take`."""
        with self._lock:
            self._lent.append((tensors, weakref.ref(client)))


@functools.lru_cache(maxsize=1)  # the runs of a process follow one another, and each has its own model
def _pool(kind: Hashable, device: str) -> ModelPool:
    return ModelPool()
