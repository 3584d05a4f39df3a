"""Convolutions with standardised weights.

Plain, for use with group norm: Qiao et al. 2019, https://arxiv.org/abs/1903.10520. Scaled, for use without a norm:
FedWon, after Brock et al. 2021, https://arxiv.org/abs/2101.08692, whose code is in deepmind-research/nfnets. Tests
compare with timm's `StdConv2d` and `ScaledStdConv2d`.

NOTE: unlike NF-Nets, filters have no learnable gain: gamma is constant in FedWon's equation, and each parameter would
be sent. A gain that gamma of a batch norm would learn can only be learnt by the linear layer.
"""

from __future__ import annotations

import math
from typing import TypeVar

from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.conv import _ConvNd

from fedbn_flwr.errors import SettingsError

# Brock et al.'s gain for ReLU: 1 / std(relu(x)) for standard normal x, so that a layer preserves the variance.
RELU_GAMMA = math.sqrt(2 / (1 - 1 / math.pi))


class Standardised(_ConvNd):
    """A convolution with W^ = (W - mu) / sigma instead of its weight W.

    mu and sigma are mean and standard deviation of each filter. This removes the filter's scale, which has no effect
    before a norm layer. The arguments are those of the convolution.
    """

    eps = 1e-5  # added to sigma^2
    gamma: float | None = None  # with it, W^ is multiplied by gamma / sqrt(N)

    def standardised(self) -> Tensor:
        """W^."""
        filters = self.weight.reshape(1, self.out_channels, -1)  # [1, out, N]
        gain = None if self.gamma is None else self.gamma / math.sqrt(filters.shape[2])
        gains = None if gain is None else self.weight.new_full((self.out_channels,), gain)
        # Computed by one kernel: batch norm of a "batch" of N weights.
        weight: Tensor = F.batch_norm(filters, None, None, weight=gains, training=True, momentum=0.0, eps=self.eps)
        return weight.reshape(self.weight.shape)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self._conv_forward(x, self.standardised(), self.bias)  # type: ignore[operator]
        return y


class StdConv1d(Standardised, nn.Conv1d):
    pass


class StdConv2d(Standardised, nn.Conv2d):
    pass


class StdConv3d(Standardised, nn.Conv3d):
    pass


class Scaled(Standardised):
    """A convolution with W^ = gamma (W - mu) / (sigma sqrt(N)) instead of its weight W.

    mu and sigma are mean and standard deviation of each filter, N is its fan-in: inputs of variance 1 and any mean
    then give outputs of variance gamma^2. The arguments are those of the convolution.
    """

    eps = 1e-6
    gamma = RELU_GAMMA


class WSConv1d(Scaled, nn.Conv1d):
    pass


class WSConv2d(Scaled, nn.Conv2d):
    pass


class WSConv3d(Scaled, nn.Conv3d):
    pass


C = TypeVar("C", bound=_ConvNd)


def check_stored(layer: nn.Module, where: str, kind: str) -> None:
    """Refuse a layer whose weight or bias is not a parameter, but computed from others."""
    for name in ("weight", "bias"):
        if getattr(layer, name, None) is not None and layer._parameters.get(name) is None:
            raise SettingsError(
                f"norm {kind!r}: the {name} of {where} is computed by a parametrization (weight or spectral norm, "
                "pruning), which would be lost; expected a parameter"
            )


def remade(conv: _ConvNd, kind: type[C]) -> C:
    """`conv` as a layer of another class, with the same parameter objects."""
    new = kind(
        conv.in_channels,
        conv.out_channels,
        conv.kernel_size,  # type: ignore[arg-type]
        conv.stride,  # type: ignore[arg-type]
        conv.padding,  # type: ignore[arg-type]
        conv.dilation,  # type: ignore[arg-type]
        conv.groups,
        conv.bias is not None,
        conv.padding_mode,
        device="meta",  # no weights are drawn: the old ones are used
    )
    new.weight, new.bias = conv.weight, conv.bias
    return new.train(conv.training)


# The convolutions of these kinds of norm.
STANDARDISED: dict[str, dict[type[nn.Module], type[Standardised]]] = {
    "won": {nn.Conv1d: WSConv1d, nn.Conv2d: WSConv2d, nn.Conv3d: WSConv3d},
    "gn+ws": {nn.Conv1d: StdConv1d, nn.Conv2d: StdConv2d, nn.Conv3d: StdConv3d},
}


def standardised(conv: _ConvNd, where: str, kind: str) -> nn.Module:
    """`conv` with its weights standardised, as this kind of norm needs it.

    With `won`, a convolution without a bias gets one, initially zero, in place of the beta of the batch norm after it;
    the convolutions of NF-Nets have a bias.
    """
    own, kinds = type(conv), STANDARDISED[kind]
    if own in kinds.values():
        return conv
    plain = next((each for each in kinds if isinstance(conv, each)), None)
    if plain is None:
        raise SettingsError(
            f"norm {kind!r}: {where} is a {own.__name__}; only Conv1d, Conv2d and Conv3d can be standardised"
        )
    if own.forward is not plain.forward or own._conv_forward is not plain._conv_forward:
        raise SettingsError(
            f"norm {kind!r}: {where} is a {own.__name__}, a convolution of another kind, and cannot be replaced"
        )
    check_stored(conv, where, kind)
    if conv.weight[0].numel() == 1:
        raise SettingsError(f"norm {kind!r}: a filter of {where} is a single weight, which cannot be standardised")
    new = remade(conv, kinds[plain])
    if kind == "won" and conv.bias is None:
        new.bias = nn.Parameter(conv.weight.new_zeros(conv.out_channels), conv.weight.requires_grad)
    return new
