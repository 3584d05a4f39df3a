"""Fixup: residual networks without normalisation (Zhang, Dauphin, Ma 2019, https://arxiv.org/abs/1901.09321).

Paper's symbols: L the number of residual branches, m the number of convolutions in one. The rules of section 3:

1. The classifier and the last convolution of each branch start at zero.
2. The other convolutions of a branch start at L^(-1 / (2m - 2)) times a standard initialisation, the model's own.
3. A scalar multiplier (initially 1) in each branch; a scalar bias (initially 0) before each convolution, linear
   layer and activation.

NOTE: this differs from the authors' code in three ways. A convolution on the shortcut has its own bias before it,
where theirs shares the branch's bias. The scalars train with the full learning rate, not with a tenth of it. The
shortcut stays as it is in the model (option A in ResNet20), where theirs averages pixels. As in their code, there is
no bias before the stem's convolution, whose input is the image.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedbn_flwr.errors import SettingsError

from .roles import AFFINE, check_own

Layer = Any  # a module of a known class, with its attributes


class ResidualBlock(nn.Module):
    """A block whose branch is `conv1`, `bn1`, ReLU, `conv2`, `bn2` and so on, as in torchvision's ResNets.

    If the shortcut is not the identity, it is `downsample`, a convolution and a batch norm.
    """


def residual_blocks(model: nn.Module, kind: str) -> dict[str, Layer]:
    """The blocks of a residual network by name, for a norm of this kind; SettingsError if it has none."""
    # Not imported here, which takes seconds: a model with torchvision's blocks has imported them.
    resnet: Any = sys.modules.get("torchvision.models.resnet")
    known = (resnet.BasicBlock, resnet.Bottleneck) if resnet else ()
    blocks = {
        name: module
        for name, module in model.named_modules()
        if type(module) in known or isinstance(module, ResidualBlock)
    }
    if not blocks:
        raise SettingsError(
            f"norm {kind!r}: {type(model).__name__} is not a residual network with known branches, such as resnet20 "
            "and torchvision's resnet18, 34, 50 and deeper"
        )
    return blocks


def convolutions(block: Layer) -> list[Layer]:
    """The convolutions of a block's branch, in order; None for a missing one."""
    names = ("conv1", "conv2", "conv3") if hasattr(block, "conv3") else ("conv1", "conv2")
    return [getattr(block, name, None) for name in names]


class Scalars(nn.Module):
    """weight x + bias, the same numbers for all channels; without `scaled`, x + bias."""

    def __init__(self, scaled: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1)) if scaled else None
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return (x if self.weight is None else x * self.weight) + self.bias


@torch.no_grad()
def fixup(model: nn.Module) -> nn.Module:
    """Remove batch norm from `model` and initialise it for Fixup, in place.

    Outside its residual blocks the model must have one batch norm, in the stem, and a linear layer as its classifier.
    """
    blocks = residual_blocks(model, "fixup")
    for name, block in blocks.items():
        m = len(convolutions(block))
        for number in range(1, m + 1):
            conv, last = _biased(_layer(model, f"{name}.conv{number}", nn.Conv2d)), number == m
            if last:
                conv.weight.zero_()
            else:
                conv.weight.mul_(len(blocks) ** (-1 / (2 * m - 2)))
            _replace(model, f"{name}.bn{number}", _scalars(conv, scaled=last))
        if getattr(block, "downsample", None) is not None:
            _biased(_layer(model, f"{name}.downsample.0", nn.Conv2d))
            _replace(model, f"{name}.downsample.1", nn.Identity().train(block.training))
    norms = [name for name, layer in model.named_modules() if isinstance(layer, _BatchNorm)]
    linear = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    if len(norms) != 1 or not linear:
        raise SettingsError(
            f"norm 'fixup': outside of its residual blocks the model has the batch norms {norms} and the linear layers "
            f"{linear}; expected one batch norm, in the stem, and a classifier"
        )
    classifier = _biased(_layer(model, linear[-1], nn.Linear))
    for parameter in classifier.parameters():
        parameter.zero_()
    _replace(model, norms[0], _scalars(classifier))
    return model


def _layer(model: nn.Module, name: str, kind: type[nn.Module]) -> Layer:
    """The layer `name`; SettingsError unless it is of this kind."""
    layer = dict(model.named_modules(remove_duplicate=False)).get(name)
    if not isinstance(layer, kind) or (kind is nn.Conv2d and type(layer) is not nn.Conv2d):
        wanted = {nn.Conv2d: "plain convolution", _BatchNorm: "batch norm"}.get(kind, "linear layer")
        is_what = "nothing" if layer is None else f"a {type(layer).__name__}"
        raise SettingsError(f"norm 'fixup': {name} is {is_what}; expected a {wanted}")
    for parameter in AFFINE if kind is not _BatchNorm else ():
        check_own(layer, name, "fixup", parameter)
    return layer


def _replace(model: nn.Module, name: str, new: nn.Module) -> None:
    _layer(model, name, _BatchNorm)
    model.set_submodule(name, new)


def _biased(layer: Layer) -> Layer:
    """Add a scalar bias before a convolution or linear layer, and return the layer."""
    layer.input_bias = nn.Parameter(layer.weight.new_zeros(1), layer.weight.requires_grad)
    layer.register_forward_pre_hook(_plus_bias)
    return layer


def _plus_bias(layer: nn.Module, inputs: tuple[Tensor]) -> Tensor:
    return inputs[0] + layer.input_bias  # type: ignore[operator]


def _scalars(like: Layer, scaled: bool = False) -> nn.Module:
    """Scalars with the layer's device, dtype and training mode."""
    return Scalars(scaled).to(like.weight).requires_grad_(like.weight.requires_grad).train(like.training)
