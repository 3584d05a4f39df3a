"""A network of linear layers for several clients at once: each tensor has a leading axis for the clients.

One operation computes a layer for all clients: a batched matrix product, or one batch norm over the channels of all
clients. So a step for ten clients takes little longer than for one, whose operations are too small to occupy a
processor. Clients' values never mix: NaN in one client leaves the others unchanged.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from fedbn_flwr.client.training import Tensors

# Takes a module, the prefix of its tensors' names, the tensors, and the input [clients, examples, ...].
Layer = Callable[[Any, str, Tensors, Tensor], Tensor]


def _linear(module: nn.Linear, name: str, of: Tensors, x: Tensor) -> Tensor:
    weight, rows = of[f"{name}weight"].transpose(1, 2), x.flatten(1, -2)
    bias = of.get(f"{name}bias")
    y = torch.bmm(rows, weight) if bias is None else torch.baddbmm(bias.unsqueeze(1), rows, weight)
    return y.view(*x.shape[:-1], -1)


def batch_norm(module: nn.BatchNorm1d, name: str, of: Tensors, x: Tensor) -> Tensor:
    mean, var, weight, bias = (
        None if (tensor := of.get(f"{name}{part}")) is None else tensor.reshape(-1)
        for part in ("running_mean", "running_var", "weight", "bias")
    )
    by_batch = module.training or mean is None
    if by_batch and mean is not None:
        of[f"{name}num_batches_tracked"].add_(1)
    momentum = 0.0 if module.momentum is None else module.momentum
    folded = x.transpose(0, 1)  # [examples, clients, channels, ...]
    y = F.batch_norm(folded.flatten(1, 2), mean, var, weight, bias, by_batch, momentum, module.eps)
    return y.view(folded.shape).transpose(0, 1)


def _layer_norm(module: nn.LayerNorm, name: str, of: Tensors, x: Tensor) -> Tensor:
    return _scaled(
        F.layer_norm(x, module.normalized_shape, None, None, module.eps), name, of, len(module.normalized_shape)
    )


def _group_norm(module: nn.GroupNorm, name: str, of: Tensors, x: Tensor) -> Tensor:
    y = F.group_norm(x.flatten(0, 1), module.num_groups, None, None, module.eps)
    return _scaled(y.view(x.shape), name, of, x.ndim - 2)


def _scaled(x: Tensor, name: str, of: Tensors, ndim: int) -> Tensor:
    """gamma x + beta, where x has `ndim` dimensions from the channels on, and gamma and beta perhaps fewer."""

    def shaped(value: Tensor) -> Tensor:
        return value.view(len(value), *[1] * (x.ndim - 1 - ndim), *value.shape[1:], *[1] * (ndim + 1 - value.ndim))

    weight, bias = of.get(f"{name}weight"), of.get(f"{name}bias")
    x = x if weight is None else x * shaped(weight)
    return x if bias is None else x + shaped(bias)


def _flatten(module: nn.Flatten, name: str, of: Tensors, x: Tensor) -> Tensor:
    return x.flatten(2)


def _same(module: Callable[[Tensor], Tensor], name: str, of: Tensors, x: Tensor) -> Tensor:
    return module(x)


_ELEMENTWISE = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Sigmoid, nn.Tanh,
    nn.Softplus, nn.Hardtanh, nn.Hardswish, nn.Identity,
)  # fmt: skip
Layers = Mapping[type[nn.Module], Layer]
LAYERS: Layers = {
    nn.Linear: _linear,
    nn.BatchNorm1d: batch_norm,
    nn.LayerNorm: _layer_norm,
    nn.GroupNorm: _group_norm,
    nn.Flatten: _flatten,
    **dict.fromkeys((*_ELEMENTWISE, nn.Dropout), _same),
}
_FUNCTIONS = {
    F.relu, F.gelu, F.silu, F.elu, F.leaky_relu, F.tanh, F.sigmoid, torch.relu, torch.sigmoid, torch.tanh,
    operator.add, operator.sub, operator.mul, operator.truediv, operator.neg,
}  # fmt: skip


class Network:
    """A model's computation for several clients' tensors at once; NotImplementedError says why there is none."""

    def __init__(self, model: nn.Module) -> None:
        self._operations: list[tuple[Callable[..., Tensor], Sequence[Any]]] = []
        described: list[object] = []
        places: dict[fx.Node, int] = {}
        covered: set[str] = set()
        modules = dict(model.named_modules())
        for node in fx.Tracer().trace(model).nodes:
            operation: Callable[..., Tensor] | None
            match node.op:
                case "placeholder" if not places:
                    places[node] = 0
                    continue
                case "call_module" if (module := modules[node.target]) and _is_known(module):
                    prefix = f"{node.target}."
                    operation = functools.partial(_apply, module, prefix)
                    covered |= {prefix + name for name, _ in (*module.named_parameters(), *module.named_buffers())}
                    described.append(repr(module))
                case "call_function" if node.target in _FUNCTIONS:
                    operation = functools.partial(_call, node.target, node.kwargs)
                    described.append((node.target, str(node.kwargs)))
                case "call_function" | "call_method" if _is_flatten(node):
                    operation = _flattened
                    described.append("flatten")
                case "output" if isinstance(node.args[0], fx.Node):
                    self._result = places[node.args[0]]
                    break
                case "call_module":
                    raise NotImplementedError(f"{node.target!r} is {str(modules[node.target]).partition(chr(10))[0]}")
                case _:
                    raise NotImplementedError(f"its forward has {getattr(node.target, '__name__', node.target)!s}")
            arguments = [(True, places[each]) if isinstance(each, fx.Node) else (False, each) for each in node.args]
            self._operations.append((operation, arguments))
            described.append(str(arguments))
            places[node] = len(self._operations)
        names = {name for name, _ in (*model.named_parameters(remove_duplicate=False), *model.named_buffers())}
        if unknown := names ^ covered:
            raise NotImplementedError(f"the tensor {min(unknown)!r} is shared, or belongs to no known layer")
        # Networks with equal descriptions compute the same.
        self.description = tuple(described)
        self._places: dict[str, tuple[dict[str, Any], str]] = {  # of the model's tensors, as in ModelTensors
            f"{prefix}.{name}".removeprefix("."): (table, name)
            for prefix, module in modules.items()
            for table in (module._parameters, module._buffers)
            for name in table
            if table[name] is not None
        }

    def __call__(self, of: Tensors, inputs: Tensor, layers: Layers = LAYERS) -> Tensor:
        values = [inputs]
        for operation, arguments in self._operations:
            values.append(operation(layers, of, *(values[each] if is_value else each for is_value, each in arguments)))
        return values[self._result]

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
    return type(module) in LAYERS


def _apply(module: nn.Module, prefix: str, layers: Layers, of: Tensors, x: Tensor) -> Tensor:
    return layers[type(module)](module, prefix, of, x)


def _call(
    function: Callable[..., Tensor], options: Mapping[str, Any], layers: Layers, of: Tensors, *values: Any
) -> Tensor:
    return function(*values, **options)


def _is_flatten(node: fx.Node) -> bool:
    return node.target in (torch.flatten, "flatten") and tuple(node.args[1:]) in ((1,), (1, -1)) and not node.kwargs


def _flattened(layers: Layers, of: Tensors, x: Tensor, *_: int) -> Tensor:
    return x.flatten(2)


def _has_hooks(module: nn.Module) -> bool:
    return any((module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks))


_known: WeakKeyDictionary[nn.Module, Network | str] = WeakKeyDictionary()


def network_of(model: nn.Module) -> Network | str:
    """The model for several clients at once, or the reason why there is none: a part that may mix clients."""
    if any(map(_has_hooks, model.modules())):
        return "a module has hooks"
    if model not in _known:
        try:
            _known[model] = Network(model)
        except NotImplementedError as error:
            _known[model] = str(error)
        except Exception:  # PyTorch's tracer raises many kinds of errors for models with control flow
            _known[model] = "its forward has control flow or other code that PyTorch cannot trace"
    return _known[model]
