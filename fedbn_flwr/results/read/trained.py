"""Builds the networks of a run folder with their trained weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from flwr.app import RecordDict
from torch import Tensor, nn

from fedbn_flwr import seeding
from fedbn_flwr.client.node_state import LOCAL_ARRAYS, NodeState
from fedbn_flwr.errors import FedbnError, UserError
from fedbn_flwr.messages.aggregate import Arrays
from fedbn_flwr.messages.arrays import arrays_in, unpack
from fedbn_flwr.messages.serialization import parse
from fedbn_flwr.models.build import build_model
from fedbn_flwr.named import in_a_line
from fedbn_flwr.norms.roles import Role, roles
from fedbn_flwr.storage import Rounds
from fedbn_flwr.trees import Draft

from ..folder.files import damaged, own
from ..folder.reader import RunReader


def global_model(folder: RunReader, file: str = "model.safetensors") -> nn.Module:
    if not folder.model_description().traits.has_global_model:
        raise UserError(
            f"{str(folder.path)!r} has no global model; each client has its own, for instance model(client=0)"
        )
    arrays, _ = _read(folder, file)
    return _build(folder, arrays, folder.path / file)


def _read(folder: RunReader, file: str) -> tuple[dict[str, Tensor], int]:
    """The arrays of a model in the folder, and the round after which it was written."""
    from safetensors import SafetensorError, safe_open

    path = own(folder.path / file)
    if not path.is_file():
        files = ", ".join(sorted(file.name for file in folder.path.glob("*.safetensors"))) or "none yet"
        raise UserError(f"{str(folder.path)!r} has no {file!r}; files with models: {files}")
    try:
        with safe_open(path, "pt") as opened:
            arrays = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118  # it isn't a mapping
            return arrays, int((opened.metadata() or {}).get("round", 0))
    except (SafetensorError, OSError, ValueError) as error:
        raise damaged(path, f"it cannot be read: {error}") from None


@dataclass(frozen=True)
class PersonalModel:
    client: int
    round: int  # of the global arrays
    state_round: int  # of the client's own arrays: the last round up to `round` in which it trained
    own: int  # the number of its own arrays
    network: nn.Module


def site_model(folder: RunReader, state: Path, client: int | None = None) -> PersonalModel:
    """The model of a site: the server's arrays, and those in the site's state folder."""
    arrays, server_round = _read(folder, "model.safetensors")
    number, state_round, records = latest_state(state.expanduser(), folder.token(), server_round, client)
    return _personal(folder, arrays, records, number, (server_round, state_round), folder.path / "model.safetensors")


def latest_state(folder: Path, token: str, last: int, client: int | None = None) -> tuple[int, int, RecordDict]:
    """The state with which a client evaluates round `last` of a run: the client, the state's round and its content.

    `folder` is the state folder of a site, which has one client unless several sites share it.
    """
    if not folder.is_dir():
        raise UserError(f"{str(folder)!r}: there is no such folder; give the one that the node config names as state")
    folders = {int(path.name.removeprefix("client-")): path for path in folder.glob(f"*-{token}/client-*")}
    if client is None and len(folders) == 1:
        client = next(iter(folders))
    if client is None or client not in folders:
        known = ", ".join(map(str, sorted(folders)))
        raise UserError(
            f"{str(folder)!r} has states of the clients {known}; give the number of one"
            if folders
            else f"{str(folder)!r} has no state of this run, which would be in a folder *-{token}; give the folder "
            "that the node config names as state, at a site that took part in this run; with a strategy that keeps "
            "nothing there, such as FedAvg, model.safetensors is the site's model"
        )
    states = Rounds(folders[client])
    if not (latest := states.latest(last)):
        raise UserError(f"{str(folders[client])!r} has no state of round {last} of the model or of an earlier one")
    return client, latest, parse(states.read(latest), RecordDict)


def personal_model(folder: RunReader, client: int) -> PersonalModel:
    """The model of a client: the server's arrays of the last checkpoint, and the arrays that the client keeps."""
    nodes = folder.checkpoint.nodes()
    if not nodes:
        raise UserError(
            f"{str(folder.path)!r} has no clients' models in a checkpoint: it has none yet, or the nodes store them. "
            "At a site with a state folder: fedbn model, or model(state='/srv/fedbn-state')"
        )
    if not 0 <= client < len(nodes):  # the local engine numbers its nodes by their partitions
        raise UserError(f"there is no client {client}; the run has the clients 0 to {len(nodes) - 1}")
    ((_, state),), read = folder.checkpoint.clients([nodes[client]]), folder.checkpoint.read()
    arrays, rounds = _tensors(unpack(arrays_in(read.model)["arrays"])), (read.round, read.trained.get(client, 0))
    return _personal(folder, arrays, state, client, rounds, folder.checkpoint.path)


def _personal(
    folder: RunReader,
    arrays: Mapping[str, Tensor],
    records: RecordDict,
    client: int,
    rounds: tuple[int, int],
    file: Path,
) -> PersonalModel:
    """The network with the client's own arrays."""
    kept = NodeState(records).load(LOCAL_ARRAYS)
    model = _build(folder, {**arrays, **_tensors(kept)}, file)
    kinds = roles(model)
    if not any(kinds[key] is not Role.COUNTER for key in kept):
        raise UserError(f"client {client} has no model of its own: it keeps no arrays, or it never trained")
    return PersonalModel(client, *rounds, sum(map(len, arrays_in(records).values())), model)


def _tensors(arrays: Arrays) -> dict[str, Tensor]:
    return {key: torch.from_numpy(value.copy()) for key, value in arrays.items()}


def _build(folder: RunReader, state: Mapping[str, Tensor], file: Path) -> nn.Module:
    """The network with this state; its outputs are as in training, where the targets may have other units."""
    arguments: Draft = folder.model_description().build.model_dump()
    try:
        with seeding.streams(0):  # building draws weights, which must not change the caller's draws
            model = build_model(**arguments)
    except FedbnError:
        raise
    except Exception as error:  # any that a network raises for arguments of another kind
        raise damaged(folder.path / "model.json", f"no network can be built from it ({in_a_line(error)})") from None
    kinds = roles(model)
    counters = {key: value for key, value in model.state_dict().items() if kinds[key] is Role.COUNTER}  # never sent
    try:
        model.load_state_dict(counters | dict(state))
    except RuntimeError as error:
        raise damaged(file, f"it does not fit the network of model.json ({in_a_line(error)})") from None
    if wrong := [key for key, value in state.items() if not value.isfinite().all()]:
        raise damaged(file, f"{wrong[0]!r} has values that are not finite")
    model.eval()
    return model
