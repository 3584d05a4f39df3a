"""What a network computes, as a list of operations that several clients may do at once."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx, nn

from fedbn_flwr import seeding
from fedbn_flwr.client.rule import Tensors
from fedbn_flwr.models.tensors import hook_places, hooks_of, places_of, plain_attributes

from .gradients import LAYERS, RELU, Backward, Layer


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
        places: dict[fx.Node, Value] = {}
        covered: set[str] = set()
        modules = dict(model.named_modules())
        if replaced := [name for name, module in modules.items() if "forward" in vars(module)]:
            raise NotImplementedError(f"{replaced[0] or 'the model'!r} has a forward of its own")
        self._layers: dict[str, nn.Module] = {}  # without the model, which may be deleted
        for node in _trace(model).nodes:
            kind: object
            name, subject = "", None
            match node.op:
                case "placeholder" if not places:
                    places[node] = Value(0)
                    continue
                case "call_module" if (module := modules[node.target]) and _is_known(module):
                    kind, name, subject = type(module), str(node.target), module
                    own = {f"{name}.{each}" for each, _ in (*module.named_parameters(), *module.named_buffers())}
                    if own & covered:
                        raise NotImplementedError(f"{name!r} is used more than once")
                    self._layers[name] = module
                    covered |= own
                case "call_function" if node.target in LAYERS:
                    kind, subject = node.target, functools.partial(node.target, **node.kwargs)
                case "call_function" | "call_method" if _is_flatten(node):
                    kind = nn.Flatten
                case "output" if isinstance(node.args[0], fx.Node):
                    self.result = places[node.args[0]]
                    break
                case "call_module":
                    raise NotImplementedError(f"{node.target!r} is {str(modules[node.target]).partition(chr(10))[0]}")
                case _:
                    raise NotImplementedError(f"its forward has {getattr(node.target, '__name__', node.target)!s}")
            arguments = [places[each] if isinstance(each, fx.Node) else each for each in node.args]
            if _works_in_place(node, subject) and not (kind in RELU and all(len(each.users) == 1 for each in places)):
                raise NotImplementedError(f"{node.name!r} changes a value in place that may be used elsewhere")
            self.operations.append(Operation(kind, name, subject, arguments))
            places[node] = Value(len(self.operations))
        self._places, self._hooks = places_of(model), hook_places(model)  # finding them takes longer than a look
        first: dict[int, str] = {}  # the first key of each tensor, by its address
        for key, tensor in self.tensors().items():
            if tensor.numel() and first.setdefault(tensor.data_ptr(), key) != key:
                raise NotImplementedError(f"{first[tensor.data_ptr()]!r} and {key!r} are the same tensor")
        if unknown := self._places.keys() ^ covered:
            raise NotImplementedError(f"the tensor {min(unknown)!r} belongs to no known layer")
        # Networks with equal descriptions compute the same.
        self.description = str([(each, [*map(type, each.arguments)]) for each in self.operations])

    def shaped(self, tensors: Tensors) -> dict[str, Tensor]:
        """Views of the tensors as the layers need them."""
        return {key: self._shaped(key, tensor) for key, tensor in tensors.items()}

    def _shaped(self, key: str, tensor: Tensor) -> Tensor:
        name, _, part = key.rpartition(".")
        kind = type(self._layers[name])
        if kind is nn.Linear:
            return tensor.transpose(1, 2) if part == "weight" else tensor.unsqueeze(1)
        return tensor.flatten() if kind is nn.BatchNorm1d else tensor

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
        drawn = seeding.drawn(device)
        graph = fx.Tracer().trace(copied)
        if (seeding.drawn(device), plain_attributes(copied)) != (drawn, plain_attributes(model)):
            raise NotImplementedError("its forward draws random numbers, or changes the model")
    return graph


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


def by_layer(tensors: Tensors) -> dict[str, dict[str, Tensor]]:
    """The tensors of each module, by their names in it."""
    layers: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        name, _, part = key.rpartition(".")
        layers.setdefault(name, {})[part] = tensor
    return layers


_HOOKS = "a module or a parameter has hooks"
_known: WeakKeyDictionary[nn.Module, Network | str] = WeakKeyDictionary()


def network_of(model: nn.Module) -> Network | str:
    """The model for several clients at once, or the reason why there is none: a part that may mix clients."""
    if (network := _known.get(model)) is None:
        if any(hook_places(model)):
            return _HOOKS
        try:
            network = Network(model)
        except NotImplementedError as error:
            network = str(error)
        except Exception:  # PyTorch's tracer raises many kinds of errors for models with control flow
            network = "its forward has control flow or other code that PyTorch cannot trace"
        _known[model] = network
    return _HOOKS if isinstance(network, Network) and network.has_hooks() else network


def differentiable(
    network: Network, tensors: Tensors, names: Sequence[str], other: Mapping[object, Layer] = MappingProxyType({})
) -> Callable[[Tensor], tuple[Tensor, Callable[[Tensor], dict[str, Tensor]]]]:
    """The computation with these tensors, which `Network.shaped` has returned.

    `compute(inputs)` returns the outputs and a function: given the outputs' gradient, it returns the gradients of the
    tensors `names`, each in the tensor's own shape. Tensors without influence on the outputs are left out. `other`
    layers replace those of some types. For x + norm(first(x)), forward from the left and backward from the right:

        values     0: x               1: first(0)    2: norm(1)    3: 0 + 2
        needed     (constant input)   False          True          True       whether arguments need gradients
        left       {0: d}             {0: d, 1: d}   {0: d, 2: d}  {3: d}     gradients of values, not yet used

    `depending` has the values that depend on tensors: 1, 2 and 3.
    """
    own, depending, known = by_layer(tensors), set[int](), {**LAYERS, **other}
    # Of each operation: its layer's name, the layer, its arguments, and whether they need gradients.
    layers: list[tuple[str, Callable[..., tuple[Tensor, Backward]], Sequence[Any], bool]] = []
    for place, each in enumerate(network.operations, start=1):
        needed = any(type(value) is Value and value in depending for value in each.arguments)
        if needed or each.name in own:
            depending.add(place)
        layer = functools.partial(known[each.kind], each.subject, own.get(each.name, {}))
        layers.append((each.name, layer, each.arguments, needed))

    def compute(inputs: Tensor) -> tuple[Tensor, Callable[[Tensor], dict[str, Tensor]]]:
        values, backwards = [inputs], list[Backward]()
        for _, layer, arguments, _ in layers:
            value, backward = layer(*[values[each] if type(each) is Value else each for each in arguments])
            values.append(value)
            backwards.append(backward)

        def gradients(of_outputs: Tensor) -> dict[str, Tensor]:
            left: dict[int, Tensor] = {network.result: of_outputs}  # gradients of values
            found: dict[str, Tensor] = {}  # gradients of tensors
            for place in range(len(layers), 0, -1):
                if place in left:
                    name, _, arguments, needed = layers[place - 1]
                    of_inputs, of_tensors = backwards[place - 1](left.pop(place), needed)
                    found.update((f"{name}.{part}", gradient) for part, gradient in of_tensors.items())
                    for value, gradient in zip(arguments, of_inputs, strict=False):
                        if gradient is not None:  # constants have none
                            left[value] = left[value] + gradient if value in left else gradient
            return {name: found[name] for name in names if name in found}

        return values[network.result], gradients

    return compute
