"""The memory format of convolutions' filters; the outputs have the same format.

With channels last, a CPU trains most networks faster (docs/results/performance.md); the last bits of results differ.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.instancenorm import _InstanceNorm

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}  # by the number of the filters' axes


def lay_out(model: nn.Module) -> None:
    """Put the channels of the filters of 2-d and 3-d convolutions last; keys, values and parameters stay the same."""
    for layer in model.modules():
        for parameter in layer.parameters() if isinstance(layer, _ConvNd) else ():
            if kind := _FORMATS.get(parameter.ndim):
                # `contiguous` would leave filters of one channel as they are, since they have both formats.
                parameter.data = parameter.data.to(memory_format=kind)


def suits_channels_last(model: nn.Module) -> bool:
    """Whether a CPU trains the network faster with channels last, as measured.

    Steps become slower in float64, with some norms, and with a convolution of a few channels whose number isn't a
    multiple of 8, such as LeNet's 6. 3-d convolutions gain nothing.
    """
    layers = [*model.modules()]
    convolutions = [layer for layer in layers if isinstance(layer, nn.Conv2d | nn.ConvTranspose2d)]
    return (
        bool(convolutions)
        and all(parameter.dtype is torch.float32 for layer in convolutions for parameter in layer.parameters())
        # The first one has the channels of the images.
        and not any(layer.in_channels < 16 and layer.in_channels % 8 for layer in convolutions[1:])
        and not any(map(_is_slow, layers))
    )


def _is_slow(norm: nn.Module) -> bool:
    if isinstance(norm, nn.GroupNorm):  # with one channel a group, this is instance norm
        return norm.num_channels < 8 * norm.num_groups
    return isinstance(norm, _InstanceNorm) or (isinstance(norm, nn.LayerNorm) and len(norm.normalized_shape) > 1)
