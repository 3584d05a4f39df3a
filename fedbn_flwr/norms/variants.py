"""Batch norms that PyTorch lacks: for padded series, without running statistics, renormalised, and hybrid."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, cast

import torch
from annotated_types import Ge
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from fedbn_flwr.declared import checked
from fedbn_flwr.errors import SettingsError


class MaskedBatchNorm1d(nn.BatchNorm1d):
    """nn.BatchNorm1d over the real positions of series [N, C, T]: `norm(series, mask)`.

    `mask` is bool [N, T], True at real positions. Batch and running statistics use only real positions, and the output
    at all other positions is zero. Without a mask the layer is nn.BatchNorm1d.
    """

    def forward(self, input: Tensor, mask: Tensor | None = None) -> Tensor:
        return at_real_positions(super().forward, input, mask)


def real_values(input: Tensor, mask: Tensor | None = None) -> Tensor:
    """The values at the real positions [V, C] of series [N, C, T]; without a mask, `input`."""
    if mask is None:
        return input
    expected = [len(input), input.shape[-1]]
    if input.ndim != 3 or mask.dtype is not torch.bool or [*mask.shape] != expected:
        raise ValueError(
            f"the mask is {mask.dtype} {[*mask.shape]} for an input {[*input.shape]}; expected torch.bool [N, T], true "
            "at the real positions of an input [N, C, T]"
        )
    values = input.transpose(1, 2)[mask]
    if not len(values):
        raise ValueError("the mask of a batch has no real position")
    return values


def at_real_positions(function: Callable[[Tensor], Tensor], input: Tensor, mask: Tensor | None = None) -> Tensor:
    """Apply `function` to the values at real positions; the result is zero elsewhere. Without a mask, to all values."""
    values = function(real_values(input, mask))
    if mask is None:
        return values
    places = values.new_zeros([*mask.shape, values.shape[1]])
    return places.index_put((mask,), values).transpose(1, 2)


class WithoutMask(nn.Sequential):
    """Another norm in the place of a MaskedBatchNorm1d, for series of one length, which have no mask."""

    def forward(self, input: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is not None:
            raise ValueError(
                f"a {type(self[0]).__name__} cannot leave out the padded positions of a mask; use norm 'bn', or series "
                "of one length"
            )
        return cast(Tensor, super().forward(input))  # type: ignore[no-untyped-call]


class AnyBatchNorm(_BatchNorm):
    """Batch norm for inputs with any number of axes."""

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least two dimensions [N, C, ...], found {list(input.shape)}")


class NormByBoth(AnyBatchNorm):
    """Batch norm that in training normalises with the statistics of the batch and the running ones, by `trained`."""

    def forward(self, x: Tensor) -> Tensor:
        if not (self.training and self.track_running_stats):
            # In evaluation, with frozen statistics, and while batch statistics are measured, it is batch norm.
            return super().forward(x)
        self._check_input_dim(x)
        # Since it tracks running statistics, it has all three.
        return self.trained(x, *cast(list[Tensor], [self.running_mean, self.running_var, self.num_batches_tracked]))

    def trained(self, x: Tensor, mu: Tensor, var: Tensor, steps: Tensor) -> Tensor:
        """The output in training, with the running mean and variance and the number of steps, which it updates."""
        raise NotImplementedError


class StaticBatchNorm(AnyBatchNorm):
    """Static batch norm (Diao et al. 2021, HeteroFL, https://arxiv.org/abs/2010.01264).

    It normalises with batch statistics and tracks none.

    NOTE: loading a state dict with `running_mean` and `running_var` gives the layer statistics, which it uses in eval
    mode like any batch norm. Its own state dict does not contain them, and loading a state dict without them removes
    them, because statistics fit only the weights that they were loaded with.
    """

    def __init__(self, num_features: int, eps: float = 1e-5, affine: bool = True) -> None:
        super().__init__(num_features, eps=eps, affine=affine, track_running_stats=False)
        self.register_buffer("running_mean", None, persistent=False)
        self.register_buffer("running_var", None, persistent=False)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for name in ("running_mean", "running_var"):
            value = state_dict.pop(prefix + name, None)
            like = self.weight if self.weight is not None else value
            setattr(self, name, None if value is None else value.detach().clone().to(like))
        super()._load_from_state_dict(state_dict, prefix, *args)


class BatchRenorm(NormByBoth):
    """Batch renormalisation (Ioffe 2017, https://arxiv.org/abs/1702.03275).

    Within bounds, it gives the same output in training as in evaluation.

    With mu_B, sigma_B of the batch and the running mu, sigma (algorithm 1):

        r = clip(sigma_B / sigma, 1 / r_max, r_max)       d = clip((mu_B - mu) / sigma, -d_max, d_max)
        y = gamma ((x - mu_B) / sigma_B * r + d) + beta    and no gradient through r and d

    For `warmup` steps r is 1 and d is 0, which is batch norm. Then the bounds grow linearly to `r_max` at step
    `r_steps` and to `d_max` at step `d_steps` (section 4.1 gives the defaults). `num_batches_tracked` counts the
    steps; in a federation each client counts its own. The state dict has batch norm's keys.

    NOTE: the paper tracks sigma. This layer tracks the unbiased variance, as torch's batch norm does, so that each can
    load the other's statistics.
    """

    @checked
    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        *,
        r_max: Annotated[float, Ge(1)] = 3.0,
        d_max: Annotated[float, Ge(0)] = 5.0,
        warmup: Annotated[int, Ge(0)] = 5_000,
        r_steps: int = 40_000,
        d_steps: int = 25_000,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine)
        if min(r_steps, d_steps) < warmup:
            raise SettingsError(
                f"norm 'brn': r_steps is {r_steps} and d_steps is {d_steps}; expected at least warmup ({warmup}), "
                "because the bounds grow after the warm-up"
            )
        self.r_max, self.d_max = r_max, d_max
        self.warmup, self.r_steps, self.d_steps = warmup, r_steps, d_steps

    def trained(self, x: Tensor, mu: Tensor, var: Tensor, steps: Tensor) -> Tensor:
        with torch.no_grad():
            var_b, mu_b = torch.var_mean(x, dim=[d for d in range(x.ndim) if d != 1], correction=0)
            sigma = (var + self.eps).sqrt()
            # Computed as tensors: reading the number in `steps` would make the host wait for the device.
            past = (steps - self.warmup).to(mu)
            r_max = 1 + (self.r_max - 1) * self._opened(past, self.r_steps)
            d_max = self.d_max * self._opened(past, self.d_steps)
            r = torch.clamp((var_b + self.eps).sqrt() / sigma, 1 / r_max, r_max)
            d = torch.clamp((mu_b - mu) / sigma, -d_max, d_max)
            steps.add_(1)
        share = 1 / float(steps) if self.momentum is None else self.momentum
        # gamma (x^ r + d) + beta = (gamma r) x^ + (gamma d + beta), so that batch norm's kernel computes it.
        gamma = r if self.weight is None else self.weight * r
        beta = d if self.weight is None else self.weight * d
        if self.bias is not None:
            beta = torch.addcmul(self.bias, self.weight, d)
        return F.batch_norm(x, mu, var, gamma, beta, training=True, momentum=share, eps=self.eps)

    def _opened(self, past: Tensor, end: int) -> Tensor:
        """0 up to the end of the warm-up, `past` steps ago, then linear up to 1 at step `end`."""
        if end == self.warmup:
            return (past >= 0).to(past)
        return (past / (end - self.warmup)).clamp(0, 1)


class HybridBatchNorm(NormByBoth):
    """Hybrid batch norm (Chen et al. 2025, ICML, https://arxiv.org/abs/2505.21877).

    In training it normalises with a learnt mix of the batch's statistics and the running ones:

        a = sigmoid(alpha)      m = a mu_B + (1 - a) mu      s = a sigma_B^2 + (1 - a) sigma^2

    with a biased sigma_B^2, and gradients through the batch's statistics and alpha. In evaluation it is batch norm.

    NOTE: theirs takes images only, and its running statistics are set by the server alone. These also follow the
    batches with `momentum`, as in any batch norm, unless the strategy HBN sets it to zero.
    """

    def __init__(self, num_features: int, eps: float = 1e-5, momentum: float | None = 0.1, affine: bool = True) -> None:
        super().__init__(num_features, eps, 0.1 if momentum is None else momentum, affine)
        self.alpha = nn.Parameter(torch.zeros(num_features))

    def mixed(self, of_batch: Tensor, running: Tensor) -> Tensor:
        """A statistic of the batch and the running one, mixed."""
        return torch.lerp(running, of_batch, self.alpha.sigmoid())

    def trained(self, x: Tensor, mu: Tensor, var: Tensor, steps: Tensor) -> Tensor:
        var_b, mu_b = torch.var_mean(x, dim=[d for d in range(x.ndim) if d != 1], correction=0)
        mean, variance = self.mixed(mu_b, mu.clone()), self.mixed(var_b, var.clone())
        with torch.no_grad():
            count = x.numel() // x.shape[1]
            mu.lerp_(mu_b, self.momentum or 0.0)
            var.lerp_(var_b * count / max(count - 1, 1), self.momentum or 0.0)
            steps.add_(1)
        shape = [1, -1] + [1] * (x.ndim - 2)
        scale = (
            torch.rsqrt(variance + self.eps) if self.weight is None else self.weight * torch.rsqrt(variance + self.eps)
        )
        shift = -mean * scale if self.bias is None else self.bias - mean * scale
        return torch.addcmul(shift.view(shape), x, scale.view(shape))
