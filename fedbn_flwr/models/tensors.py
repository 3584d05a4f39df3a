"""A model's tensors as NumPy arrays: which modules have such tensors, and the dtype in which they are sent."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

from fedbn_flwr.errors import SettingsError
from fedbn_flwr.norms.roles import Role, roles

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


def as_array(tensor: Tensor) -> np.ndarray[Any, Any]:
    """The tensor's values in the dtype in which they are sent; a view of the tensor's memory where possible."""
    array: np.ndarray[Any, Any] = tensor.detach().to(sent_dtype(tensor.dtype)).cpu().numpy()
    return array


def _processes() -> int:
    """The number of processes of torch.distributed; one, if it is not in use."""
    in_use = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if in_use else 1


def check_tensors(model: nn.Module) -> None:
    """Raise SettingsError, which names the module or key, if the state of `model` cannot be sent and averaged."""
    for where, module in model.named_modules():
        what = f"{repr(where) if where else 'the model'} is a {type(module).__name__}"
        if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():  # type: ignore[misc]
            raise SettingsError(f"{what} of unknown size; pass a batch through the model first")
        if isinstance(module, nn.SyncBatchNorm) and _processes() > 1:
            raise SettingsError(
                f"{what}, which would average over the {_processes()} processes of torch.distributed: over clients, or "
                "over parts of a client's batch. Use nn.BatchNorm1d, 2d or 3d, or train in one process"
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise SettingsError(
                f"{what}, whose layers have no types by which batch norm is found; train the module from which "
                "torch.jit made it, and script or trace the trained one"
            )
    state: dict[str, Any] = model.state_dict()
    for key, value in state.items():
        if not isinstance(value, Tensor):
            raise SettingsError(
                f"{key!r} of the model is a {type(value).__name__}; expected a tensor. A quantised module cannot be "
                "trained: quantise the trained model. Other objects (get_extra_state) do not belong in the state dict"
            )
        if value.is_quantized or sent_dtype(value.dtype) not in _SENT or value.layout is not torch.strided:
            found = f"{value.dtype} ({value.layout})".replace("torch.", "")
            raise SettingsError(
                f"{key!r} of the model is {found}, which cannot be averaged; expected a dense tensor of floats of 16 "
                "to 64 bits, integers or booleans. Store torch.view_as_real(...) of complex numbers, and use "
                "torch.view_as_complex in forward; quantise the trained model"
            )
    by_type, by_name, marked = roles(model), roles(state), (Role.STATISTICS, Role.COUNTER)
    if mistaken := [key for key, role in by_name.items() if role in marked and by_type[key] is not role]:
        raise SettingsError(
            f"{mistaken[0]!r} of the model is no statistic of a norm layer, but a server, which has names only, would "
            "take it for one: names that end in running_mean, and running_var and num_batches_tracked beside it, "
            "belong to buffers of norm layers. Rename it"
        )
