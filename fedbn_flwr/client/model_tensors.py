"""Cached references to a model's tensors: traversing the module tree takes longer than loading the weights."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedbn_flwr.errors import MessageError
from fedbn_flwr.messages.aggregate import Arrays
from fedbn_flwr.messages.arrays import FlatArrays, Layout, layout_of
from fedbn_flwr.models.tensors import as_array, check_tensors, sent_dtype
from fedbn_flwr.norms.roles import Role, roles


@dataclass(frozen=True)
class Stage:
    """Buffers through which arrays of one layout are copied to a GPU, or to tensors of another dtype, in one piece."""

    host: Tensor  # in the host's memory
    here: Tensor  # on the model's device; `host` itself on a CPU
    pieces: list[Tensor]  # of `here`
    into: list[Tensor]  # the model's tensors, in the order of `pieces`

    def load(self, block: np.ndarray) -> None:
        np.copyto(self.host.numpy(), block)
        if self.here is not self.host:
            self.here.copy_(self.host)
        torch._foreach_copy_(self.into, self.pieces)


@dataclass(frozen=True)
class Pieces:
    """The memory of a model on a CPU, in the order of a layout."""

    into: list[np.ndarray]

    def load(self, block: np.ndarray) -> None:
        begin = 0
        for piece in self.into:
            np.copyto(piece, block[begin : begin + len(piece)])
            begin += len(piece)


Plan = tuple[list[Tensor], Layout] | None


class Initial:
    """The initial values of models of one kind; only those that clients need are in memory.

    A message has nearly all values of a model, so a copy of all initial ones would take memory for nothing.
    """

    def __init__(self, build: Callable[[], nn.Module]) -> None:
        self._build = build
        self._values: dict[str, Tensor] = {}

    def note(self, tensors: Mapping[str, Tensor], keys: Iterable[str]) -> None:
        """Remember the values of these keys in a new model."""
        self._values |= {key: tensors[key].clone() for key in keys if key not in self._values}

    def restore(self, tensors: Mapping[str, Tensor], keys: Sequence[str]) -> None:
        """Give these tensors their initial values."""
        if any(key not in self._values for key in keys):
            self.note(self._build().state_dict(), keys)
        if keys:
            torch._foreach_copy_([tensors[key] for key in keys], [self._values[key] for key in keys])


_LAST_USERS: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()  # the number of its last client


def check_user(parts: ModelTensors, client: int, arrays: Arrays, own: Arrays) -> None:
    """Refuse a model in which a client would find another client's values of arrays that stay on a client."""
    last = _LAST_USERS.get(parts.model, client)
    for key, role in parts.roles.items() if last != client and not parts.has_initial else ():
        if role is not Role.COUNTER and key not in arrays and key not in own:
            raise MessageError(
                f"the server does not send {key!r}, which stays on the client, and this client's model has that of "
                f"client {last}; give each client a model of its own, or share it as "
                "ModelTensors(model, initial=Initial(build))"
            )
    _LAST_USERS[parts.model] = client


class ModelTensors:
    """The tensors of a model on its device: `roles` and `tensors` by state dict key, `parameters` by name."""

    def __init__(
        self, model: nn.Module, device: torch.device | str | None = None, initial: Initial | None = None
    ) -> None:
        check_tensors(model)
        self.model = model
        self._initial = initial  # of a model that clients use one after another
        self._is_new = True  # whether it has the values that it was built with
        self._is_left = False  # whether it has the values of a client that no longer uses it
        first = next(model.parameters(), torch.empty(0))
        self.device = torch.device(device) if device is not None else first.device
        model.to(self.device)
        self.roles: dict[str, Role] = roles(model)
        # References to the model's tensors: copying into them changes the model.
        self.tensors: dict[str, Tensor] = model.state_dict()
        self.parameters = dict(model.named_parameters())
        self.shapes = {key: tuple(tensor.shape) for key, tensor in self.tensors.items()}
        self._flat = {key: tensor.view(-1) for key, tensor in self.tensors.items() if tensor.is_contiguous()}
        self._views = {
            key: tensor.numpy()
            for key, tensor in self.tensors.items()
            if tensor.device.type == "cpu" and sent_dtype(tensor.dtype) is tensor.dtype
        }
        self._stages: dict[Layout, Stage | Pieces | None] = {}
        self._fits: dict[tuple[Layout, ...], bool] = {}
        self._plans: dict[tuple[str, ...], Plan] = {}
        self._modules = list(model.modules())
        # A network may override `train`, for instance to keep batch norms that are not trained in evaluation mode.
        self._has_own_train = any(type(module).train is not nn.Module.train for module in self._modules)
        # Buffers that are not in the state dict, which a network may change in its passes.
        self._hidden = [
            (module._buffers, name, buffer.clone())
            for module in self._modules
            for name, buffer in module._buffers.items()
            if initial is not None and buffer is not None and name in module._non_persistent_buffers_set
        ]
        self._held: list[tuple[dict[str, Any], str, Tensor, int]] = [
            (table, name, tensor, tensor.data_ptr())
            for module in self._modules
            for table in (module._parameters, module._buffers)
            for name, tensor in table.items()
            if tensor is not None
        ]

    def __reduce__(self) -> tuple[Callable[[nn.Module], ModelTensors], tuple[nn.Module]]:
        return ModelTensors, (self.model,)

    def are_current(self) -> bool:
        """Whether the model still has these tensors; its owner may have moved it or replaced some."""
        return all(table.get(name) is tensor and tensor.data_ptr() == at for table, name, tensor, at in self._held)

    def settle(self) -> None:
        """Give the model its tensors again where a pass has assigned others (`self.mean = ...`), with their values."""
        for table, name, tensor, _ in self._held:
            now = table.get(name)
            if now is tensor or now is None:
                continue
            # Others are of an owner who moved or changed the model.
            if (now.shape, now.dtype, now.device) == (tensor.shape, tensor.dtype, tensor.device):
                tensor.detach().copy_(now.detach())
                table[name] = tensor

    def set_training(self) -> None:
        """Set training mode, if it is not set: setting it takes longer than checking it."""
        if self._has_own_train or not all(module.training for module in self._modules):
            self.model.train()

    def fits(self, *sets: Arrays) -> bool:
        """Whether these blocks contain distinct arrays of this model and all its weights; False for other mappings."""
        blocks = [block for block in sets if len(block)]
        if not all(isinstance(block, FlatArrays) for block in blocks):
            return False
        layouts = tuple(block.layout for block in blocks if isinstance(block, FlatArrays))
        if layouts not in self._fits:
            shapes = [item for where in layouts for item in where.shapes.items()]
            keys = {key for key, _ in shapes}
            weights = {key for key, role in self.roles.items() if role is Role.WEIGHTS}
            known = all(self.shapes.get(key) == shape for key, shape in shapes)
            self._fits[layouts] = known and len(keys) == len(shapes) and weights <= keys
        return self._fits[layouts]

    def check(self, arrays: Arrays, own: Arrays) -> None:
        """Raise MessageError unless the received arrays and the client's own ones are those of its model."""
        expected, received = self.shapes, set(arrays)
        if unknown := [key for key in arrays if key not in expected]:
            raise MessageError(
                f"the server sent {unknown[0]!r}, which this client's model does not have; its first keys are "
                f"{list(expected)[:3]}. Server and clients must build the same model"
            )
        absent = [key for key in expected if key not in received and key not in own]
        # Standalone sends no arrays at all; a message that lacks only some weights is for another model.
        if arrays and (lacking := [key for key in absent if self.roles[key] is Role.WEIGHTS]):
            raise MessageError(
                f"the server did not send {lacking[0]!r} ({len(lacking)} keys of weights are missing), and the "
                "client's state does not have it. Server and clients must build the same model"
            )
        shapes = arrays.layout.shapes if isinstance(arrays, FlatArrays) else {key: arrays[key].shape for key in arrays}
        for key, shape in {**{key: value.shape for key, value in own.items()}, **shapes}.items():
            if shape != expected[key]:
                where = "the message" if key in received else "the client's state"
                raise MessageError(f"{key!r} has shape {shape} in {where} and {expected[key]} in this client's model")

    @property
    def has_initial(self) -> bool:
        """Whether a client that has no values of its own begins with those of a new model."""
        return self._initial is not None

    def leave(self) -> None:
        """Let another client use the model; the values stay until it loads its own or reads them."""
        self._is_left = not self._is_new
        for parameter in self.parameters.values():
            parameter.grad = None

    def load_all(self, arrays: Arrays, own: Arrays) -> None:
        """Copy the received arrays and the client's own ones; all other tensors get the values of a new model."""
        if self._initial is not None:
            absent = [key for key in self.tensors if key not in arrays and key not in own]
            if self._is_new:
                self._initial.note(self.tensors, absent)
            else:
                self._initial.restore(self.tensors, absent)
            self._is_new = self._is_left = False
            for table, name, value in self._hidden:
                if (buffer := table[name]) is None or buffer.shape != value.shape:
                    table[name] = value.clone()
                else:  # in place, since a compiled pass refers to it
                    buffer.detach().copy_(value)
        self.load(own)
        self.load(arrays)

    def load(self, arrays: Arrays) -> None:
        """Copy arrays into the tensors of the same keys and shapes."""
        if isinstance(arrays, FlatArrays) and (stage := self._stage(arrays.layout)) is not None:
            stage.load(arrays.flat)
            return
        for key, value in arrays.items():
            tensor = self.tensors[key]
            if not tensor.is_floating_point() and value.dtype.kind == "f":
                # Flower's mean returns integer counters as floats with a rounding error.
                value = np.rint(value)
            if (view := self._views.get(key)) is not None:
                np.copyto(view, value, casting="unsafe")
            else:
                tensor.copy_(torch.from_numpy(np.array(value)))

    def _stage(self, where: Layout) -> Stage | Pieces | None:
        """Copies arrays of this layout; None if they must be copied one by one."""
        if where not in self._stages:
            keys = list(where.places)
            dtype = self._sent_dtype(keys)
            stage: Stage | Pieces | None = None
            if dtype is not None and torch.empty(0, dtype=dtype).numpy().dtype == where.dtype:
                into = joined([self._flat[key] for key in keys])
                if all(key in self._views for key in keys):
                    stage = Pieces([piece.numpy() for piece in into])
                else:
                    host = torch.empty(where.size, dtype=dtype)
                    here = host if self.device.type == "cpu" else torch.empty_like(host, device=self.device)
                    stage = Stage(host, here, list(here.split([len(piece) for piece in into])), into)
            self._stages[where] = stage
        return self._stages[where]

    def taken(self, keys: Iterable[str]) -> Arrays:
        """Copies of the current values of the tensors with these keys."""
        if self._is_left:
            self.load_all({}, {})
        wanted = tuple(keys)
        if wanted not in self._plans:
            self._plans[wanted] = self._plan(wanted)
        plan = self._plans[wanted]
        if plan is not None:
            flat, where = plan
            return FlatArrays(where, as_array(torch.cat(flat)))
        return copied({key: self.tensors[key] for key in wanted})

    def _plan(self, keys: tuple[str, ...]) -> Plan:
        """The tensors of these keys and their layout in one block; None if they do not fit into one."""
        if (dtype := self._sent_dtype(keys)) is None:
            return None
        name = torch.empty(0, dtype=dtype).numpy().dtype.str
        flat = joined([self._flat[key] for key in keys])
        return flat, layout_of(name, keys, tuple(self.shapes[key] for key in keys))

    def _sent_dtype(self, keys: Iterable[str]) -> torch.dtype | None:
        """The dtype in which the tensors with these keys are sent; None if they have several or are not contiguous."""
        tensors = [self._flat.get(key) for key in keys]
        dtypes = {None if tensor is None else sent_dtype(tensor.dtype) for tensor in tensors}
        return dtypes.pop() if len(dtypes) == 1 else None


def flatten_storage(model: nn.Module) -> nn.Module:
    """Move the model's tensors to consecutive memory, so that they can be copied as one, and return the model.

    Only for models that this package builds: any other view of a parameter's memory no longer shares it afterwards.
    Tensors on a GPU are not moved, since GPU kernels prefer weights at aligned addresses, and one kernel launch copies
    many tensors.
    """
    first = next(model.parameters(), torch.empty(0))
    once = {
        id(tensor): tensor
        for module in model.modules()
        for tensor in (*module._parameters.values(), *module._buffers.values())
        if tensor is not None and tensor.is_contiguous()
        if (tensor.dtype, tensor.device) == (first.dtype, torch.device("cpu"))
    }
    if once:
        flat = torch.cat([tensor.detach().view(-1) for tensor in once.values()])
        for tensor, piece in zip(once.values(), flat.split([tensor.numel() for tensor in once.values()]), strict=True):
            tensor.data = piece.view(tensor.shape)
    return model


def joined(flat: list[Tensor]) -> list[Tensor]:
    """The same elements in fewer tensors: tensors in consecutive memory become one."""
    merged: list[Tensor] = []
    for piece in flat:
        if merged and _follows(piece, merged[-1]):
            merged[-1] = merged[-1].as_strided((len(merged[-1]) + len(piece),), (1,))
        else:
            merged.append(piece)
    return merged


def _follows(piece: Tensor, last: Tensor) -> bool:
    one_memory = piece.untyped_storage().data_ptr() == last.untyped_storage().data_ptr()
    return one_memory and piece.storage_offset() == last.storage_offset() + len(last)


def initial_arrays(model: nn.Module) -> Arrays:
    """The initial arrays of a server: all arrays of the model except batch norm's counters, which are never sent."""
    check_tensors(model)
    of, state = roles(model), model.state_dict()
    return copied({key: state[key] for key in state if of[key] is not Role.COUNTER})


def copied(tensors: Mapping[str, Tensor]) -> Arrays:
    """Copies of the tensors' current values; tensors of one dtype are copied from the device as one block."""
    shapes = tuple(tuple(tensor.shape) for tensor in tensors.values())
    flat = [tensor.detach().reshape(-1) for tensor in tensors.values()]
    if len({sent_dtype(values.dtype) for values in flat}) != 1:
        arrays = [np.array(as_array(values)) for values in flat]
        return {key: array.reshape(shape) for key, array, shape in zip(tensors, arrays, shapes, strict=True)}
    block = as_array(torch.cat(flat))
    return FlatArrays(layout_of(block.dtype.str, tuple(tensors), shapes), block)


def tensor_like(value: np.ndarray | None, parameter: nn.Parameter) -> Tensor:
    """`value` with the dtype and device of a parameter; zeros if it is None."""
    if value is None:
        return torch.zeros_like(parameter)
    return torch.from_numpy(np.array(value)).to(device=parameter.device, dtype=parameter.dtype)


_TRAINED: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # the models whose round has not ended


@contextmanager
def exclusive(model: nn.Module) -> Iterator[None]:
    """Refuses a second client with the same model: the layer-wise rounds of several clients run concurrently."""
    if model in _TRAINED:
        raise MessageError(
            "another client is in the middle of a round with this very model; the clients of a layer-wise round train "
            "concurrently, so make_client must return clients with separate models"
        )
    _TRAINED.add(model)
    try:
        yield
    finally:
        _TRAINED.discard(model)
