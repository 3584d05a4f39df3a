"""Federated averaging with fedjax, its networks in Haiku; fedjax has no batch norm."""

from __future__ import annotations

import os
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"

import fedjax
import haiku as hk
import jax
import numpy as np
from fedjax.algorithms import fed_avg

from .task import BATCH, CLASSES, RATE, Array, Task


def forward(batch: dict[str, Any]) -> Any:
    x = batch["x"]
    if x.ndim == 2:
        for number, outputs in ((1, 64), (2, 32)):
            x = jax.nn.relu(hk.Linear(outputs, name=f"hidden{number}")(x))
    else:  # [N, height, width, channels]
        for number, outputs in ((1, 32), (2, 64)):
            x = jax.nn.relu(hk.Conv2D(outputs, 3, name=f"conv{number}")(x))
            x = hk.max_pool(x, (2, 2, 1), (2, 2, 1), "VALID")
        x = x.transpose(0, 3, 1, 2).reshape(len(x), -1)  # in PyTorch's order
    return hk.Linear(CLASSES, name="classify")(x)


def to_haiku(values: dict[str, Array]) -> dict[str, dict[str, Array]]:
    layers: dict[str, dict[str, Array]] = {}
    for name, value in values.items():
        layer, _, kind = name.partition(".")
        of_layer = layers.setdefault(layer, {})
        if kind == "bias":
            of_layer["b"] = value
        else:
            of_layer["w"] = value.T if value.ndim == 2 else value.transpose(2, 3, 1, 0)
    return layers


def from_haiku(layers: dict[str, dict[str, Array]]) -> dict[str, Array]:
    values: dict[str, Array] = {}
    for layer, of_layer in layers.items():
        weight = np.asarray(of_layer["w"])
        values[f"{layer}.weight"] = weight.T if weight.ndim == 2 else weight.transpose(3, 2, 0, 1)
        values[f"{layer}.bias"] = np.asarray(of_layer["b"])
    return values


task = Task()
inputs = task.inputs if task.inputs.ndim == 3 else np.ascontiguousarray(task.inputs.transpose(0, 1, 3, 4, 2))
clients = [
    (client, fedjax.ClientDataset({"x": x, "y": y}), jax.random.PRNGKey(client))
    for client, (x, y) in enumerate(zip(inputs, task.targets, strict=True))
]
model = fedjax.create_model_from_haiku(
    hk.transform(forward),
    {"x": inputs[0, :1], "y": task.targets[0, :1]},
    lambda batch, outputs: fedjax.metrics.unreduced_cross_entropy_loss(batch["y"], outputs),
)
algorithm = fed_avg.federated_averaging(
    fedjax.model_grad(model),
    fedjax.optimizers.sgd(RATE),
    fedjax.optimizers.sgd(1.0),
    fedjax.ShuffleRepeatBatchHParams(batch_size=BATCH, num_epochs=1, skip_shuffle=True),
)
state = algorithm.init(to_haiku(task.initial))


def one_round() -> None:
    global state
    state, _ = algorithm.apply(state, clients)
    jax.block_until_ready(state.params)


task.serve(one_round, lambda: from_haiku(state.params), "fedjax", "jax")
