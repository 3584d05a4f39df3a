"""One pass over the batches of several clients with one model, whose batch norms exchange.

With exchanges all clients normalise with the same statistics. So if their weights are equal, their passes are one pass
over the examples of all, the first client's first. Three things belong to each client: its moments, its loss and its
gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from fedbn_flwr.client.rule import Loss
from fedbn_flwr.exchange.codec import Agreement
from fedbn_flwr.exchange.step import (
    Exchanges,
    ExchangingNorm,
    LayerwiseStep,
    Moments,
    affine_gradients,
    direct_gradients,
    input_gradient,
)
from fedbn_flwr.messages.aggregate import Arrays

from .exchanging import Ask, Batches, SeveralExchanges

Gradients = dict[str, Tensor]  # by the parameters' names
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def is_known(module: nn.Module) -> bool:
    """Whether the module is a layer whose weights can have a gradient for each client."""
    if "forward" in vars(module) or type(module) not in (nn.Linear, *_CONVOLUTIONS):
        return False
    return type(module) is nn.Linear or (module.padding_mode == "zeros" and not isinstance(module.padding, str))


class UnionExchanges(SeveralExchanges):
    """The exchanges of clients with one model, whose batches are one after the other in the union."""

    def __init__(self, model: nn.Module, steps: Sequence[LayerwiseStep], batches: Batches, ask: Ask) -> None:
        super().__init__(model, steps, batches, ask, sum(len(inputs) for inputs, _ in batches))
        self._each = [Exchanges(step, size, 0) for step, size in zip(steps, self.sizes, strict=True)]
        self._layers = {module: name for name, module in model.named_modules()}
        self._keys = {parameter: key for key, parameter in model.named_parameters()}  # layers may share a parameter
        self.found: list[Gradients] = [{} for _ in steps]  # the gradients of each client
        self.agreed: list[tuple[str, Moments]] = []

    @torch.enable_grad()
    def losses(self, model: nn.Module, loss_fn: Loss) -> Tensor:
        """Each client's loss; `found` has the gradients."""
        inputs, targets = zip(*self.batches, strict=True)

        def losses_of(outputs: Any) -> Tensor:
            # A loss may work in place, which PyTorch allows only in copies of parts.
            return torch.stack([loss_fn(own.clone(), y) for own, y in zip(self.parts(outputs), targets, strict=True)])

        model.zero_grad()
        with _shared_weights(model, self):
            losses = self.pass_through(model, torch.cat(inputs), losses_of)
        if any(parameter.grad is not None for parameter in model.parameters()):
            model.zero_grad()
            raise NotImplementedError("the model uses a parameter outside of its layer")
        return losses

    def parts(self, values: Tensor) -> Sequence[Tensor]:
        """The clients' parts of values of the union."""
        if not isinstance(values, Tensor) or len(values) != self.batch:
            raise NotImplementedError("the model has no tensors with a row for each example")
        return values.split(self.sizes)  # type: ignore[no-any-return]

    def note(self, module: nn.Module, name: str, gradients: Iterable[Tensor]) -> None:
        """Add the clients' gradients of one of the module's parameters; a module may be called twice."""
        if (parameter := module._parameters[name]) is not None:
            key = self._keys[parameter]
            for found, gradient in zip(self.found, gradients, strict=True):
                found[key] = found[key] + gradient if key in found else gradient

    # --- what batch norms exchange: a row for each client ---

    def measured(self, y: Tensor) -> tuple[Tensor, Tensor]:
        rows = (each.measured(part) for each, part in zip(self._each, self.parts(y), strict=True))
        mean, var = map(torch.stack, zip(*rows, strict=True))
        return mean, var

    def mean(self, values: Tensor) -> Tensor:
        return torch.stack([each.mean(part) for each, part in zip(self._each, self.parts(values), strict=True)])

    def batch_size(self, mean: Tensor) -> Tensor:
        return torch.tensor(self.sizes, dtype=torch.float64)

    def ask(self, kind: str, values: int, own: Arrays) -> Agreement:
        rows = {name: value if value.ndim == 2 else [value] * len(self.sizes) for name, value in own.items()}
        return self.ask_all(kind, values, cast(Arrays, rows))

    def norm(self, layer: _BatchNorm, y: Tensor, gamma: Tensor, beta: Tensor, moments: Moments) -> Tensor:
        self.agreed.append((self._layers[layer], moments))
        out: Tensor = _UnionNorm.apply(y, gamma.detach(), beta.detach(), layer, moments, self)  # type: ignore[no-untyped-call]
        return out


class _UnionNorm(ExchangingNorm):
    """Its backward pass exchanges the gradients of all clients, which are rows here."""

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        (y, gamma), layer, moments, union = ctx.saved_tensors, ctx.layer, ctx.moments, ctx.exchanges
        inverse = torch.rsqrt(moments.var + layer.eps)
        pairs = [*zip(union.parts(d_out), union.parts(y), strict=True)]
        affine = [affine_gradients(*pair, gamma, moments.mean, moments.var, layer.eps) for pair in pairs]
        of_gamma, of_beta = map(torch.stack, zip(*affine, strict=True))
        union.note(layer, "weight", of_gamma)
        union.note(layer, "bias", of_beta)
        d_mean, d_var = direct_gradients(of_gamma, of_beta, gamma, inverse)
        d_mean, d_var = union.gradients(moments, d_mean, d_var)
        values = gamma, moments.mean, inverse
        if d_mean.ndim == 1 and len({*union.sizes}) == 1:  # nothing differs between the clients
            d_y = input_gradient(d_out, y, *values, d_mean, d_var, moments.size[0])
        else:
            rows = zip(d_mean.expand_as(of_gamma), d_var.expand_as(of_gamma), moments.size, strict=True)
            d_y = torch.cat([input_gradient(*pair, *values, *row) for pair, row in zip(pairs, rows, strict=True)])
        return d_y, None, None, None, None, None


class _SharedLayer(torch.autograd.Function):
    """A convolution or linear layer, whose weights have a gradient for each client."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, _: Tensor, layer: nn.Module, union: UnionExchanges) -> Tensor:
        ctx.save_for_backward(x)
        ctx.layer, ctx.union = layer, union
        y: Tensor = type(layer).forward(layer, x)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        (x,), layer, union = ctx.saved_tensors, ctx.layer, ctx.union
        backward = _linear if isinstance(layer, nn.Linear) else _convolution
        of_x = backward(layer, d_out, x, (True, False))[0] if ctx.needs_input_grad[0] else None
        pairs = zip(union.parts(d_out), union.parts(x), strict=True)
        found = [backward(layer, *pair, (False, True))[1:] for pair in pairs]
        for name, gradients in zip(("weight", "bias"), zip(*found, strict=True), strict=True):
            union.note(layer, name, gradients)
        return of_x, None, None, None


def _shared(start: Tensor, layer: nn.Module, union: UnionExchanges, input: Tensor) -> Tensor:
    y: Tensor = _SharedLayer.apply(input, start, layer, union)  # type: ignore[no-untyped-call]
    return y


def _linear(layer: nn.Linear, d: Tensor, x: Tensor, wanted: tuple[bool, bool]) -> tuple[Any, ...]:
    if wanted[0]:
        return d @ layer.weight, None, None
    d, x = d.flatten(0, -2), x.flatten(0, -2)
    return None, d.T @ x, d.sum(0)


def _convolution(layer: Any, d: Tensor, x: Tensor, wanted: tuple[bool, bool]) -> tuple[Any, ...]:
    bias = layer.bias is not None
    return torch.ops.aten.convolution_backward(  # type: ignore[no-any-return]
        d, x, layer.weight, [layer.out_channels] if bias else None, layer.stride, layer.padding, layer.dilation,
        False, [0] * (x.ndim - 2), layer.groups, [*wanted, wanted[1] and bias],
    )  # fmt: skip


@contextmanager
def _shared_weights(model: nn.Module, union: UnionExchanges) -> Iterator[None]:
    """In this block, the layers' weights have a gradient for each client, in `union.found`."""
    layers = [module for module in model.modules() if is_known(module)]
    start = torch.zeros((), requires_grad=True)  # backward must reach layers whose inputs need no gradient
    try:
        for layer in layers:
            layer.forward = functools.partial(_shared, start, layer, union)
        yield
    finally:
        for layer in layers:
            layer.__dict__.pop("forward", None)
