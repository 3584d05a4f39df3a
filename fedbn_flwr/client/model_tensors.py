"""Cached references to a model's tensors: traversing the module tree takes longer than loading the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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


@dataclass(eq=False)
class _Use:
    """Which client has used a model last, and whether it trains now: an attribute of the model, not of copies."""

    client: int | None = None
    is_training: bool = False

    def __reduce__(self) -> tuple[type[_Use], tuple[()]]:
        return _Use, ()


class ModelTensors:
    """The tensors of a model on its device: `roles` and `tensors` by state dict key, `parameters` by name."""

    def __init__(
        self,
        model: nn.Module,
        device: torch.device | str | None = None,
        build: Callable[[], nn.Module] | None = None,
    ) -> None:
        """Clients that use the model one after another begin with the values of a new model, which `build` makes."""
        self.model = model
        self.device = next(model.parameters(), torch.empty(0)).device if device is None else torch.device(device)
        self.is_left = False  # whether it has the values of a client that no longer uses it
        self._build = build
        self._use: _Use = vars(model).setdefault("_fedbn_use", _Use())
        self._refer()
        # The initial values without the weights, which are in nearly all messages: they would take memory for nothing.
        self._initial = {
            key: tensor.clone() for key, tensor in self.tensors.items() if build and self.roles[key] is not Role.WEIGHTS
        }
        # Buffers that are not in the state dict, which a network may change in its passes.
        self._hidden = [
            (module._buffers, name, buffer, buffer.clone())
            for module in (model.modules() if build else ())
            for name in module._non_persistent_buffers_set
            if (buffer := module._buffers[name]) is not None
        ]

    def _refer(self) -> None:
        check_tensors(self.model)
        self.model.to(self.device).train()
        self.roles: dict[str, Role] = roles(self.model)
        # References to the model's tensors: copying into them changes the model.
        self.tensors: dict[str, Tensor] = self.model.state_dict()
        self.parameters = dict(self.model.named_parameters())
        self._held: list[tuple[dict[str, Any], str, Tensor, int]] = [
            (table, name, tensor, tensor.data_ptr())
            for module in self.model.modules()
            for table in (module._parameters, module._buffers)
            for name, tensor in table.items()
            if tensor is not None
        ]

    def __reduce__(self) -> tuple[type[ModelTensors], tuple[nn.Module]]:
        return ModelTensors, (self.model,)

    def settle(self) -> bool:
        """Give the model its tensors again where a pass has assigned others (`self.mean = ...`), with their values.

        False if the model has other tensors nevertheless: its owner has moved it or replaced some.
        """
        for table, name, tensor, _ in self._held:
            now = table.get(name, tensor)
            # Others are of an owner who moved or changed the model.
            if (
                now is not tensor
                and now is not None
                and (now.shape, now.dtype, now.device) == (tensor.shape, tensor.dtype, tensor.device)
            ):
                table[name] = tensor
                tensor.detach().copy_(now.detach())
        return all(table.get(name) is tensor and tensor.data_ptr() == at for table, name, tensor, at in self._held)

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Refuses a second client with the same model: the layer-wise rounds of several clients run concurrently."""
        if self._use.is_training:
            raise MessageError(
                "another client is in the middle of a round with this very model; the clients of a layer-wise round "
                "train concurrently, so make_client must return clients with separate models"
            )
        self._use.is_training = True
        try:
            yield
        finally:
            self._use.is_training = False

    def _check(self, arrays: Arrays, own: Arrays, client: int) -> None:
        """Raise MessageError unless the received arrays and the client's own ones are those of its model."""
        if unknown := [key for key in arrays if key not in self.tensors]:
            raise MessageError(
                f"the server sent {unknown[0]!r}, which this client's model does not have; its first keys are "
                f"{list(self.tensors)[:3]}. Server and clients must build the same model"
            )
        absent = [key for key in self.tensors if key not in arrays and key not in own]
        # Standalone sends no arrays at all; a message that lacks only some weights is for another model.
        if arrays and (lacking := [key for key in absent if self.roles[key] is Role.WEIGHTS]):
            raise MessageError(
                f"the server did not send {lacking[0]!r} ({len(lacking)} keys of weights are missing), and the "
                "client's state does not have it. Server and clients must build the same model"
            )
        sent = arrays.layout.shapes if isinstance(arrays, FlatArrays) else {key: arrays[key].shape for key in arrays}
        for key, shape in {**{key: value.shape for key, value in own.items()}, **sent}.items():
            if shape != (expected := tuple(self.tensors[key].shape)):
                where = "the message" if key in arrays else "the client's state"
                raise MessageError(f"{key!r} has shape {shape} in {where} and {expected} in this client's model")
        kept = [key for key in absent if self.roles[key] is not Role.COUNTER]
        if kept and self._build is None and self._use.client not in (None, client):
            raise MessageError(
                f"the server does not send {kept[0]!r}, which stays on the client, and this client's model has that of "
                f"client {self._use.client}; give each client a model of its own, or share it as "
                "ModelTensors(model, build=build)"
            )

    def load_all(self, arrays: Arrays, own: Arrays, client: int) -> None:
        """Copy the received arrays and the client's own ones; all other tensors get the values of a new model."""
        if not self.settle():
            self._refer()
        own = {key: value for key, value in own.items() if key not in arrays}
        self._check(arrays, own, client)
        self._use.client = client
        self._restore([key for key in self.tensors if key not in arrays and key not in own])
        self.load(own)
        self.load(arrays)

    def _restore(self, keys: Sequence[str]) -> None:
        """Give these tensors, and the buffers outside of the state dict, the values of a new model."""
        self.is_left = False
        if self._build is not None and keys:
            values = self._initial if self._initial.keys() >= {*keys} else self._build().state_dict()
            torch._foreach_copy_([self.tensors[key] for key in keys], [values[key] for key in keys])
        for table, name, buffer, value in self._hidden:  # in place, since a compiled pass refers to it
            table[name] = buffer
            buffer.detach().copy_(value)

    def load(self, arrays: Arrays) -> None:
        """Copy arrays into the tensors of the same keys and shapes."""
        into = [self.tensors[key] for key in arrays]
        if isinstance(arrays, FlatArrays):  # one copy to the device
            block = torch.from_numpy(np.array(arrays.flat)).to(self.device)
            values = [*_unflatten_dense_tensors(block, into)]
        else:
            values = [torch.from_numpy(np.array(value)) for value in arrays.values()]
        # Flower's mean of integer counters has a rounding error.
        values = [
            v.round() if v.is_floating_point() > t.is_floating_point() else v for v, t in zip(values, into, strict=True)
        ]
        if into:
            torch._foreach_copy_(into, values)

    def taken(self, keys: Iterable[str]) -> Arrays:
        """Copies of the current values of the tensors with these keys."""
        if self.is_left:
            self._restore([*self.tensors])
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
