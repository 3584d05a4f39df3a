"""Builds the networks of a run folder with their trained weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedbn_flwr import seeding
from fedbn_flwr.batch import Value
from fedbn_flwr.client.node_state import OWN, NodeState
from fedbn_flwr.data.batches import Normaliser
from fedbn_flwr.data.examples import main
from fedbn_flwr.errors import UserError
from fedbn_flwr.messages.arrays import arrays_in, unpack
from fedbn_flwr.models.build import build_model
from fedbn_flwr.named import in_a_line
from fedbn_flwr.norms.roles import Role, roles

from ..folder import RunFolder
from ..folder.files import damaged


def global_model(folder: RunFolder, file: str) -> nn.Module:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    description = folder.model_description()
    if not description["global"]:
        raise UserError(
            f"{str(folder.path)!r} has no global model, but each client has one, for instance model(client=0)"
        )
    path = folder.path / file
    if not path.is_file():
        files = ", ".join(sorted(each.name for each in folder.path.glob("*.safetensors"))) or "none yet"
        raise UserError(f"{str(folder.path)!r} has no {file!r}; files with models: {files}")
    try:
        return _build(description, load_file(path), path)
    except (SafetensorError, OSError) as error:
        raise damaged(path, f"it cannot be read: {error}") from None


def personal_model(folder: RunFolder, client: int) -> nn.Module:
    """The model of a client: the global arrays of the last checkpoint, and the arrays that the client keeps."""
    description = folder.model_description()
    saved = folder.checkpoint.clients() if folder.checkpoint.path.exists() else ()
    states = [state for _, state in sorted(saved, key=lambda pair: pair[0])]
    if not states:
        raise UserError(
            f"{str(folder.path)!r} has no clients' models in a checkpoint: it has none yet, or the nodes store them"
        )
    if not 0 <= client < len(states):  # the local engine numbers its nodes by their partitions
        raise UserError(f"there is no client {client}; the run has the clients 0 to {len(states) - 1}")
    own = NodeState(states[client]).load(OWN)
    arrays = {**unpack(arrays_in(folder.checkpoint.read().model)["arrays"]), **own}
    tensors = {key: torch.from_numpy(value.copy()) for key, value in arrays.items()}
    model = _build(description, tensors, folder.checkpoint.path)
    kinds = roles(model)
    if all(kinds[key] is Role.COUNTER for key in own):
        raise UserError(f"client {client} has no model of its own: it keeps no arrays, or it never trained")
    return model


def normalisation(folder: RunFolder) -> Callable[[Value], Value]:
    moments = folder.moments()
    return lambda inputs: Normaliser(moments, main(inputs).device)(inputs)


def _build(description: Mapping[str, Any], state: Mapping[str, Tensor], file: Path) -> nn.Module:
    build = description["build"].items()
    arguments: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in build}
    with seeding.streams(0):  # building draws weights, which must not change the caller's draws
        model = build_model(**arguments)
    kinds = roles(model)
    counters = {key: value for key, value in model.state_dict().items() if kinds[key] is Role.COUNTER}  # never sent
    try:
        model.load_state_dict(counters | dict(state))
    except RuntimeError as error:
        raise damaged(file, f"it does not fit the network of model.json ({in_a_line(error)})") from None
    model.eval()
    return model
