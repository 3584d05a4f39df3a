"""The exchange of FedTAN as an attacker sees it: the mean over a batch of one vector per image.

The server knows the model and all agreements, so the vector of an image does not depend on the other images of the
batch: its mean and mean square per channel at the input of each batch norm, and, for a label, its gradients with
respect to the agreed mean and variance. A client's contribution is the mean of these vectors over its batch.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from fedbn_flwr.exchange.codec import Agreement, Contribution
from fedbn_flwr.exchange.step import LayerwiseStep, replaced_forward

Batch = tuple[Tensor, Tensor]  # normalised images and labels


@dataclass(frozen=True)
class Layer:
    """What the cohort agreed on at one batch norm: its moments, and the gradients with respect to them."""

    mean: Tensor
    var: Tensor
    d_mean: Tensor
    d_var: Tensor


def contributions(model: nn.Module, batch: Batch, agreed: Sequence[Contribution] | None = None) -> list[Contribution]:
    """What a client with this batch sends in a layer-wise step, if it receives `agreed`; by default its own values.

    The contributions of the union of equal batches, as one client, are the agreements of their cohort.
    """
    sent: list[Contribution] = []

    def exchange(contribution: Contribution) -> Agreement:
        sent.append(contribution)
        answer = contribution if agreed is None else agreed[len(sent) - 1]
        return Agreement(answer.tensors, answer.values, answer.values / answer.batch)

    LayerwiseStep(exchange)(copy.deepcopy(model).train(), *batch, F.cross_entropy)
    return sent


def layers_of(exchanged: Sequence[Contribution]) -> list[Layer]:
    """The values of all exchanges of a step, by layer."""
    values = [{key: torch.from_numpy(array.copy()) for key, array in each.tensors.items()} for each in exchanged]
    count = len(values) // 2  # moments forward, then gradients backward
    pairs = zip(values[:count], reversed(values[count:]), strict=True)
    return [Layer(up["mean"], up["var"], down["mean"], down["var"]) for up, down in pairs]


def frozen_layers(model: nn.Module) -> list[Layer]:
    """The layers of a model whose batch norms are frozen at their running statistics."""
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    return [Layer(n.running_mean, n.running_var, *[torch.zeros_like(n.running_mean)] * 2) for n in norms]


def vector(layers: Sequence[Layer], *, gradients: bool) -> Tensor:
    """Contributed values in the order of the columns of `features`."""
    parts = [part for layer in layers for part in (layer.mean, layer.var + layer.mean.square())]
    if gradients:
        parts += [part for layer in layers for part in (layer.d_mean, layer.d_var)]
    return torch.cat(parts)


def features(
    model: nn.Module, layers: Sequence[Layer], inputs: Tensor, targets: Tensor | None, *, graph: bool = False
) -> Tensor:
    """A row per image [N, D]; with `targets` also the gradients. `graph`: differentiable with respect to `inputs`."""
    with torch.set_grad_enabled(graph or targets is not None):
        passed = _pass(model, layers, inputs, per_image=True)
        columns = [part for layer in passed.calls for part in (layer.mean, layer.square)]
        if targets is not None:
            loss = F.cross_entropy(passed.logits, targets, reduction="sum") + passed.through
            affine = [part for call in passed.calls for part in (call.gamma, call.beta)]
            found = torch.autograd.grad(loss, affine, create_graph=graph)
            for layer, call, d_gamma, d_beta in zip(layers, passed.calls, found[::2], found[1::2], strict=True):
                inverse = torch.rsqrt(layer.var + call.eps)
                gamma = call.gamma.detach()
                columns += [-gamma * inverse * d_beta, -0.5 * gamma * inverse.square() * d_gamma]
    return torch.cat(columns, 1)


def weight_gradient(
    model: nn.Module, layers: Sequence[Layer], inputs: Tensor, targets: Tensor, *, graph: bool = False
) -> Tensor:
    """The gradient of the mean loss with respect to all parameters, as one vector: one step's change of a model."""
    passed = _pass(model, layers, inputs, per_image=False)
    loss = (F.cross_entropy(passed.logits, targets, reduction="sum") + passed.through) / len(inputs)
    found = torch.autograd.grad(loss, list(model.parameters()), create_graph=graph)
    return torch.cat([each.flatten() for each in found])


@dataclass
class _Call:
    mean: Tensor  # [N, C]
    square: Tensor
    gamma: Tensor
    beta: Tensor
    eps: float


@dataclass
class _Pass:
    logits: Tensor
    through: Tensor  # a term whose gradient is that of the agreed statistics, see exchange/step.py
    calls: list[_Call]


def _pass(model: nn.Module, layers: Sequence[Layer], inputs: Tensor, *, per_image: bool) -> _Pass:
    """A forward pass with the agreed statistics; `per_image`: with a copy of gamma and beta for each image."""
    calls: list[_Call] = []
    terms: list[Tensor] = [torch.zeros((), dtype=inputs.dtype)]

    def normalise(_: str, norm: _BatchNorm, y: Tensor) -> Tensor:
        layer, shape = layers[len(calls)], [-1, y.shape[1]] + [1] * (y.ndim - 2)
        places = list(range(2, y.ndim))
        gamma, beta = norm.weight, norm.bias
        if per_image:
            gamma, beta = (each.detach().repeat(len(y), 1).requires_grad_() for each in (gamma, beta))
        centred = y - layer.mean.view(shape)
        mean, square, spread = (each.mean(places) if places else each for each in (y, y.square(), centred.square()))
        terms.append((layer.d_mean * mean).sum() + (layer.d_var * spread).sum())
        calls.append(_Call(mean, square, gamma, beta, norm.eps))
        scaled = centred * torch.rsqrt(layer.var + norm.eps).view(shape)
        return scaled * gamma.view(shape) + beta.view(shape)

    with replaced_forward(model.train(), normalise):
        logits = model(inputs)
    return _Pass(logits, torch.stack(terms).sum(), calls)
