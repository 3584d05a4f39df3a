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
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedbn_flwr.client.losses import cross_entropy
from fedbn_flwr.client.rule import Loss, Tensors
from fedbn_flwr.client.training import ONE_VALUE

Gradients = dict[str, Tensor]  # of a layer's tensors, by their names in the layer and in their own shapes
# Takes the output's gradient, and whether to compute the inputs' gradients. Returns the inputs' gradients, and stores
# the gradients of the layer's tensors in `Gradients`.
Backward = Callable[[Tensor, bool], Sequence[Tensor | None]]
# Takes a module or function, its shaped tensors (`Network.shaped`) by their names in it, its `Gradients` and inputs
# [clients, examples, ...]; returns its output.
Layer = Callable[..., tuple[Tensor, Backward]]
Forward = Callable[..., Tensor]  # the same without gradients


# --- written out ---


def _linear(module: nn.Linear, of: Tensors, gradients: Gradients, x: Tensor) -> tuple[Tensor, Backward]:
    rows, bias = x.flatten(1, -2), of.get("bias")
    y = torch.bmm(rows, of["weight"]) if bias is None else torch.baddbmm(bias, rows, of["weight"])

    def backward(d: Tensor, needed: bool) -> Sequence[Tensor | None]:
        d = d.flatten(1, -2)
        gradients["weight"] = torch.bmm(d.transpose(1, 2), rows)
        if bias is not None:
            gradients["bias"] = d.sum(1)
        return (torch.bmm(d, of["weight"].transpose(1, 2)).view_as(x) if needed else None,)

    return y if x.ndim == 3 else y.view(*x.shape[:-1], -1), backward


def batch_norm(module: nn.BatchNorm1d, of: Tensors, gradients: Gradients, x: Tensor) -> tuple[Tensor, Backward]:
    mean, variance, weight = map(of.get, ("running_mean", "running_var", "weight"))
    by_batch, folded = module.training or mean is None, x.transpose(0, 1)  # [examples, clients, channels, ...]
    rows = folded.flatten(1, 2)
    if by_batch and rows.numel() == rows.shape[1]:
        raise ValueError(ONE_VALUE)
    if by_batch and mean is not None:
        of["num_batches_tracked"].add_(1)
    y, *saved = torch.native_batch_norm(
        rows, weight, of.get("bias"), mean, variance, by_batch, module.momentum or 0.0, module.eps
    )

    def backward(d: Tensor, needed: bool) -> Sequence[Tensor | None]:
        before, *affine = torch.ops.aten.native_batch_norm_backward.default(
            d.transpose(0, 1).flatten(1, 2), rows, weight, mean, variance, *saved, by_batch, module.eps,
            [needed, weight is not None, weight is not None],
        )  # fmt: skip
        if weight is not None:
            gradients["weight"], gradients["bias"] = (each.view(len(x), -1) for each in affine)
        return (before.view_as(folded).transpose(0, 1) if needed else None,)

    return y.view_as(folded).transpose(0, 1), backward


def _relu(_: object, of: Tensors, gradients: Gradients, x: Tensor, *in_place: bool) -> tuple[Tensor, Backward]:
    y = torch.relu(x)
    return y, lambda d, needed: (torch.ops.aten.threshold_backward.default(d, y, 0),)


def _flatten(_: object, of: Tensors, gradients: Gradients, x: Tensor, *dims: int) -> tuple[Tensor, Backward]:
    return x.flatten(2), lambda d, needed: (d.reshape(x.shape),)


# --- by autograd ---


def by_autograd(
    forward: Forward, subject: Any, of: Tensors, gradients: Gradients, *inputs: Any
) -> tuple[Tensor, Backward]:
    leaves = {name: of[name].detach().requires_grad_() for name in ("weight", "bias") if name in of}
    values = [each.detach().requires_grad_() if isinstance(each, Tensor) else each for each in inputs]
    with torch.enable_grad():
        y = forward(subject, {**of, **leaves}, *values)

    def backward(d: Tensor, needed: bool) -> Sequence[Tensor | None]:
        tensors = [each for each in (*leaves.values(), *values) if isinstance(each, Tensor)]
        of_tensors = iter(torch.autograd.grad(y, tensors, d))
        gradients.update(zip(leaves, of_tensors, strict=False))  # the first ones
        return [next(of_tensors) if isinstance(each, Tensor) else None for each in values]

    return y.detach(), backward


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
    # `forward`, without the checks for hooks, which it does not have.
    **dict.fromkeys(_ELEMENTWISE, functools.partial(by_autograd, lambda module, of, x: module.forward(x))),
    **dict.fromkeys(_FUNCTIONS, functools.partial(by_autograd, lambda function, of, *inputs: function(*inputs))),
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
