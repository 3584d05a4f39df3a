"""The first step of clients whose batch norms exchange (FedTAN), for any network of convolutions and linear layers.

All clients begin the round with the same model, and with exchanges they normalise with the same statistics. So their
passes are one pass over the batches of all, one after the other, in which only three things belong to each client: its
moments, its loss, and the gradients of its weights. All further steps are each client's own.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from fedbn_flwr import seeding
from fedbn_flwr.client.rule import ClientRule, Loss
from fedbn_flwr.client.training import Trained, Training
from fedbn_flwr.exchange.codec import Agreement
from fedbn_flwr.exchange.step import (
    Exchanges,
    LayerwiseStep,
    Moments,
    affine_gradients,
    check_batch,
    direct_gradients,
    exchanged_layers,
    input_gradient,
    no_exchange,
    outputs_without_trace,
    update_running,
)
from fedbn_flwr.messages.aggregate import Arrays
from fedbn_flwr.models.identity import hook_places, hooks_of, identity, plain_attributes

from .exchanging import Ask, Batches, SeveralExchanges
from .waiting import AskAll, Waiting

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
Gradients = dict[str, Tensor]  # by the parameters' names


@dataclass(eq=False)
class Joined(Waiting):
    """A round whose first step is computed with those of others."""

    batch: tuple[Tensor, Tensor]  # the first one
    step: LayerwiseStep
    received: list[Tensor] = field(init=False)  # the values of the network that the round begins with
    rest: Waiting | None = field(default=None, init=False)  # the steps after it, if they are computed at once too

    def __post_init__(self) -> None:
        self.received = [tensor.detach().clone() for tensor in _tensors(self.training.model)]

    @property
    def weights(self) -> Tensor:
        """The values of all parameters, in one tensor: comparing each would make the host wait for the device."""
        count = sum(1 for _ in self.training.model.parameters())
        return torch.cat([tensor.flatten() for tensor in self.received[:count]])

    @property
    def kind(self) -> Hashable:
        """What rounds must have in common."""
        inputs, step = self.batch[0], self.step
        return (
            plain_attributes(self.training.model), inputs.shape[1:], inputs.dtype, inputs.device,
            identity(self.training.loss), step.fused, step.backward,
        )  # fmt: skip

    def forget(self) -> None:
        self.training.first_step = self.step
        if self.rest is not None:
            self.rest.forget()

    def finished(self) -> Trained:
        return super().finished() if self.rest is None else self.rest.finished()

    @torch.no_grad()
    def restore(self) -> None:
        torch._foreach_copy_(_tensors(self.training.model), self.received)


def _tensors(model: nn.Module) -> list[Tensor]:
    return [*itertools.chain(model.parameters(), model.buffers())]


def joined_of(training: Training) -> Joined | str:
    """The round, whose first step may be computed with those of others, or why it cannot be."""
    if (problem := not_joined(training)) is not None:
        return problem
    with seeding.streams(training.seed, training.device):
        before = seeding.drawn(training.device)
        training.batches = batches = list(training.batches)
        if seeding.drawn(training.device) != before and any(
            (type(rule).adjust, type(rule).begin) != (ClientRule.adjust, ClientRule.begin) for rule in training.rules
        ):
            return "its batches are drawn at random, and its client rules may draw too"
    inputs, targets = batches[0] if batches else (None, None)
    if not (isinstance(inputs, Tensor) and inputs.is_floating_point() and isinstance(targets, Tensor)):
        return "it has no batches, or their inputs are no tensor of floats"
    step = cast(LayerwiseStep, training.first_step)
    check_batch(len(inputs), min_batch=step.min_batch, own_min_batch=step.own_min_batch)
    return Joined(training, (inputs.to(training.device), targets.to(training.device)), step)


# The models whose first steps could not be computed in one pass, with the reason.
_unfit: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()


def not_joined(training: Training) -> str | None:
    """Why the first step cannot be computed with those of other clients, as far as it is known without batches."""
    step, model = training.first_step, training.model
    if model in _unfit:
        return _unfit[model]
    if not (isinstance(step, LayerwiseStep) and step.exchange is no_exchange):
        return "the first step of a round exchanges statistics"
    if any(rule.trains_alone for rule in training.rules):
        return "a client rule has a loss of its own, or changes the model"
    if any(hook_places(model)) or any(map(hooks_of, model.parameters())):
        return "a module or a parameter has hooks"
    norms = exchanged_layers(model)
    for name, module in model.named_modules():
        own = itertools.chain(module._parameters.values(), module._buffers.values())
        if name not in norms and any(each is not None for each in own) and not _is_known(module):
            return f"{name or 'the model'!r} is {str(module).partition(chr(10))[0]}"
    return None


def _is_known(module: nn.Module) -> bool:
    if "forward" in vars(module) or type(module) not in (nn.Linear, *_CONVOLUTIONS):
        return False
    return type(module) is nn.Linear or (module.padding_mode == "zeros" and not isinstance(module.padding, str))


def take_first_steps(rounds: Sequence[Joined], ask: AskAll) -> None:
    """Compute the first steps, which the rounds then take; `ask` does an exchange.

    NotImplementedError says why they cannot be computed in one pass, now and in later rounds.
    """
    try:
        with seeding.preserve_rng():
            _take_first_steps(rounds, ask)
    except NotImplementedError as error:
        _unfit.update((each.training.model, str(error)) for each in rounds)
        raise


def _take_first_steps(rounds: Sequence[Joined], ask: AskAll) -> None:
    first, *others = rounds
    model = first.training.model
    if any(each.kind != first.kind for each in others):
        raise NotImplementedError("the clients' networks, losses or batches differ")
    weights = first.weights
    if not all(each.weights.equal(weights) for each in others):  # statistics do not matter, and each updates its own
        raise NotImplementedError("the clients' weights differ")
    first.restore()
    union = UnionExchanges(
        model,
        [each.step for each in rounds],
        [each.batch for each in rounds],
        lambda contributions: ask(dict(zip(rounds, contributions, strict=True))),
    )
    _check(union, model, first.training.loss)
    losses = union.losses(model, first.training.loss)
    for each, own, gradients in zip(rounds, losses, union.found, strict=True):
        each.training.first_step = KnownStep(own, gradients, union.agreed)


@dataclass(frozen=True)
class KnownStep:
    """A first step that has been computed."""

    loss: Tensor
    gradients: Gradients
    agreed: Sequence[tuple[str, Moments]]  # of each call of a batch norm: the layer's name and the moments

    @torch.no_grad()
    def __call__(self, model: nn.Module, inputs: Any, targets: Any, loss_fn: Loss) -> Tensor:
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.grad = self.gradients.get(name)
        layers = exchanged_layers(model)
        for name, moments in self.agreed:
            update_running(layers[name], moments)
        return self.loss


class UnionExchanges(SeveralExchanges):
    """The exchanges of clients with one model, whose batches are one after the other in the union."""

    def __init__(self, model: nn.Module, steps: Sequence[LayerwiseStep], batches: Batches, ask: Ask) -> None:
        super().__init__(model, steps, batches, ask, sum(len(targets) for _, targets in batches))
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
            return torch.stack([loss_fn(*pair) for pair in zip(self.parts(outputs), targets, strict=True)])

        model.zero_grad()
        with _shared_weights(model, self):
            losses = self.pass_through(model, torch.cat(inputs), losses_of)
        if any(parameter.grad is not None for parameter in model.parameters()):
            model.zero_grad()
            raise NotImplementedError("the model uses a parameter outside of its layer")
        return losses

    def parts(self, values: Tensor) -> Sequence[Tensor]:
        """The clients' parts of values of the union."""
        if len(values) != self.batch:
            raise NotImplementedError("the model changes the number of examples")
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


class _UnionNorm(torch.autograd.Function):
    """Batch norm with given statistics, whose backward pass exchanges the gradients of all clients."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, gamma: Tensor, beta: Tensor, layer: _BatchNorm, moments: Moments, union: UnionExchanges
    ) -> Tensor:
        ctx.save_for_backward(y, gamma)
        ctx.layer, ctx.moments, ctx.union = layer, moments, union
        return nn.functional.batch_norm(y, moments.mean, moments.var, gamma, beta, training=False, eps=layer.eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        (y, gamma), layer, moments, union = ctx.saved_tensors, ctx.layer, ctx.moments, ctx.union
        values = gamma, moments.mean, moments.var, layer.eps
        pairs = [*zip(union.parts(d_out), union.parts(y), strict=True)]
        affine = [affine_gradients(*pair, *values) for pair in pairs]
        of_gamma, of_beta = map(torch.stack, zip(*affine, strict=True))
        union.note(layer, "weight", of_gamma)
        union.note(layer, "bias", of_beta)
        d_mean, d_var = direct_gradients(of_gamma, of_beta, gamma, moments.var, layer.eps)
        d_mean, d_var = union.gradients(moments, d_mean, d_var)
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


def _shared(start: Tensor, layer: nn.Module, union: UnionExchanges, x: Tensor) -> Tensor:
    y: Tensor = _SharedLayer.apply(x, start, layer, union)  # type: ignore[no-untyped-call]
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
    layers = [module for module in model.modules() if _is_known(module)]
    start = torch.zeros((), requires_grad=True)  # backward must reach layers whose inputs need no gradient
    try:
        for layer in layers:
            layer.forward = functools.partial(_shared, start, layer, union)
        yield
    finally:
        for layer in layers:
            layer.__dict__.pop("forward", None)


# The models that `_check` has found fit, and what decides it.
_fit: WeakKeyDictionary[nn.Module, Hashable] = WeakKeyDictionary()


def _check(union: UnionExchanges, model: nn.Module, loss_fn: Loss) -> None:
    """NotImplementedError if random numbers are drawn, which must depend on each client alone, if the forward changes
    the model, or if an output depends on other examples, apart from batch norm.

    Every other client's inputs are NaN, which must not appear in the outputs of the others.
    """
    inputs, targets = zip(*union.batches, strict=True)
    case = inputs[0].shape[1:], plain_attributes(model), identity(loss_fn), len(inputs) > 1
    if _fit.get(model) == case:
        return
    before = seeding.drawn(inputs[0].device)
    mixed = torch.cat([torch.full_like(x, torch.nan) if place % 2 else x for place, x in enumerate(inputs)])
    outputs = outputs_without_trace(model, mixed, lambda layer, y: y.clone())  # an activation may work in place
    if not isinstance(outputs, Tensor) or len(outputs) != union.batch:
        raise NotImplementedError("the model does not return a tensor with a row for each example")
    parts = union.parts(outputs)
    loss_fn(parts[0], targets[0])
    if seeding.drawn(inputs[0].device) != before:
        raise NotImplementedError("the model or the loss draws random numbers")
    if any(part.isnan().any() for part in parts[::2]):
        raise NotImplementedError("the model computes an example's output from other examples too")
    if plain_attributes(model) != case[1]:
        raise NotImplementedError("the model's forward changes the model")
    _fit[model] = case
