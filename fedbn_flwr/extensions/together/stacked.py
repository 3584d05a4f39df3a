"""Layers and losses for several clients at once: tensors have a leading axis for the clients.

One operation computes a layer for all clients: a batched matrix product, or one batch norm over the channels of all
clients. So a step for ten clients takes little longer than for one, whose operations are too small to occupy a
processor. Clients' values never mix: NaN in one client leaves the others unchanged.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, Concatenate

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedbn_flwr.client.losses import cross_entropy
from fedbn_flwr.client.rule import Loss, Tensors

# A function of a module or function, the clients' tensors by their names in the module, and inputs [clients, examples,
# ...].
Layer = Callable[Concatenate[Any, Tensors, ...], Tensor]


def _linear(module: nn.Linear, tensors: Tensors, x: Tensor) -> Tensor:
    rows, weight, bias = x.flatten(1, -2), tensors["weight"].transpose(1, 2), tensors.get("bias")
    y = torch.bmm(rows, weight) if bias is None else torch.baddbmm(bias.unsqueeze(1), rows, weight)
    return y if x.ndim == 3 else y.view(*x.shape[:-1], -1)


def batch_norm(module: nn.BatchNorm1d, tensors: Tensors, x: Tensor) -> Tensor:
    flat = {name: tensor.flatten() for name, tensor in tensors.items()}
    mean, by_batch = flat.get("running_mean"), module.training or "running_mean" not in flat
    if by_batch and mean is not None:
        tensors["num_batches_tracked"].add_(1)
    folded = x.transpose(0, 1)  # [examples, clients, channels, ...]
    y = F.batch_norm(
        folded.flatten(1, 2), mean, flat.get("running_var"), flat.get("weight"), flat.get("bias"), by_batch,
        module.momentum or 0.0, module.eps,
    )  # fmt: skip
    return y.view(folded.shape).transpose(0, 1)


def _layer_norm(module: nn.LayerNorm, tensors: Tensors, x: Tensor) -> Tensor:
    ndim = len(module.normalized_shape)
    return _scaled(F.layer_norm(x, module.normalized_shape, None, None, module.eps), tensors, ndim)


def _group_norm(module: nn.GroupNorm, tensors: Tensors, x: Tensor) -> Tensor:
    y = F.group_norm(x.flatten(0, 1), module.num_groups, None, None, module.eps)
    return _scaled(y.view(x.shape), tensors, x.ndim - 2)


def _scaled(x: Tensor, tensors: Tensors, ndim: int) -> Tensor:
    """gamma x + beta, where x has `ndim` dimensions from the channels on, and gamma and beta perhaps fewer."""

    def shaped(value: Tensor) -> Tensor:
        return value.view(len(value), *[1] * (x.ndim - 1 - ndim), *value.shape[1:], *[1] * (ndim + 1 - value.ndim))

    weight, bias = tensors.get("weight"), tensors.get("bias")
    x = x if weight is None else x * shaped(weight)
    return x if bias is None else x + shaped(bias)


def _relu(_: object, tensors: Tensors, x: Tensor, *in_place: bool) -> Tensor:
    return torch.relu(x)


def _flatten(_: object, tensors: Tensors, x: Tensor, *dims: int) -> Tensor:
    return x.flatten(2)


def _elementwise(module: nn.Module, _: Tensors, x: Tensor) -> Tensor:
    return module.forward(x)  # type: ignore[no-any-return]  # without the checks for hooks, which it does not have


def _function(function: Callable[..., Tensor], _: Tensors, *inputs: Any) -> Tensor:
    return function(*inputs)


RELU = (nn.ReLU, F.relu, torch.relu)
_ELEMENTWISE = (
    nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Sigmoid, nn.Tanh, nn.Softplus,
    nn.Hardtanh, nn.Hardswish, nn.Identity, nn.Dropout,
)  # fmt: skip
_FUNCTIONS = (
    F.gelu, F.silu, F.elu, F.leaky_relu, F.tanh, F.sigmoid, torch.sigmoid, torch.tanh,
    operator.add, operator.sub, operator.mul, operator.truediv, operator.neg,
)  # fmt: skip
# All known layers, by the type of the module or by the function.
LAYERS: Mapping[object, Layer] = {
    nn.Linear: _linear,
    nn.BatchNorm1d: batch_norm,
    nn.LayerNorm: _layer_norm,
    nn.GroupNorm: _group_norm,
    nn.Flatten: _flatten,
    **dict.fromkeys(RELU, _relu),
    **dict.fromkeys(_ELEMENTWISE, _elementwise),
    **dict.fromkeys(_FUNCTIONS, _function),
}


def losses_of(loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    """The loss of each client."""
    whole = targets.ndim == 2 and targets.dtype in (torch.int64, torch.uint8)
    if loss is cross_entropy and outputs.ndim == 3 and whole:
        targets = targets.long()
        each = F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
        return each.sum(1) / (targets != -100).sum(1)  # PyTorch's label of examples that it ignores
    return torch.stack([loss(*pair) for pair in zip(outputs, targets, strict=True)])
