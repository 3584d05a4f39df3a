"""A model's tensors: checks whether they can be sent, and converts their values to arrays and back."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.nn.modules.lazy import LazyModuleMixin

from fedbn_flwr.errors import MessageError, SettingsError
from fedbn_flwr.messages.aggregate import Arrays
from fedbn_flwr.messages.arrays import frozen
from fedbn_flwr.norms.roles import Role, key_of, roles

from .layout import takes_channels_last

_SENT = {
    torch.float16, torch.float32, torch.float64, torch.bool, torch.uint8, torch.int8,
    torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64, torch.int64,
}  # fmt: skip


def sent_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which tensors of `dtype` are sent and stored.

    NumPy has no bfloat16: its values are sent as float32, which represents them exactly, and are rounded to bfloat16
    again when a model loads them.
    """
    return torch.float32 if dtype is torch.bfloat16 else dtype


def as_array(tensor: Tensor) -> np.ndarray:
    """The tensor's values in the dtype in which they are sent; a view of the tensor's memory where possible."""
    return (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).numpy(force=True)


def check_tensors(model: nn.Module) -> None:
    """Raise a SettingsError that names the module or key if the state of `model` cannot be sent and averaged."""
    for where, module in model.named_modules():
        what = f"{repr(where) if where else 'the model'} is a {type(module).__name__}"
        if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():  # type: ignore[misc]
            raise SettingsError(
                f"{what} of unknown size; call the model on a batch before you pass it on. In an experiment, the "
                "function that makes it can do so with torch.zeros(2, *input_shape), if it has an argument "
                "input_shape, the shape of an example"
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise SettingsError(
                f"{what}, whose layers have lost the types by which batch norm is found; train the module that it was "
                "made from, and script or trace the trained one"
            )
    state: dict[str, Tensor] = model.state_dict()
    for key, value in state.items():
        plain = isinstance(value, Tensor) and value.layout is torch.strided and not value.is_quantized
        if not plain or sent_dtype(value.dtype) not in _SENT:
            found = f"{value.dtype} ({value.layout})" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise SettingsError(
                f"{key!r} of the model is {found.replace('torch.', '')}, which cannot be averaged; expected a dense "
                "tensor of floats of 16 to 64 bits, integers or booleans. Store torch.view_as_real(...) of complex "
                "numbers, and use torch.view_as_complex in forward; quantise the trained model. Other objects "
                "(get_extra_state) do not belong in the state dict"
            )
    by_type, by_name, marked = roles(model), roles(state), (Role.STATISTICS, Role.COUNTER)
    if mistaken := [key for key, role in by_name.items() if role in marked and by_type[key] is not role]:
        raise SettingsError(
            f"{mistaken[0]!r} of the model is not a statistic of a norm layer, but a server, which sees only names, "
            "would take it for one: running_mean, and running_var and num_batches_tracked of the same module, are the "
            "names of a norm layer's buffers. Rename it"
        )


# The values that each model had when it was first seen. Global, since two `ModelTensors` may have one model.
_initial: WeakKeyDictionary[nn.Module, dict[str, Tensor]] = WeakKeyDictionary()


def places_of(model: nn.Module) -> dict[str, tuple[dict[str, Any], str]]:
    """Where each tensor is, by key: a module's dict and the name in it, since code may assign another tensor."""
    return {
        key_of(prefix, name): (table, name)
        for prefix, module in model.named_modules(remove_duplicate=False)
        for table in (module._parameters, module._buffers)
        for name in table
        if table[name] is not None
    }


class ModelTensors:
    """The tensors of a model by state dict key, with their `roles`; several clients may use it, one after another.

    It remembers where they are in the modules, since traversing the tree takes longer than loading the weights.
    """

    def __init__(self, model: nn.Module, device: torch.device | str | None = None) -> None:
        check_tensors(model)
        model.train()  # a user's model may return nothing
        self.model = model if device is None else model.to(device)
        self.roles = roles(model)
        state: dict[str, Tensor] = model.state_dict()
        self._places = {**{key: (state, key) for key in state}, **places_of(model)}
        self._parameters = [name for name, _ in model.named_parameters()]
        self._modules = list(model.modules())
        self._buffers = dict(model.named_buffers(remove_duplicate=False))
        self._shapes = {key: tuple(value.shape) for key, value in state.items()}
        tied: dict[int, list[str]] = {}
        for key, tensor in zip(state, self._now(state), strict=True):
            tied.setdefault(id(tensor), []).append(key)
        self._tied = [keys for keys in tied.values() if len(keys) > 1]
        if model not in _initial:
            now = zip(self._places, self._now(self._places), strict=True)
            _initial[model] = {key: value.detach().clone() for key, value in now}
        self._initial = _initial[model]

    @property
    def device(self) -> torch.device:
        return next(iter(self._now(self._parameters[:1])), torch.empty(0)).device

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters that train, by name."""
        now: Any = zip(self._parameters, self._now(self._parameters), strict=True)
        return {name: parameter for name, parameter in now if parameter.requires_grad}

    @functools.cached_property
    def takes_channels_last(self) -> bool:
        return takes_channels_last(self.model)

    def train(self) -> None:
        """Set the model to training mode; visiting each module takes longer than most other parts of a round."""
        if not all(module.training for module in self._modules):
            self.model.train()

    def _now(self, keys: Collection[str]) -> list[Tensor]:
        """The tensors with these keys. First, buffers that a pass has assigned anew get their old places back."""
        for key, buffer in self._buffers.items():
            table, name = self._places[key]
            now = table[name]
            if now is not buffer and now is not None and now.shape == buffer.shape and now.dtype == buffer.dtype:
                # A pass has assigned another tensor (`self.mean = ...`), which may be part of anything.
                with torch.no_grad():
                    table[name] = buffer.copy_(now)
        return [table[name] for table, name in map(self._places.__getitem__, keys)]

    @torch.no_grad()
    def load_all(self, arrays: Arrays, own: Arrays, needed: Collection[str] = ()) -> None:
        """Load the received arrays and the client's own ones; all other tensors get the model's initial values.

        So nothing is left of another client that has used the model. MessageError if an array with a `needed` key is
        missing.
        """
        given = {*arrays, *own}
        self._check(arrays, own, [key for key in self.roles if key in needed and key not in given])
        if rest := [key for key in self._places if key not in given]:
            torch._foreach_copy_(self._now(rest), [self._initial[key] for key in rest])
        self.load(own, arrays)

    # --- what arrays must be ---

    def kept_problem(self, kept: Collection[str], arrays: Collection[str] = ()) -> str | None:
        """Why these keys cannot stay on the client, or None: they were received, or are some of a tensor's keys."""
        if sent := [key for key in arrays if key in kept]:
            return (
                f"the server sent {sent[0]!r}, which stays on the client ({len(kept)} arrays do). Server and clients "
                "must build the same model, whose batch norms all track statistics, or none does"
            )
        for keys in self._tied:
            inside, outside = ([key for key in keys if (key in kept) is stays] for stays in (True, False))
            if inside and outside:
                return (
                    f"{inside[0]!r} stays on the client and {outside[0]!r} does not, and they are one tensor in this "
                    "model; keep both or none"
                )
        return None

    def _check(self, arrays: Arrays, own: Arrays, lacking: Sequence[str]) -> None:
        """Raise MessageError unless the received arrays and the client's own ones fit; `lacking` are missing keys."""
        if unknown := [key for key in arrays if key not in self.roles]:
            raise MessageError(
                f"the server sent {unknown[0]!r}, which this client's model does not have; its first keys are "
                f"{list(self.roles)[:3]}. Server and clients must build the same model"
            )
        # Standalone sends no arrays at all. A message that lacks only some is for another model.
        if arrays and lacking:
            kind = self.roles[lacking[0]]
            norms = ", whose batch norms all track statistics, or none does" if kind is not Role.WEIGHTS else ""
            raise MessageError(
                f"the server did not send {lacking[0]!r} ({len(lacking)} keys of {kind} are missing), and the "
                f"client's state does not have it. Server and clients must build the same model{norms}"
            )
        for keys in self._tied:
            first, *others = [key for key in keys if key in arrays] or keys[:1]
            if different := [key for key in others if not np.array_equal(arrays[key], arrays[first])]:
                raise MessageError(
                    f"the server sent different values for {first!r} and {different[0]!r}, which are one tensor in "
                    "this model (Private adds noise to each); untie them"
                )
        for where, given in (("the message", arrays), ("the client's state", own)):
            if wrong := [key for key in given if given[key].shape != self._shapes[key]]:
                raise MessageError(
                    f"{wrong[0]!r} has shape {given[wrong[0]].shape} in {where} and {self._shapes[wrong[0]]} in this "
                    "client's model"
                )

    # --- values ---

    @torch.no_grad()
    def load(self, *given: Arrays) -> None:
        """Copy arrays into the tensors of the same keys and shapes."""
        for arrays in given:
            for tensor, array in zip(self._now(arrays), arrays.values(), strict=True):
                # Flower's mean of integer counters has a rounding error.
                is_mean = array.dtype.kind == "f" and not tensor.is_floating_point()
                value = np.rint(array) if is_mean else array
                if tensor.device.type == "cpu" and tensor.dtype is not torch.bfloat16:
                    np.copyto(tensor.detach().numpy(), value, casting="unsafe")
                else:
                    tensor.copy_(torch.from_numpy(np.array(value)))  # a copy: PyTorch warns of read-only arrays

    def values_of(self, keys: Collection[str]) -> Arrays:
        """Copies of the current values of the tensors with these keys."""
        return copied(dict(zip(keys, self._now(keys), strict=True))) if keys else {}


def initial_arrays(model: nn.Module) -> Arrays:
    """The initial arrays of a server: all arrays of the model except batch norm's counters, which are never sent."""
    check_tensors(model)
    role_of, state = roles(model), model.state_dict()
    return copied({key: state[key] for key in state if role_of[key] is not Role.COUNTER})


@torch.no_grad()
def copied(tensors: Mapping[str, Tensor]) -> Arrays:
    """Copies of the tensors' current values, which are read-only."""
    values = [*tensors.values()]
    if len({(value.device, value.dtype) for value in values}) == 1 and values[0].device.type != "cpu":
        values = _unflatten_dense_tensors(_flatten_dense_tensors(values).cpu(), values)  # one copy from the device
    return {key: frozen(np.array(as_array(value), order="C")) for key, value in zip(tensors, values, strict=True)}


def tensor_like(value: np.ndarray | None, parameter: Tensor) -> Tensor:
    """`value` with the dtype and device of a parameter; zeros if it is None."""
    if value is None:
        return torch.zeros_like(parameter)
    return torch.from_numpy(np.array(value)).to(device=parameter.device, dtype=parameter.dtype)
