"""What a network computes, as a list of operations that several clients may do at once."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx, nn

from fedbn_flwr import seeding
from fedbn_flwr.client.rule import Tensors
from fedbn_flwr.extensions.identity import drawn, hooks_of, plain_attributes
from fedbn_flwr.models.layout import hook_places
from fedbn_flwr.models.tensors import places_of

from .stacked import LAYERS, RELU, Layer


class Value(int):
    """The number of an earlier value: 0 is the input, 1 the result of the first operation."""


@dataclass(frozen=True)
class Operation:
    """A layer or function, and what it is called with."""

    kind: object  # the layer's type, or the function: a key of LAYERS
    name: str  # the layer's; "" for a function
    subject: Any  # the layer, or the function with its options
    arguments: Sequence[Any]  # each a Value or a constant


class Network:
    """A model's computation for several clients' tensors at once; NotImplementedError says why there is none."""

    def __init__(self, model: nn.Module) -> None:
        self.operations: list[Operation] = []
        values: dict[fx.Node, Value] = {}
        covered: set[str] = set()  # the keys of the layers' tensors
        modules = dict(model.named_modules())
        if replaced := [name for name, module in modules.items() if "forward" in vars(module)]:
            raise NotImplementedError(f"{replaced[0] or 'the model'!r} has a forward of its own")
        for node in _trace(model).nodes:
            if node.op == "placeholder" and not values:
                values[node] = Value(0)
                continue
            if node.op == "output" and isinstance(node.args[0], fx.Node):
                self.result = values[node.args[0]]
                break
            arguments = [values[each] if isinstance(each, fx.Node) else each for each in node.args]
            operation = _operation(node, modules, arguments)
            used_once = all(len(each.users) == 1 for each in values)  # the values so far
            if _works_in_place(node, operation.subject) and not (operation.kind in RELU and used_once):
                raise NotImplementedError(f"{node.name!r} changes a value in place that may be used elsewhere")
            if operation.name:
                own = (*operation.subject.named_parameters(), *operation.subject.named_buffers())
                keys = {f"{operation.name}.{key}" for key, _ in own}
                if keys & covered:
                    raise NotImplementedError(f"{operation.name!r} is used more than once")
                covered |= keys
            self.operations.append(operation)
            values[node] = Value(len(self.operations))
        self._places, self._hooks = places_of(model), hook_places(model)  # finding them takes longer than a look
        first: dict[int, str] = {}  # the first key of each tensor, by its address
        for key, tensor in self.tensors().items():
            if tensor.numel() and first.setdefault(tensor.data_ptr(), key) != key:
                raise NotImplementedError(f"{first[tensor.data_ptr()]!r} and {key!r} are the same tensor")
        if unknown := self._places.keys() ^ covered:
            raise NotImplementedError(f"the tensor {min(unknown)!r} belongs to no known layer")
        # Networks with equal descriptions compute the same.
        self.description = str([(each, [*map(type, each.arguments)]) for each in self.operations])

    def computation(self, tensors: Tensors, other: Mapping[object, Layer] = {}) -> Callable[[Tensor], Tensor]:
        """What the network computes with these tensors of several clients; `other` layers replace those of a type."""
        own: dict[str, dict[str, Tensor]] = {}  # by layer
        for key, tensor in tensors.items():
            name, _, part = key.rpartition(".")
            own.setdefault(name, {})[part] = tensor
        known = {**LAYERS, **other}
        layers = [functools.partial(known[each.kind], each.subject, own.get(each.name, {})) for each in self.operations]

        def compute(inputs: Tensor) -> Tensor:
            values = [inputs]
            for operation, layer in zip(self.operations, layers, strict=True):
                values.append(layer(*[values[each] if type(each) is Value else each for each in operation.arguments]))
            return values[self.result]

        return compute

    def has_hooks(self) -> bool:
        """Whether a module or a parameter of the model has hooks now, which the computation does not call."""
        return any(self._hooks) or any(map(hooks_of, self.tensors().values()))

    def tensors(self) -> dict[str, Tensor]:
        """The model's parameters and buffers, by name."""
        return {key: table[name] for key, (table, name) in self._places.items()}


def _trace(model: nn.Module) -> fx.Graph:
    """NotImplementedError if forward draws random numbers or changes the model, which a trace would not repeat."""
    device = next(model.parameters()).device
    copied = copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
    with seeding.preserve_rng():
        before = drawn(device)
        graph = fx.Tracer().trace(copied)
        if (drawn(device), plain_attributes(copied)) != (before, plain_attributes(model)):
            raise NotImplementedError("its forward draws random numbers, or changes the model")
    return graph


def _operation(node: fx.Node, modules: Mapping[str, nn.Module], arguments: Sequence[Any]) -> Operation:
    """The node's operation; NotImplementedError if it is not known."""
    match node.op:
        case "call_module":
            module = modules[name := str(node.target)]
            if not _is_known(module):
                raise NotImplementedError(f"{name!r} is {str(module).partition(chr(10))[0]}")
            return Operation(type(module), name, module, arguments)
        case "call_function" if node.target in LAYERS:
            return Operation(node.target, "", functools.partial(node.target, **node.kwargs), arguments)
        case "call_function" | "call_method" if _is_flatten(node):
            return Operation(nn.Flatten, "", None, arguments)
    raise NotImplementedError(f"its forward has {getattr(node.target, '__name__', node.target)!s}")


def _is_known(module: nn.Module) -> bool:
    if isinstance(module, nn.Dropout) and module.p:
        return False
    if isinstance(module, nn.BatchNorm1d) and module.momentum is None:
        return False  # each client's mean is over another number of batches
    if isinstance(module, nn.Flatten) and (module.start_dim, module.end_dim) != (1, -1):
        return False
    return type(module) in LAYERS


def _is_flatten(node: fx.Node) -> bool:
    return node.target in (torch.flatten, "flatten") and tuple(node.args[1:]) in ((1,), (1, -1)) and not node.kwargs


def _works_in_place(node: fx.Node, module: object) -> bool:
    return any(each is True for each in (getattr(module, "inplace", False), node.kwargs.get("inplace"), *node.args))


_HOOKS = "a module or a parameter has hooks"
_networks: WeakKeyDictionary[nn.Module, Network] = WeakKeyDictionary()
_reasons: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()  # why there is none


def network_of(model: nn.Module) -> Network:
    """The model for several clients at once; NotImplementedError says why there is none: a part may mix clients."""
    if model not in _networks and model not in _reasons:
        if any(hook_places(model)):
            raise NotImplementedError(_HOOKS)
        try:
            _networks[model] = Network(model)
        except NotImplementedError as error:
            _reasons[model] = str(error)
        except Exception:  # PyTorch's tracer raises many kinds of errors for models with control flow
            _reasons[model] = "its forward has control flow or other code that PyTorch cannot trace"
    if (reason := _reasons.get(model)) or _networks[model].has_hooks():
        raise NotImplementedError(reason or _HOOKS)
    return _networks[model]
