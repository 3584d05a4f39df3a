"""The memory format of convolutions, set for their filters or their inputs; the outputs get it too.

With channels last, a CPU trains most networks faster (docs/results/performance.md#speed); the last bits of results
differ.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.instancenorm import _InstanceNorm

from fedbn_flwr.batch import Batch

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}  # by the number of the filters' axes


def lay_out(model: nn.Module) -> None:
    """Put the channels of the filters of 2-d and 3-d convolutions last; keys, values and parameters stay the same."""
    for layer in model.modules():
        for parameter in layer.parameters() if isinstance(layer, _ConvNd) else ():
            if kind := _FORMATS.get(parameter.ndim):
                # `contiguous` would leave filters of one channel as they are, since they have both formats.
                parameter.data = parameter.data.to(memory_format=kind)


def is_known(part: object) -> bool:
    """Whether this object, or function, is of PyTorch, torchvision or this library, whose code takes any format.

    Code of others may need the usual format, as `x.view(len(x), -1)` does.
    """
    part = part.func if isinstance(part, functools.partial) else part
    module: str = getattr(part, "__module__", type(part).__module__)
    return module.partition(".")[0] in ("torch", "torchvision", "fedbn_flwr")


def hook_places(model: nn.Module) -> list[Mapping[int, object]]:
    """Where the hooks of the modules are."""
    return [
        place
        for m in model.modules()
        for place in (m._forward_hooks, m._forward_pre_hooks, m._backward_hooks, m._backward_pre_hooks)
    ]


def takes_channels_last(model: nn.Module) -> bool:
    """Whether a CPU trains the network faster with inputs whose channels are last, and all its code takes them."""
    return (
        suits_channels_last(model)
        and next(model.parameters()).device.type == "cpu"
        and all(is_known(module) and "forward" not in vars(module) for module in model.modules())
        and not any(hook_places(model))
    )


def with_channels_last(batch: Batch) -> Batch:
    """The batch, with the channels of images last; filters and gradients keep the usual format."""
    inputs, targets = batch
    is_image = isinstance(inputs, Tensor) and inputs.ndim == 4 and inputs.is_floating_point()
    # As above: `contiguous` would leave images of one channel as they are.
    return (inputs.to(memory_format=torch.channels_last) if is_image else inputs), targets


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
