"""One training step whose gradient is that of batch norm over the batches of all clients.

FedTAN (Wang, Shi, Chang, "Why Batch Normalization Damage Federated Learning on Non-IID Data?", Algorithms 2 and
3): forward, each batch norm averages its batch mean and variance over the clients; backward, the gradients with
respect to both. Paper's symbols: y the layer's input, mu and var the global statistics, p_i a client's weight, F_i
its loss, n its number of values per channel.

The model stays unchanged: only during the step, each batch norm has another `forward`. Per layer

    dF/dy = dF_i/dy (direct) + (dF/dvar * 2 (y - mu) + dF/dmu) / n

For this, a layer has three nodes in autograd's graph, whose backward passes run in this order: `_Normalise` computes
the direct gradients, `_Cohort` exchanges those of mu and var, and `_Moments` adds the terms through mu and var. On a
GPU one thread of autograd serves all clients of a process, and must not wait for another client. Autograd runs a node
whose outputs are on the CPU in the thread that called backward, so those of `_Cohort` are. A token that each `_Cohort`
passes to the next one makes the order of the exchanges that of the layers, on all clients.

The direct gradients that are exchanged follow from those of gamma and beta, which native kernels compute:

    dF_i/dmu  = -gamma / sqrt(var + eps) * dF_i/dbeta
    dF_i/dvar = -gamma / (2 (var + eps)) * dF_i/dgamma

The gradient of the mean must be this direct one: adding dF_i/dvar * dvar/dmu, which is zero over all clients
but not over one, breaks the equality.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from fedbn_flwr.errors import MessageError
from fedbn_flwr.norms.roles import computes_as_batch_norm

from .codec import Agreement, Contribution

Exchange = Callable[[Contribution], Agreement]


@dataclass
class _Call:
    """One pass through a batch norm; a layer that is used twice has two."""

    mean: Tensor  # mu and var, the agreed statistics
    var: Tensor
    gamma: Tensor
    eps: float


class LayerwiseStep:
    """Loss and gradient of one batch, for the first step of `client.training.train`.

    Parameters
    ----------
    exchange
        Sends a contribution to the server, and returns the cohort's agreement.
    fused
        Send mean and variance together (2L exchanges for L layers), or one after the other as in the paper (3L).
    backward
        Also exchange gradients. Without it each client uses its own instead of the cohort's: the papers'
        "FedAvg + Algorithm 2".
    examples, partition
        Of the client; part of each contribution.
    """

    def __init__(
        self,
        exchange: Exchange,
        *,
        fused: bool = True,
        backward: bool = True,
        examples: int = 0,
        partition: int | None = None,
    ) -> None:
        self.exchange = exchange
        self.fused = fused
        self.backward = backward
        self.examples = examples
        self.partition = partition
        self._token = torch.zeros(())
        self._left = 0
        self._images = 0

    def exchanges(self, calls: int) -> int:
        """The number of exchanges in a step with so many batch norm calls."""
        return calls * ((1 if self.fused else 2) + self.backward)

    def __call__(
        self, model: nn.Module, inputs: Tensor, targets: Tensor, loss_fn: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        self._images = len(inputs)
        self._left = self.exchanges(count_calls(model, inputs))
        self._token = torch.zeros((), requires_grad=True)
        with replaced_forward(model, self._normalise):
            loss = loss_fn(model(inputs), targets)
        # The last token too: layers on which the loss does not depend take part in the exchanges, as on all clients.
        torch.autograd.backward([loss, self._token], [None, torch.zeros(())])
        return loss.detach()

    def swap(self, kind: str, tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], int]:
        """Exchange tensors: the cohort's values of them, and the number of images in all batches."""
        self._left -= 1
        # NumPy has no bfloat16, which becomes float32.
        own = {
            key: value.to(torch.promote_types(value.dtype, torch.float16)).cpu().numpy()
            for key, value in tensors.items()
        }
        agreed = self.exchange(
            Contribution(kind, own, self._images, self._left, examples=self.examples, partition=self.partition)
        )
        # A copy: PyTorch accepts no read-only array.
        values = {key: torch.from_numpy(np.array(agreed.tensors[key])).to(value) for key, value in tensors.items()}
        return values, agreed.images

    def _normalise(self, layer: _BatchNorm, y: Tensor) -> Tensor:
        """Batch norm's forward, over the cohort: y [N, C, ...]."""
        layer._check_input_dim(y)
        dims = [d for d in range(y.ndim) if d != 1]
        values = y.detach()
        if self.fused:
            if y.device.type == "cpu":
                mean = values.mean(dims)
                var = _variance(values, mean, dims)
            else:
                mean, var = torch.batch_norm_update_stats(values, None, None, 0.0)
            agreed, images = self.swap("moments", {"mean": mean, "var": var})
            mean, var = agreed["mean"], agreed["var"]
        else:
            mean = self.swap("mean", {"mean": values.mean(dims)})[0]["mean"]
            agreed, images = self.swap("variance", {"var": _variance(values, mean, dims)})
            var = agreed["var"]
        # Running variances are unbiased over the values of all clients, as they would be over the union.
        _update_running(layer, mean, var, count=images * (y.numel() // (y.shape[0] * y.shape[1])))
        gamma = torch.ones_like(mean) if layer.weight is None else layer.weight
        beta = torch.zeros_like(mean) if layer.bias is None else layer.bias
        call = _Call(mean, var, gamma.detach(), layer.eps)
        y, mean, var = _Moments.apply(y, mean, var, call)  # type: ignore[no-untyped-call]
        mean, var, self._token = _Cohort.apply(mean, var, self._token, self)  # type: ignore[no-untyped-call]
        out: Tensor = _Normalise.apply(y, gamma, beta, mean, var, call)  # type: ignore[no-untyped-call]
        return out


class _Moments(torch.autograd.Function):
    """Batch norm's input and the statistics, which depend on it."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, mean: Tensor, var: Tensor, call: _Call) -> tuple[Tensor, Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(y)
        ctx.call = call
        return y, mean, var

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor | None, d_mean: Tensor, d_var: Tensor) -> tuple[Tensor | None, ...]:
        if d_out is None:  # the loss does not depend on the layer
            return None, None, None, None
        (y,), call = ctx.saved_tensors, ctx.call
        n = y.numel() // y.shape[1]
        # d_out * gamma / sqrt(var + eps) + slope * y + shift; the latter by batch norm's kernel, in one pass. It is
        # called directly because F.batch_norm of PyTorch 2.11 refuses eps = 0.
        slope = d_var * (2 / n)
        shift = d_mean / n - slope * call.mean
        zeros, ones = torch.zeros_like(call.mean), torch.ones_like(call.var)
        d_y = torch.batch_norm(y, slope, shift, zeros, ones, False, 0.0, 0.0, torch.backends.cudnn.enabled)
        scale = call.gamma * torch.rsqrt(call.var + call.eps)
        d_y.addcmul_(d_out, scale.view([1, -1] + [1] * (y.ndim - 2)))
        return d_y, None, None, None


class _Cohort(torch.autograd.Function):
    """The statistics on the CPU; backward exchanges the loss's gradients with respect to them."""

    @staticmethod
    def forward(
        ctx: Any, mean: Tensor, var: Tensor, token: Tensor, step: LayerwiseStep
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.step, ctx.device = step, mean.device
        return mean.cpu(), var.cpu(), token.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_mean: Tensor, d_var: Tensor, d_token: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.step.backward:
            agreed, _ = ctx.step.swap("gradients", {"mean": d_mean, "var": d_var})
            d_mean, d_var = agreed["mean"], agreed["var"]
        return d_mean.to(ctx.device), d_var.to(ctx.device), d_token, None


class _Normalise(torch.autograd.Function):
    """Batch norm with given statistics; `_Moments` has the rest of the gradient of its input."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, gamma: Tensor, beta: Tensor, mean: Tensor, var: Tensor, call: _Call) -> Tensor:
        ctx.save_for_backward(y)
        ctx.call = call
        return F.batch_norm(y, call.mean, call.var, gamma, beta, training=False, eps=call.eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        (y,), call = ctx.saved_tensors, ctx.call
        _, d_gamma, d_beta = torch.ops.aten.native_batch_norm_backward(
            d_out, y, call.gamma, call.mean, call.var, None, None, False, call.eps, [False, True, True]
        )
        inverse = torch.rsqrt(call.var + call.eps)
        d_mean = -call.gamma * inverse * d_beta
        d_var = -0.5 * call.gamma * inverse.square() * d_gamma
        return d_out, d_gamma, d_beta, d_mean.cpu(), d_var.cpu(), None


def _variance(values: Tensor, mean: Tensor, dims: list[int]) -> Tensor:
    """The variance per channel around `mean`.

    On a CPU the three operations together take a fifth of the time of native batch norm's kernel, which adds up element
    by element, and a tenth of that of torch.var_mean.
    """
    return (values - mean.view([1, -1] + [1] * (values.ndim - 2))).square_().mean(dims)


def _update_running(layer: _BatchNorm, mean: Tensor, var: Tensor, count: int) -> None:
    """Update running statistics as PyTorch does: unbiased variance, momentum or (None) a cumulative mean."""
    if layer.running_mean is None or layer.running_var is None:
        return
    assert layer.num_batches_tracked is not None
    layer.num_batches_tracked.add_(1)
    share = 1.0 / float(layer.num_batches_tracked) if layer.momentum is None else layer.momentum
    layer.running_mean.lerp_(mean, share)
    layer.running_var.lerp_(var * (count / max(count - 1, 1)), share)


@contextmanager
def replaced_forward(model: nn.Module, forward: Callable[[_BatchNorm, Tensor], Tensor]) -> Iterator[None]:
    """Inside, batch norms that train call `forward(layer, input)`; frozen ones (in eval mode) are not changed."""
    layers = []
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and module.training:
            if not computes_as_batch_norm(module):
                raise MessageError(
                    f"batch norm over the clients' batches replaces plain batch norm, but {name!r} is a "
                    f"{type(module).__name__}, whose own arithmetic would be lost; use a model with plain batch norm"
                )
            layers.append(module)
    try:
        for layer in layers:
            # On the instance, so that the class, the state dict and other models do not change.
            layer.forward = _bind(forward, layer)  # type: ignore[method-assign,assignment]
        yield
    finally:
        for layer in layers:
            layer.__dict__.pop("forward", None)


def _bind(forward: Callable[[_BatchNorm, Tensor], Tensor], layer: _BatchNorm) -> Callable[[Tensor], Tensor]:
    return lambda y: forward(layer, y)


def count_calls(model: nn.Module, inputs: Tensor) -> int:
    """The number of calls of training batch norms in a forward pass; the model remembers its last count."""
    training = [name for name, module in model.named_modules() if isinstance(module, _BatchNorm) and module.training]
    case = (inputs.shape[1:], training)
    if (counted := getattr(model, "_batch_norm_calls", None)) is None or counted[0] != case:
        counted = model._batch_norm_calls = case, _count(model, inputs)  # type: ignore[assignment]
    return int(counted[1])


@torch.no_grad()
def _count(model: nn.Module, inputs: Tensor) -> int:
    """Counts the calls with two images; changes nothing."""
    calls = 0

    def count(layer: _BatchNorm, y: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return y

    devices = [inputs.device] if inputs.device.type == "cuda" else []
    with torch.random.fork_rng(devices), replaced_forward(model, count):
        model(inputs[:2])
    return calls


def check_batch(images: int, *, allowed: int, own: int) -> None:
    """Refuse a batch of fewer images than the strategy (`allowed`) or the client (`own`) allows to exchange."""
    if images >= max(allowed, own):
        return
    cures = []
    if images < own:
        cures.append(f"min-batch={images} in this node's config (or BNClient(min_batch={images}))")
    if images < allowed:
        cures.append(f"min_batch: {images} of the strategy")
    raise MessageError(
        f"the batch of this client has {images} image{'s' if images != 1 else ''}, and it refuses to exchange the "
        f"statistics of fewer than {max(allowed, own)}, because these reveal the images; use larger batches, or allow "
        f"it by {' and '.join(cures)}"
    )
