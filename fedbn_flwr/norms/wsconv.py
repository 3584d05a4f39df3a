"""Convolutions with standardised weights.

The plain ones are for use with group norm: Qiao et al. 2019, https://arxiv.org/abs/1903.10520. The scaled ones are for
use without a norm: FedWon, after Brock et al. 2021, https://arxiv.org/abs/2101.08692, whose code is in
deepmind-research/nfnets. Tests compare with timm's `StdConv2d` and `ScaledStdConv2d`.

NOTE: unlike NF-Nets, filters have no learnable gain, because gamma is constant in FedWon's equation. So only the last
linear layer can learn the gain that a batch norm's gamma would learn. A network for tables has no convolutions; there
all linear layers but the last are standardised, which neither paper describes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from fedbn_flwr.errors import SettingsError

from .roles import AFFINE, check_own

# Brock et al.'s gain for ReLU: 1 / std(relu(x)) for standard normal x, so that a layer preserves the variance.
RELU_GAMMA = math.sqrt(2 / (1 - 1 / math.pi))


class Standardised(nn.Module):
    """A convolution or linear layer with W^ instead of its weight W. N is the fan-in of a filter:

        W^ = (W - mu) / sqrt(sigma^2 + eps)     and with a gamma, multiplied by gamma / sqrt(N)

    mu and sigma are mean and standard deviation of each filter; in a linear layer, a filter is the weights of one
    output. This removes the filter's scale, which has no effect before a norm layer. With gamma, inputs of variance 1
    and any mean give outputs of variance gamma^2. The arguments are the layer's.
    """

    weight: Tensor
    bias: Any  # a tensor or None
    _conv_forward: Callable[..., Tensor]  # of input, weight and bias
    eps = 1e-5
    gamma: float | None = None

    def standardised(self) -> Tensor:
        """W^, in the memory format of W, which the layer's output gets too."""
        strides, sizes = self.weight.stride(), self.weight.shape
        order = [0, *sorted(range(1, len(sizes)), key=lambda axis: (-strides[axis], -sizes[axis]))]  # as in memory
        ordered = self.weight.permute(order)  # a reshape would copy if channels are last
        filters = ordered.reshape(1, len(ordered), -1)  # [1, out, N]
        gain = None if self.gamma is None else self.gamma / math.sqrt(filters.shape[2])
        gains = None if gain is None else self.weight.new_full((len(ordered),), gain)
        # Computed by one kernel: batch norm of a "batch" of N weights.
        weight: Tensor = F.batch_norm(filters, None, None, weight=gains, training=True, momentum=0.0, eps=self.eps)
        return weight.reshape(ordered.shape).permute([order.index(axis) for axis in range(len(order))])

    def forward(self, x: Tensor) -> Tensor:
        return self._conv_forward(x, self.standardised(), self.bias)


class StdLinear(Standardised, nn.Linear):
    _conv_forward = staticmethod(F.linear)


class StdConv1d(Standardised, nn.Conv1d):
    pass


class StdConv2d(Standardised, nn.Conv2d):
    pass


class StdConv3d(Standardised, nn.Conv3d):
    pass


_STANDARDISED: dict[type[nn.Module], type[Standardised]] = {
    nn.Conv1d: StdConv1d,
    nn.Conv2d: StdConv2d,
    nn.Conv3d: StdConv3d,
    nn.Linear: StdLinear,
}


def standardise(layer: Any, where: str, kind: str, eps: float, gamma: float | None) -> None:
    """Make a convolution or linear layer standardise its weights, for a norm of this kind.

    With a gamma, a layer without a bias gets one, initially zero, as in NF-Nets. It replaces the beta of the batch norm
    after the layer.
    """
    own = type(layer)
    if isinstance(layer, Standardised) and layer.eps == eps:
        return
    plain = next((kind for kind in _STANDARDISED if isinstance(layer, kind)), None)
    if plain is None:
        raise SettingsError(
            f"norm {kind!r}: {where} is a {own.__name__}; only Conv1d, Conv2d, Conv3d and Linear can be standardised"
        )
    if any(getattr(own, name, None) is not getattr(plain, name, None) for name in ("forward", "_conv_forward")):
        raise SettingsError(
            f"norm {kind!r}: {where} is a {own.__name__}; expected a plain {plain.__name__}, because replacing a "
            "subclass would lose what it computes"
        )
    for name in AFFINE:
        check_own(layer, where, kind, name)
    if layer.weight[0].numel() == 1:
        raise SettingsError(f"norm {kind!r}: a filter of {where} is a single weight, which cannot be standardised")
    layer.__class__, layer.eps, layer.gamma = _STANDARDISED[plain], eps, gamma
    if gamma is not None and layer.bias is None:
        layer.bias = nn.Parameter(layer.weight.new_zeros(len(layer.weight)), layer.weight.requires_grad)
