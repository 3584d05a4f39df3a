"""Cached references to a model's tensors; traversing the module tree costs more than loading the weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from fedbn_flwr.messages.aggregate import Arrays
from fedbn_flwr.messages.arrays import FlatArrays, Layout, layout_of
from fedbn_flwr.norms.roles import Role, roles


@dataclass(frozen=True)
class Stage:
    """Where a model's arrays arrive in one piece, and what of it goes into which tensor."""

    host: Tensor
    here: Tensor  # on the model's device
    pieces: list[Tensor]  # of `here`
    into: list[Tensor]


Plan = tuple[list[Tensor], Layout] | None


class ModelTensors:
    """The tensors of a model on its device: `roles` and `tensors` by state dict key, `parameters` by name."""

    def __init__(self, model: nn.Module, device: torch.device | str | None = None) -> None:
        self.model = model
        first = next(model.parameters(), torch.empty(0))
        self.device = torch.device(device) if device is not None else first.device
        model.to(self.device)
        self.roles: dict[str, Role] = roles(model)
        # The very tensors: what is copied into them is in the model.
        self.tensors: dict[str, Tensor] = model.state_dict()
        self.parameters = dict(model.named_parameters())
        self.shapes = {key: tuple(tensor.shape) for key, tensor in self.tensors.items()}
        self._flat = {key: tensor.view(-1) for key, tensor in self.tensors.items() if tensor.is_contiguous()}
        self._views = {key: tensor.numpy() for key, tensor in self.tensors.items() if tensor.device.type == "cpu"}
        self._stages: dict[Layout, Stage | None] = {}
        self._fits: dict[tuple[Layout, ...], bool] = {}
        self._plans: dict[tuple[str, ...], Plan] = {}
        self._modules = list(model.modules())
        self._held = [
            (table, name, tensor, tensor.data_ptr())
            for module in self._modules
            for table in (module._parameters, module._buffers)
            for name, tensor in table.items()
            if tensor is not None
        ]

    def are_current(self) -> bool:
        """Whether the model still has these tensors: its owner may have moved it, or given it others."""
        return all(table.get(name) is tensor and tensor.data_ptr() == at for table, name, tensor, at in self._held)

    def set_training(self) -> None:
        """Training mode for all modules; to set what is set takes longer than to see that it is."""
        if not all(module.training for module in self._modules):
            self.model.train()

    def fits(self, *sets: Arrays) -> bool:
        """Whether these blocks together are arrays of this model, each once, with all weights; False if unknown."""
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

    def load(self, arrays: Arrays) -> None:
        """Copy arrays into the tensors of the same keys, which have their shapes."""
        if isinstance(arrays, FlatArrays) and (stage := self._stage(arrays.layout)) is not None:
            np.copyto(stage.host.numpy(), arrays.flat)
            if stage.here is not stage.host:
                stage.here.copy_(stage.host)
            torch._foreach_copy_(stage.into, stage.pieces)
            return
        for key, value in arrays.items():
            tensor = self.tensors[key]
            if not tensor.is_floating_point():
                # Flower's own mean returns integer counters as floats a rounding error off.
                value = np.rint(value)
            if (view := self._views.get(key)) is not None:
                np.copyto(view, value, casting="unsafe")
            else:
                tensor.copy_(torch.from_numpy(np.array(value)))

    def _stage(self, where: Layout) -> Stage | None:
        """For arrays of this layout; None where they are not copied as they are."""
        if where not in self._stages:
            keys = list(where.places)
            fits = all(key in self._flat and self._flat[key].dtype == self._flat[keys[0]].dtype for key in keys)
            stage = None
            if fits and torch.empty(0, dtype=self._flat[keys[0]].dtype).numpy().dtype == where.dtype:
                host = torch.empty(where.size, dtype=self._flat[keys[0]].dtype)
                here = host if self.device.type == "cpu" else torch.empty_like(host, device=self.device)
                into = joined([self._flat[key] for key in keys])
                stage = Stage(host, here, list(here.split([len(piece) for piece in into])), into)
            self._stages[where] = stage
        return self._stages[where]

    def taken(self, keys: Iterable[str]) -> Arrays:
        """Copies of the tensors with these keys, as they are now."""
        wanted = tuple(keys)
        if wanted not in self._plans:
            self._plans[wanted] = self._plan(wanted)
        plan = self._plans[wanted]
        if plan is not None:
            flat, where = plan
            return FlatArrays(where, torch.cat(flat).cpu().numpy())
        return copied({key: self.tensors[key] for key in wanted})

    def _plan(self, keys: tuple[str, ...]) -> Plan:
        """The tensors of these keys and how they lie in one block; None where they do not make one."""
        flat = [self._flat[key] for key in keys if key in self._flat]
        if len(flat) < len(keys) or len({values.dtype for values in flat}) != 1:
            return None
        dtype = torch.empty(0, dtype=flat[0].dtype).numpy().dtype
        return joined(flat), layout_of(dtype.str, keys, tuple(self.shapes[key] for key in keys))


def flatten_storage(model: nn.Module) -> nn.Module:
    """The model, its tensors moved next to each other in the order of its state dict: to be copied as one.

    For models of our own making: whoever holds a parameter's memory by other means would lose it. On a GPU they stay
    where they are: its kernels want weights that begin at round addresses, and many copies are one launch there.
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
    """The same elements in fewer tensors: neighbours in one memory become one."""
    found: list[Tensor] = []
    for piece in flat:
        if found and _follows(piece, found[-1]):
            found[-1] = found[-1].as_strided((len(found[-1]) + len(piece),), (1,))
        else:
            found.append(piece)
    return found


def _follows(piece: Tensor, last: Tensor) -> bool:
    one_memory = piece.untyped_storage().data_ptr() == last.untyped_storage().data_ptr()
    return one_memory and piece.storage_offset() == last.storage_offset() + len(last)


def initial_arrays(model: nn.Module) -> Arrays:
    """What a server begins with: all of a model but batch norm's counters, which nobody sends."""
    of, state = roles(model), model.state_dict()
    return copied({key: state[key] for key in state if of[key] is not Role.COUNTER})


def copied(tensors: Mapping[str, Tensor]) -> Arrays:
    """The tensors' values as they are now; of those of one dtype a block, in one go from the device."""
    shapes = tuple(tuple(tensor.shape) for tensor in tensors.values())
    flat = [tensor.detach().reshape(-1) for tensor in tensors.values()]
    if len({values.dtype for values in flat}) != 1:
        each = [np.array(values.cpu().numpy()) for values in flat]
        return {key: values.reshape(shape) for key, values, shape in zip(tensors, each, shapes, strict=True)}
    block = torch.cat(flat).cpu().numpy()
    return FlatArrays(layout_of(block.dtype.str, tuple(tensors), shapes), block)


def tensor_like(value: np.ndarray | None, parameter: nn.Parameter) -> Tensor:
    """`value` in the form of a parameter; zeros where there is none."""
    if value is None:
        return torch.zeros_like(parameter)
    return torch.from_numpy(np.array(value)).to(device=parameter.device, dtype=parameter.dtype)
