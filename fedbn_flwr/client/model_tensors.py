"""Cached references to a model's tensors: traversing the module tree takes longer than loading the weights."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._utils import _unflatten_dense_tensors

from fedbn_flwr.errors import MessageError
from fedbn_flwr.messages.aggregate import Arrays
from fedbn_flwr.messages.arrays import FlatArrays, layout_of
from fedbn_flwr.models.tensors import as_array, check_tensors, sent_dtype
from fedbn_flwr.norms.roles import Role, roles


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
        into = [self.tensors[key] for key in arrays]
        if isinstance(arrays, FlatArrays):  # one copy to the device
            block = torch.from_numpy(np.array(arrays.flat)).to(self.device)
            values = [*_unflatten_dense_tensors(block, into)]
        else:
            values = [torch.from_numpy(np.array(value)) for value in arrays.values()]
        for number in [number for number, tensor in enumerate(into) if not tensor.is_floating_point()]:
            if values[number].is_floating_point():  # Flower's mean of integer counters, with a rounding error
                values[number] = values[number].round()
        if into:
            torch._foreach_copy_(into, values)

    def taken(self, keys: Iterable[str]) -> Arrays:
        """Copies of the current values of the tensors with these keys."""
        if self._is_left:
            self.load_all({}, {})
        return copied({key: self.tensors[key] for key in keys})


def initial_arrays(model: nn.Module) -> Arrays:
    """The initial arrays of a server: all arrays of the model except batch norm's counters, which are never sent."""
    check_tensors(model)
    of, state = roles(model), model.state_dict()
    return copied({key: state[key] for key in state if of[key] is not Role.COUNTER})


def copied(tensors: Mapping[str, Tensor]) -> Arrays:
    """Copies of the tensors' current values; tensors of one dtype are copied from the device as one block."""
    values = [tensor.detach() for tensor in tensors.values()]
    if len({sent_dtype(value.dtype) for value in values}) != 1:
        return {key: np.array(as_array(value), order="C") for key, value in zip(tensors, values, strict=True)}
    block = as_array(torch.cat([value.reshape(-1) for value in values]))  # a copy, of a single tensor too
    return FlatArrays(layout_of(block.dtype.str, tuple(tensors), tuple(tuple(each.shape) for each in values)), block)


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
