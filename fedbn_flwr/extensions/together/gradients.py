"""The layers and losses that can be computed for several clients at once, with their gradients.

One operation computes a layer for all clients: a batched matrix product, or one batch norm over the channels of all
clients. So a step for ten clients takes little longer than for one, whose operations are too small to occupy a
processor. Clients' values never mix: NaN in one client leaves the others unchanged.

For small layers autograd's bookkeeping takes longer than the arithmetic. So the gradients of the most common layers and
of the cross entropy are written out here, and autograd computes the gradients of each other layer by itself.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedbn_flwr.client.losses import cross_entropy
from fedbn_flwr.client.rule import Loss, Tensors
from fedbn_flwr.client.training import ONE_VALUE

# A function of the output's gradient, and of whether the inputs need gradients. It returns the gradients of the inputs,
# None for those without one, and of the layer's tensors, by their names in the layer and in their own shapes.
Backward = Callable[[Tensor, bool], tuple[Sequence[Tensor | None], Tensors]]
# A function of a module or function, its shaped tensors (`Network.shaped`) by their names in it, and its inputs
# [clients, examples, ...]. It returns the output and its `Backward`.
Layer = Callable[Concatenate[Any, Tensors, ...], tuple[Tensor, Backward]]
Forward = Callable[Concatenate[Any, Tensors, ...], Tensor]  # the same without gradients


# --- written out ---


def _linear(module: nn.Linear, tensors: Tensors, x: Tensor) -> tuple[Tensor, Backward]:
    rows, weight, bias = x.flatten(1, -2), tensors["weight"], tensors.get("bias")
    y = torch.bmm(rows, weight) if bias is None else torch.baddbmm(bias, rows, weight)

    def backward(d: Tensor, needed: bool) -> tuple[Sequence[Tensor | None], Tensors]:
        d = d.flatten(1, -2)
        gradients = {"weight": torch.bmm(d.transpose(1, 2), rows)}
        if bias is not None:
            gradients["bias"] = d.sum(1)
        return (torch.bmm(d, weight.transpose(1, 2)).view_as(x) if needed else None,), gradients

    return y if x.ndim == 3 else y.view(*x.shape[:-1], -1), backward


def batch_norm(module: nn.BatchNorm1d, tensors: Tensors, x: Tensor) -> tuple[Tensor, Backward]:
    mean, variance, weight = map(tensors.get, ("running_mean", "running_var", "weight"))
    by_batch, folded = module.training or mean is None, x.transpose(0, 1)  # [examples, clients, channels, ...]
    rows = folded.flatten(1, 2)
    if by_batch and rows.numel() == rows.shape[1]:
        raise ValueError(ONE_VALUE)
    if by_batch and mean is not None:
        tensors["num_batches_tracked"].add_(1)
    y, *saved = torch.native_batch_norm(
        rows, weight, tensors.get("bias"), mean, variance, by_batch, module.momentum or 0.0, module.eps
    )

    def backward(d: Tensor, needed: bool) -> tuple[Sequence[Tensor | None], Tensors]:
        of_rows, *affine = torch.ops.aten.native_batch_norm_backward.default(
            d.transpose(0, 1).flatten(1, 2), rows, weight, mean, variance, *saved, by_batch, module.eps,
            [needed, weight is not None, weight is not None],
        )  # fmt: skip
        of_x = of_rows.view_as(folded).transpose(0, 1) if needed else None
        if weight is None:
            return (of_x,), {}
        return (of_x,), {name: each.view(len(x), -1) for name, each in zip(("weight", "bias"), affine, strict=True)}

    return y.view_as(folded).transpose(0, 1), backward


def _relu(_: object, tensors: Tensors, x: Tensor, *in_place: bool) -> tuple[Tensor, Backward]:
    y = torch.relu(x)
    return y, lambda d, needed: ((torch.ops.aten.threshold_backward.default(d, y, 0),), {})


def _flatten(_: object, tensors: Tensors, x: Tensor, *dims: int) -> tuple[Tensor, Backward]:
    return x.flatten(2), lambda d, needed: ((d.reshape(x.shape),), {})


# --- by autograd ---


def by_autograd(forward: Forward, subject: Any, tensors: Tensors, *inputs: Any) -> tuple[Tensor, Backward]:
    leaves = {name: tensors[name].detach().requires_grad_() for name in ("weight", "bias") if name in tensors}
    values = [each.detach().requires_grad_() if isinstance(each, Tensor) else each for each in inputs]
    with torch.enable_grad():
        y = forward(subject, {**tensors, **leaves}, *values)

    def backward(d: Tensor, needed: bool) -> tuple[Sequence[Tensor | None], Tensors]:
        with_gradient = [*leaves.values(), *(each for each in values if isinstance(each, Tensor))]
        left = iter(torch.autograd.grad(y, with_gradient, d))
        gradients = dict(zip(leaves, left, strict=False))
        return [next(left) if isinstance(each, Tensor) else None for each in values], gradients

    return y.detach(), backward


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
    nn.Flatten: _flatten,
    **dict.fromkeys(RELU, _relu),
    nn.LayerNorm: functools.partial(by_autograd, _layer_norm),
    nn.GroupNorm: functools.partial(by_autograd, _group_norm),
    **dict.fromkeys(_ELEMENTWISE, functools.partial(by_autograd, _elementwise)),
    **dict.fromkeys(_FUNCTIONS, functools.partial(by_autograd, _function)),
}


# --- the loss ---


def loss_and_gradient(loss: Loss, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of each client, or of each example, client by client, and the gradient of the clients' losses."""
    if (
        loss is cross_entropy
        and outputs.ndim == 3
        and targets.ndim == 2
        and targets.dtype in (torch.int64, torch.uint8)
    ):
        logs = torch.log_softmax(outputs.transpose(1, 2), 1)  # not of the last axis, which would take longer
        classes = targets.unsqueeze(1).long()
        losses = -logs.gather(1, classes)
        d = logs.exp_().scatter_add_(1, classes, torch.full_like(losses, -1.0)).div_(targets.shape[1])
        return losses, d.transpose(1, 2)
    outputs = outputs.detach().requires_grad_()
    with torch.enable_grad():
        losses = torch.stack([loss(*pair) for pair in zip(outputs, targets, strict=True)])
    return losses.detach(), torch.autograd.grad(losses, outputs, torch.ones_like(losses))[0]
