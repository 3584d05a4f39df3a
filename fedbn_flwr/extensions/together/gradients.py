"""The gradients of a network for several clients at once, layer by layer.

For small layers autograd's bookkeeping takes longer than the arithmetic. So the gradients of the most common layers and
of the cross entropy are written out here, and autograd computes those of the others, each by itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from fedbn_flwr.client.losses import cross_entropy
from fedbn_flwr.client.rule import Loss, Tensors
from fedbn_flwr.client.training import ONE_VALUE

from .stacked import LAYERS, RELU, Network, by_layer
from .stacked import Layer as Stacked

Found = dict[str, Tensor]  # the gradients of a layer's tensors, by their names in the layer and in their own shapes
# Takes the gradient of the output, and whether those of the inputs are needed. Returns them, and stores those of the
# layer's tensors in its `Found`.
Back = Callable[[Tensor, bool], Sequence[Tensor | None]]
# Takes a module or function, its shaped tensors, its `Found` and inputs [clients, examples, ...]; returns its output.
Layer = Callable[..., tuple[Tensor, Back]]


def _linear(module: nn.Linear, of: Tensors, found: Found, x: Tensor) -> tuple[Tensor, Back]:
    def back(d: Tensor, needed: bool) -> Sequence[Tensor | None]:
        d = d.flatten(1, -2)
        found["weight"] = torch.bmm(d.transpose(1, 2), rows)
        if bias is not None:
            found["bias"] = d.sum(1)
        return (torch.bmm(d, of["weight"].transpose(1, 2)).view_as(x) if needed else None,)

    rows, bias = x.flatten(1, -2), of.get("bias")
    y = torch.bmm(rows, of["weight"]) if bias is None else torch.baddbmm(bias, rows, of["weight"])
    return y if x.ndim == 3 else y.view(*x.shape[:-1], -1), back


def batch_norm(module: nn.BatchNorm1d, of: Tensors, found: Found, x: Tensor) -> tuple[Tensor, Back]:
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

    def back(d: Tensor, needed: bool) -> Sequence[Tensor | None]:
        before, *affine = torch.ops.aten.native_batch_norm_backward.default(
            d.transpose(0, 1).flatten(1, 2), rows, weight, mean, variance, *saved, by_batch, module.eps,
            [needed, weight is not None, weight is not None],
        )  # fmt: skip
        if weight is not None:
            found["weight"], found["bias"] = (each.view(len(x), -1) for each in affine)
        return (before.view_as(folded).transpose(0, 1) if needed else None,)

    return y.view_as(folded).transpose(0, 1), back


def _relu(_: object, of: Tensors, found: Found, x: Tensor, *in_place: bool) -> tuple[Tensor, Back]:
    y = torch.relu(x)
    return y, lambda d, needed: (torch.ops.aten.threshold_backward.default(d, y, 0),)


def _flatten(_: object, of: Tensors, found: Found, x: Tensor, *dims: int) -> tuple[Tensor, Back]:
    return x.flatten(2), lambda d, needed: (d.reshape(x.shape),)


def by_autograd(layer: Stacked, subject: Any, of: Tensors, found: Found, *inputs: Any) -> tuple[Tensor, Back]:
    leaves = {name: of[name].detach().requires_grad_() for name in ("weight", "bias") if name in of}
    values = [each.detach().requires_grad_() if isinstance(each, Tensor) else each for each in inputs]
    with torch.enable_grad():
        y = layer(subject, {**of, **leaves}, *values)

    def back(d: Tensor, needed: bool) -> Sequence[Tensor | None]:
        tensors = [each for each in (*leaves.values(), *values) if isinstance(each, Tensor)]
        gradients = iter(torch.autograd.grad(y, tensors, d))
        found.update(zip(leaves, gradients, strict=False))  # the first ones
        return [next(gradients) if isinstance(each, Tensor) else None for each in values]

    return y.detach(), back


_LAYERS: dict[object, Layer] = {
    nn.Linear: _linear,
    nn.BatchNorm1d: batch_norm,
    nn.Flatten: _flatten,
    **dict.fromkeys(RELU, _relu),
}


def differentiable(
    network: Network, of: Tensors, names: Sequence[str], other: Mapping[object, Layer] = MappingProxyType({})
) -> Callable[[Tensor], tuple[Tensor, Callable[[Tensor], dict[str, Tensor]]]]:
    """The computation with these tensors, which `Network.shaped` has returned.

    Besides the outputs it returns a function of their gradient. That returns the gradients of the tensors with these
    names, in the shapes of the unshaped ones; there are none for those on which the outputs do not depend. `other`
    layers replace those of some types.
    """
    own, founds, depending = by_layer(of), dict[str, Found](), set[int]()
    known, function = {**_LAYERS, **other}, lambda each, _, *inputs: each(*inputs)
    layers: list[tuple[Callable[..., tuple[Tensor, Back]], Sequence[tuple[bool, Any]], bool]] = []
    for place, (kind, name, subject, arguments) in enumerate(network.operations, start=1):
        layer = known.get(kind) or functools.partial(by_autograd, LAYERS.get(kind, function))
        needed = any(is_value and each in depending for is_value, each in arguments)
        if needed or name in own:
            depending.add(place)
        bound = functools.partial(layer, subject, own.get(name, {}), founds.setdefault(name, {}))
        layers.append((bound, arguments, needed))
    places = [(name, founds[name.rpartition(".")[0]], name.rpartition(".")[2]) for name in names]

    def compute(inputs: Tensor) -> tuple[Tensor, Callable[[Tensor], dict[str, Tensor]]]:
        values, backs = [inputs], list[Back]()
        for layer, arguments, _ in layers:
            value, back = layer(*[values[each] if is_value else each for is_value, each in arguments])
            values.append(value)
            backs.append(back)

        def gradients(of_outputs: Tensor) -> dict[str, Tensor]:
            left = {network.result: of_outputs}  # gradients of values, by their numbers
            for place in range(len(layers), 0, -1):
                if place in left:
                    _, arguments, needed = layers[place - 1]
                    found = backs[place - 1](left.pop(place), needed)
                    for (is_value, each), gradient in zip(arguments, found, strict=False):
                        if is_value and gradient is not None:
                            left[each] = left[each] + gradient if each in left else gradient
            return {name: found[part] for name, found, part in places if part in found}

        return values[network.result], gradients

    return compute


CLASSES = (torch.int64, torch.uint8)  # the types of labels that PyTorch's cross entropy supports


def loss_and_gradient(loss: Loss, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of each client, or of each example, client by client, and the gradient of the clients' losses."""
    if loss is cross_entropy and outputs.ndim == 3 and targets.ndim == 2 and targets.dtype in CLASSES:
        logs = torch.log_softmax(outputs.transpose(1, 2), 1)  # not of the last axis, which would take longer
        classes = targets.unsqueeze(1).long()
        losses = -logs.gather(1, classes)
        d = logs.exp_().scatter_add_(1, classes, torch.full_like(losses, -1.0)).div_(targets.shape[1])
        return losses, d.transpose(1, 2)
    outputs = outputs.detach().requires_grad_()
    with torch.enable_grad():
        losses = torch.stack([loss(*pair) for pair in zip(outputs, targets, strict=True)])
    return losses.detach(), torch.autograd.grad(losses, outputs, torch.ones_like(losses))[0]
