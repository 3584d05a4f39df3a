"""One training step with the gradient of batch norm over the batches of all clients.

FedTAN (Wang, Shi, Chang, "Why Batch Normalization Damage Federated Learning on Non-IID Data?", Algorithms 2 and 3):
forward, each batch norm averages its batch mean and variance over the clients; backward, the gradients with respect to
both. Paper's symbols: y the layer's input, mu and var the global statistics, p_i a client's weight, F_i its loss. B_i
is the number of examples in its batch, v_i the number of values per channel in the layer's input.

The union that the clients represent has each example of client i with the weight p_i / B_i, so each of its values has
this weight in mu and var. Among all values client i then has the share q_i, and r is the mean of v_i / B_i:

    q_i = p_i v_i / (B_i r)      r = sum_i p_i v_i / B_i      mu = sum_i q_i mu_i

If all clients have examples of one size, r is that size, q_i is p_i, and B_i r is v_i. In padded series it isn't:
only the real positions count (norms.variants), so v_i depends on the lengths in the batch.

The model stays unchanged: only during the step, each batch norm has another `forward`. Per layer

    dF/dy = dF_i/dy (direct) + (dF/dvar * 2 (y - mu) + dF/dmu) / (B_i r)

`ExchangingNorm` is an autograd function whose backward exchanges. It runs in the thread that called it, also on a GPU,
and waits there for the other clients.

The direct gradients that are exchanged follow from the gradients of gamma and beta, which native kernels compute:

    dF_i/dmu  = -gamma / sqrt(var + eps) * dF_i/dbeta
    dF_i/dvar = -gamma / (2 (var + eps)) * dF_i/dgamma

The gradient of the mean must be this direct one: adding dF_i/dvar * dvar/dmu, which is zero over all clients but not
over one, breaks the equality.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from fedbn_flwr.batch import Outputs, Value, count
from fedbn_flwr.errors import MessageError, SettingsError
from fedbn_flwr.messages.aggregate import Arrays
from fedbn_flwr.models.tensors import as_array
from fedbn_flwr.norms.compound import DECLARE, computes_batch_norm, followed
from fedbn_flwr.norms.roles import batch_norms
from fedbn_flwr.norms.variants import at_real_positions

from .codec import END, Agreement, Contribution

Exchange = Callable[[Contribution], Agreement]


def no_exchange(contribution: Contribution) -> Agreement:
    """The exchange of a client that is not connected to the others: an error."""
    raise MessageError("exchanges with the other clients need a ClientApp made by fedbn_flwr.client_app")


@dataclass(frozen=True)
class LayerwiseStep:
    """Computes loss and gradients of one batch with exchanges, for the first step of `client.training.train`.

    Parameters
    ----------
    exchange
        Sends a contribution to the server, and returns the agreement.
    fused
        Send mean and variance together (2L exchanges for L layers), or one after the other as in the paper (3L).
    backward
        Also exchange gradients. Without it each client uses its own gradients instead of the clients' mean: the papers'
        "FedAvg + Algorithm 2".
    examples, partition
        The client's number of examples and its partition, which each contribution contains.
    min_batch, own_min_batch
        The smallest batch that the strategy allows, and the smallest that the client allows (`check_batch`).
    """

    exchange: Exchange
    fused: bool = True
    backward: bool = True
    examples: int = 0
    partition: int | None = None
    min_batch: int = 1
    own_min_batch: int = 1

    def __call__(
        self, model: nn.Module, inputs: Value, targets: Value, loss_fn: Callable[[Outputs, Value], Tensor]
    ) -> Tensor:
        batch = count(inputs)
        check_batch(batch, min_batch=self.min_batch, own_min_batch=self.own_min_batch)  # before anything is sent
        return StepExchanges(self, batch).pass_through(model, inputs, lambda outputs: loss_fn(outputs, targets))


def normalise(exchanges: StepExchanges, name: str, layer: _BatchNorm, y: Tensor) -> Tensor:
    """Batch norm's forward, over all clients: y [N, C, ...]; `name` is the layer's in the model."""
    layer._check_input_dim(y)
    like = layer.weight if layer.running_mean is None else layer.running_mean  # may be float32 when y is float16
    moments = exchanges.moments(name, y.detach() if like is None else y.detach().to(like.dtype))
    update_running(layer, moments)
    gamma = torch.ones_like(moments.mean) if layer.weight is None else layer.weight
    beta = torch.zeros_like(moments.mean) if layer.bias is None else layer.bias
    # Inputs need no gradient, but backward must reach this function.
    start = y if y.requires_grad else y.detach().requires_grad_()
    out: Tensor = ExchangingNorm.apply(start, gamma, beta, layer, moments, exchanges)  # type: ignore[no-untyped-call]
    return out


class ExchangingNorm(torch.autograd.Function):
    """Batch norm with given statistics; its backward pass exchanges the gradients with respect to them."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, gamma: Tensor, beta: Tensor, layer: _BatchNorm, moments: Moments, exchanges: StepExchanges
    ) -> Tensor:
        ctx.save_for_backward(y, gamma)
        ctx.layer, ctx.moments, ctx.exchanges = layer, moments, exchanges
        return F.batch_norm(y, moments.mean, moments.var, gamma, beta, training=False, eps=layer.eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        (y, gamma), moments, eps = ctx.saved_tensors, ctx.moments, ctx.layer.eps
        mean, var, size = moments.mean, moments.var, moments.size
        inverse = torch.rsqrt(var + eps)
        # The forward pass, whose statistics were given, saved nothing, and a GPU does not accept None for it.
        unsaved = mean.new_empty(0)
        _, d_gamma, d_beta = torch.ops.aten.native_batch_norm_backward(
            d_out, y, gamma, mean, var, unsaved, unsaved, False, eps, [False, True, True]
        )
        direct = -gamma * inverse * d_beta, -0.5 * gamma * inverse.square() * d_gamma
        d_mean, d_var = ctx.exchanges.gradients(moments, *direct)
        # d_out * gamma / sqrt(var + eps) + slope * y + shift; the latter by batch norm's kernel, in one pass. It is
        # called directly because F.batch_norm of PyTorch 2.11 refuses eps = 0.
        slope = d_var * (2 / size)
        shift = d_mean / size - slope * mean
        zeros, ones = torch.zeros_like(mean), torch.ones_like(mean)
        d_y = torch.batch_norm(y, slope, shift, zeros, ones, False, 0.0, 0.0, torch.backends.cudnn.enabled)
        d_y.addcmul_(d_out, (gamma * inverse).view([1, -1] + [1] * (y.ndim - 2)))
        return d_y, d_gamma, d_beta, None, None, None


@dataclass(eq=False)
class Moments:
    """The agreed statistics of one pass through one batch norm; a layer that is used twice has two passes."""

    layer: str  # its name
    mean: Tensor
    var: Tensor
    values: int  # v_i
    of_all: int  # the values of all clients
    size: float | Tensor  # B_i r


class StepExchanges:
    """What a client measures and exchanges in one step: moments forward, and gradients backward.

    Parameters
    ----------
    step
        The settings of the step.
    batch
        The number of examples in the batch.
    """

    def __init__(self, step: LayerwiseStep, batch: int) -> None:
        self.step, self.batch = step, batch
        self._open: list[Moments] = []  # passes whose gradients are yet to be exchanged

    def pass_through(self, model: nn.Module, inputs: Value, loss: Callable[[Outputs], Tensor]) -> Tensor:
        """Compute the loss of the outputs and the gradients, with all exchanges; returns the detached loss."""
        with replaced_forward(model, functools.partial(normalise, self)):
            outputs = model(inputs)
        if not self._open:
            raise MessageError(
                "no batch norm ran in the forward pass of this client's model, so there is nothing to exchange; use "
                "FedAvg, or a model whose forward calls its batch norms"
            )
        # Otherwise autograd's only thread for a GPU would run the backward passes of all clients there.
        with replaced_forward(model, _called_outside), torch.autograd.set_multithreading_enabled(False):
            losses = loss(outputs)
            losses.backward(torch.ones_like(losses))
        self.finish()
        return losses.detach()

    def moments(self, layer: str, y: Tensor) -> Moments:
        """The agreed mean and variance of a layer's input y [N, C, ...]."""
        values = y.numel() // y.shape[1]
        if self.step.fused:
            mean, var = self.measured(y)
            (mean, var), agreement = self.agree_on(layer, "moments", values, mean=mean, var=var)
        else:
            (mean,), _ = self.agree_on(layer, "mean", values, mean=self.mean(y))
            (var,), agreement = self.agree_on(layer, "variance", values, var=self.variance(y, mean))
        size = self.batch_size(mean) * agreement.per_example
        self._open.append(Moments(layer, mean, var, values, agreement.values, size))
        return self._open[-1]

    def gradients(self, moments: Moments, mean: Tensor, var: Tensor) -> Sequence[Tensor]:
        """The gradients with respect to the agreed moments: the clients' mean, or these of the client."""
        self._open.remove(moments)
        if not self.step.backward:
            return mean, var
        return self.agree_on(moments.layer, "gradients", moments.values, mean=mean, var=var)[0]

    def finish(self) -> None:
        """Exchange the gradients of layers on which the loss does not depend; they are the same on all clients.

        The last gradients end the exchanges; without any, a contribution without tensors does.
        """
        for moments in reversed([*self._open]):
            self.gradients(moments, torch.zeros_like(moments.mean), torch.zeros_like(moments.var))
        if not self.step.backward:
            self.agree_on("", END, self.batch)

    def measured(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """The mean and variance of each channel."""
        if y.device.type != "cpu":
            return torch.batch_norm_update_stats(y, None, None, 0.0)
        mean = self.mean(y)
        return mean, self.variance(y, mean)

    def mean(self, values: Tensor) -> Tensor:
        """The mean of each channel."""
        return values.mean([d for d in range(values.ndim) if d != 1])

    def variance(self, values: Tensor, mean: Tensor) -> Tensor:
        """The variance of each channel around `mean`.

        On a CPU these three operations take a fifth of the time of batch norm's native kernel, which adds up element by
        element, and a tenth of the time of torch.var_mean.
        """
        return self.mean((values - mean.view([1, -1] + [1] * (values.ndim - 2))).square_())

    def batch_size(self, mean: Tensor) -> float | Tensor:
        """B_i, for all channels or for each one."""
        return self.batch

    def agree_on(self, layer: str, kind: str, values: int, **tensors: Tensor) -> tuple[Sequence[Tensor], Agreement]:
        """Exchange tensors, and return their agreed values and the whole agreement."""
        agreement = self.ask(layer, kind, values, {name: as_array(tensor) for name, tensor in tensors.items()})
        # PyTorch does not accept read-only arrays, so this copies them.
        agreed = [torch.from_numpy(np.array(agreement.tensors[name])).to(tensor) for name, tensor in tensors.items()]
        return agreed, agreement

    def ask(self, layer: str, kind: str, values: int, own: Arrays) -> Agreement:
        step = self.step
        return step.exchange(Contribution(layer, kind, own, self.batch, values, step.examples, step.partition))


def _called_outside(name: str, layer: _BatchNorm, y: Tensor) -> Tensor:
    raise MessageError(
        f"FedTAN's step exchanges calls of batch norm in the model's forward only, and {name!r} ({layer}) was called "
        "after it: by the loss, which must get all that it needs from forward, or again in the backward pass; turn "
        "activation checkpointing (memory_efficient=True) off"
    )


def update_running(layer: _BatchNorm, moments: Moments) -> None:
    """Update running statistics as PyTorch does on the union: unbiased variance, momentum or a cumulative mean."""
    if layer.running_mean is None or layer.running_var is None:
        return
    assert layer.num_batches_tracked is not None
    layer.num_batches_tracked.add_(1)
    share = 1.0 / float(layer.num_batches_tracked) if layer.momentum is None else layer.momentum
    layer.running_mean.lerp_(moments.mean, share)
    layer.running_var.lerp_(moments.var * (moments.of_all / max(moments.of_all - 1, 1)), share)


def exchanged_layers(model: nn.Module) -> dict[str, _BatchNorm]:
    """The batch norms that train, by name, without frozen ones (in eval mode).

    SettingsError names a layer that does not compute batch norm, perhaps followed by other modules.
    """
    what = "batch norm over the clients' batches"
    layers = {name: layer for name, layer in batch_norms(model, what).items() if layer.training}
    for name, layer in layers.items():
        if not computes_batch_norm(layer):
            raise SettingsError(
                f"{what} replaces plain batch norm, but {name!r} is a {type(layer).__name__}, whose own arithmetic "
                f"would be lost; use a model with plain batch norm (model.norm: bn), or another strategy; {DECLARE}"
            )
    return layers


@contextmanager
def replaced_forward(model: nn.Module, forward: Callable[[str, _BatchNorm, Tensor], Tensor]) -> Iterator[None]:
    """In this block, batch norms that train call `forward(name, layer, values)`, without padded positions."""
    layers = exchanged_layers(model)
    try:
        for name, layer in layers.items():
            # On the instance, so that the class, the state dict and other models do not change.
            norm = functools.partial(at_real_positions, functools.partial(forward, name, layer))
            layer.forward = functools.partial(followed, layer, norm)  # type: ignore[method-assign]
        yield
    finally:
        for layer in layers.values():
            layer.__dict__.pop("forward", None)


def check_batch(examples: int, *, min_batch: int, own_min_batch: int) -> None:
    """Raise an error if the batch has fewer examples than the strategy or the client (`own_min_batch`) allows."""
    limits = {
        f"the strategy's min_batch ({min_batch})": min_batch,
        f"min-batch in this node's config or BNClient(min_batch=...) ({own_min_batch})": own_min_batch,
    }
    if above := [name for name, limit in limits.items() if limit > examples]:
        raise MessageError(
            f"the batch of this client has {examples} example{'s' if examples != 1 else ''}, and it refuses to "
            f"exchange the statistics of fewer than {max(min_batch, own_min_batch)} examples, which would reveal them; "
            f"use larger batches, or lower {' and '.join(above)}"
        )
