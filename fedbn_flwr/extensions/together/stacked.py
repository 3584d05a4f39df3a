"""A network of linear layers for several clients at once: each tensor has a leading axis for the clients.

One operation computes a layer for all clients: a batched matrix product, or one batch norm over the channels of all
clients. So a step for ten clients takes little longer than for one, whose operations are too small to occupy a
processor. Clients' values never mix: NaN in one client leaves the others unchanged.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from fedbn_flwr import seeding
from fedbn_flwr.client.rule import Tensors
from fedbn_flwr.models.tensors import places_of

# Takes a module, its tensors by their names in it, as made by `Network.shaped`, and an input [clients, examples, ...].
Layer = Callable[..., Tensor]


def _layer_norm(module: nn.LayerNorm, of: Tensors, x: Tensor) -> Tensor:
    ndim = len(module.normalized_shape)
    return _scaled(F.layer_norm(x, module.normalized_shape, None, None, module.eps), of, ndim)


def _group_norm(module: nn.GroupNorm, of: Tensors, x: Tensor) -> Tensor:
    y = F.group_norm(x.flatten(0, 1), module.num_groups, None, None, module.eps)
    return _scaled(y.view(x.shape), of, x.ndim - 2)


def _scaled(x: Tensor, of: Tensors, ndim: int) -> Tensor:
    """gamma x + beta, where x has `ndim` dimensions from the channels on, and gamma and beta perhaps fewer."""

    def shaped(value: Tensor) -> Tensor:
        return value.view(len(value), *[1] * (x.ndim - 1 - ndim), *value.shape[1:], *[1] * (ndim + 1 - value.ndim))

    weight, bias = of.get("weight"), of.get("bias")
    x = x if weight is None else x * shaped(weight)
    return x if bias is None else x + shaped(bias)


def _same(module: Any, of: Tensors, x: Tensor) -> Tensor:
    return cast(Tensor, module.forward(x))  # without the checks for hooks, which it does not have


_ELEMENTWISE = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Sigmoid, nn.Tanh,
    nn.Softplus, nn.Hardtanh, nn.Hardswish, nn.Identity,
)  # fmt: skip
# Layers whose gradients autograd computes; `gradients` has the others.
LAYERS: Mapping[object, Layer] = {
    nn.LayerNorm: _layer_norm,
    nn.GroupNorm: _group_norm,
    **dict.fromkeys((*_ELEMENTWISE, nn.Dropout), _same),
}
_FUNCTIONS = {
    F.relu, F.gelu, F.silu, F.elu, F.leaky_relu, F.tanh, F.sigmoid, torch.relu, torch.sigmoid, torch.tanh,
    operator.add, operator.sub, operator.mul, operator.truediv, operator.neg,
}  # fmt: skip


RELU = (nn.ReLU, F.relu, torch.relu)


class Network:
    """A model's computation for several clients' tensors at once; NotImplementedError says why there is none."""

    def __init__(self, model: nn.Module) -> None:
        # The type of a module, its name and the module, or a function, "" and itself with its options; and arguments,
        # each of which is the number of an earlier value (0 is the input) or a constant.
        self.operations: list[tuple[object, str, Any, Sequence[tuple[bool, Any]]]] = []
        places: dict[fx.Node, int] = {}
        covered: set[str] = set()
        modules = dict(model.named_modules())
        if replaced := [name for name, module in modules.items() if "forward" in vars(module)]:
            raise NotImplementedError(f"{replaced[0] or 'the model'!r} has a forward of its own")
        self._layers: dict[str, nn.Module] = {}  # without the model, which may be deleted
        for node in fx.Tracer().trace(model).nodes:
            kind: object
            name, of = "", None
            match node.op:
                case "placeholder" if not places:
                    places[node] = 0
                    continue
                case "call_module" if (module := modules[node.target]) and _is_known(module):
                    kind, name, of = type(module), str(node.target), module
                    own = {f"{name}.{each}" for each, _ in (*module.named_parameters(), *module.named_buffers())}
                    if own & covered:
                        raise NotImplementedError(f"{name!r} is used more than once")
                    self._layers[name] = module
                    covered |= own
                case "call_function" if node.target in _FUNCTIONS:
                    kind, of = node.target, functools.partial(node.target, **node.kwargs)
                case "call_function" | "call_method" if _is_flatten(node):
                    kind = nn.Flatten
                case "output" if isinstance(node.args[0], fx.Node):
                    self.result = places[node.args[0]]
                    break
                case "call_module":
                    raise NotImplementedError(f"{node.target!r} is {str(modules[node.target]).partition(chr(10))[0]}")
                case _:
                    raise NotImplementedError(f"its forward has {getattr(node.target, '__name__', node.target)!s}")
            arguments = [(True, places[each]) if isinstance(each, fx.Node) else (False, each) for each in node.args]
            if _works_in_place(node, of) and not (kind in RELU and all(len(each.users) == 1 for each in places)):
                raise NotImplementedError(f"{node.name!r} changes a value in place that may be used elsewhere")
            self.operations.append((kind, name, of, arguments))
            places[node] = len(self.operations)
        self._places, self.hooks = places_of(model), _hooks(model)  # which takes longer than checking them
        first: dict[int, str] = {}  # the first key of each tensor, by its address
        for key, tensor in self.tensors().items():
            if tensor.numel() and first.setdefault(tensor.data_ptr(), key) != key:
                raise NotImplementedError(f"{first[tensor.data_ptr()]!r} and {key!r} are the same tensor")
        if unknown := self._places.keys() ^ covered:
            raise NotImplementedError(f"the tensor {min(unknown)!r} belongs to no known layer")
        # Networks with equal descriptions compute the same.
        self.description = str(self.operations)

    def shaped(self, of: Tensors) -> dict[str, Tensor]:
        """Views of the tensors as the layers need them."""
        return {key: self._shaped(key, tensor) for key, tensor in of.items()}

    def _shaped(self, key: str, tensor: Tensor) -> Tensor:
        name, _, part = key.rpartition(".")
        kind = type(self._layers[name])
        if kind is nn.Linear:
            return tensor.transpose(1, 2) if part == "weight" else tensor.unsqueeze(1)
        return tensor.flatten() if kind is nn.BatchNorm1d else tensor

    def tensors(self) -> dict[str, Tensor]:
        """The model's parameters and buffers, by name."""
        return {key: table[name] for key, (table, name) in self._places.items()}


def _is_known(module: nn.Module) -> bool:
    if isinstance(module, nn.Dropout) and module.p:
        return False
    if isinstance(module, nn.BatchNorm1d) and module.momentum is None:
        return False  # each client's mean is over another number of batches
    if isinstance(module, nn.Flatten) and (module.start_dim, module.end_dim) != (1, -1):
        return False
    return type(module) in {nn.Linear, nn.BatchNorm1d, nn.Flatten, *LAYERS}


def _is_flatten(node: fx.Node) -> bool:
    return node.target in (torch.flatten, "flatten") and tuple(node.args[1:]) in ((1,), (1, -1)) and not node.kwargs


def _works_in_place(node: fx.Node, module: object) -> bool:
    return any(each is True for each in (getattr(module, "inplace", False), node.kwargs.get("inplace"), *node.args))


def by_layer(of: Tensors) -> dict[str, dict[str, Tensor]]:
    """The tensors of each module, by their names in it."""
    found: dict[str, dict[str, Tensor]] = {}
    for key, tensor in of.items():
        name, _, part = key.rpartition(".")
        found.setdefault(name, {})[part] = tensor
    return found


def _hooks(model: nn.Module) -> list[Mapping[int, object]]:
    """The places of the hooks of all modules."""
    hooks = [
        (m._forward_hooks, m._forward_pre_hooks, m._backward_hooks, m._backward_pre_hooks) for m in model.modules()
    ]
    return list(itertools.chain.from_iterable(hooks))


@contextmanager
def _repeatable(model: nn.Module) -> Iterator[None]:
    """NotImplementedError if the block draws random numbers or changes the model, which a trace would not repeat."""
    device = next((parameter.device for parameter in model.parameters()), None)
    with seeding.preserve_rng():
        drawn, attributes = seeding.drawn(device), [(vars(module), {**vars(module)}) for module in model.modules()]
        try:
            yield
        finally:
            same = seeding.drawn(device) == drawn
            for now, before in attributes:
                if [*map(id, now.values())] != [*map(id, before.values())]:
                    same = False
                    now.clear()
                    now.update(before)
    if not same:
        raise NotImplementedError("its forward draws random numbers, or changes the model")


_known: WeakKeyDictionary[nn.Module, Network | str] = WeakKeyDictionary()


def network_of(model: nn.Module) -> Network | str:
    """The model for several clients at once, or the reason why there is none: a part that may mix clients."""
    if (found := _known.get(model)) is None:
        if any(_hooks(model)):
            return "a module has hooks"
        try:
            with _repeatable(model):
                found = Network(model)
        except NotImplementedError as error:
            found = str(error)
        except Exception:  # PyTorch's tracer raises many kinds of errors for models with control flow
            found = "its forward has control flow or other code that PyTorch cannot trace"
        _known[model] = found
    return "a module has hooks" if isinstance(found, Network) and any(found.hooks) else found
