"""Fixup: residual networks without normalisation (Zhang, Dauphin, Ma 2019, https://arxiv.org/abs/1901.09321).

Paper's symbols: L the number of residual branches, m the number of convolutions in one. The rules of section 3:

1. The classifier and the last convolution of each branch start at zero.
2. The other convolutions of a branch start at L^(-1 / (2m - 2)) times a standard initialisation, the model's own.
3. A scalar multiplier (initially 1) in each branch; a scalar bias (initially 0) before each convolution, linear
   layer and activation.

NOTE: three differences from the authors' code. A convolution on the shortcut has its own bias before it; there it
shares the branch's. The scalars train with the full learning rate; there with a tenth of it. The shortcut is the
model's (option A in ResNet20); there it averages pixels. As in the authors' code, the stem's convolution, whose input
is the image, has no bias before it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedbn_flwr.errors import SettingsError

from .residual import ResidualParts, convolutions, residual_parts
from .wsconv import check_stored, remade


class BiasedConv2d(nn.Conv2d):
    """nn.Conv2d with a scalar added to its input."""

    input_bias: nn.Parameter

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self._conv_forward(x + self.input_bias, self.weight, self.bias)
        return y


class BiasedLinear(nn.Linear):
    """nn.Linear with a scalar added to its input."""

    input_bias: nn.Parameter

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x + self.input_bias, self.weight, self.bias)


class ScalarBias(nn.Module):
    """x + bias, one number for all channels."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


class ScalarScale(nn.Module):
    """weight x + bias, two numbers for all channels."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight + self.bias


def fixup(model: nn.Module) -> nn.Module:
    """`model` without batch norm and with Fixup's initialisation.

    The model is a ResNet of torchvision or has a method `residual_parts() -> ResidualParts`.
    """
    parts = residual_parts(model, "fixup")
    _check(model, parts)
    blocks = parts.blocks
    for block in blocks.values():
        branch = convolutions(block)
        m = len(branch)
        for number, plain in enumerate(branch, start=1):
            conv, last = _biased(plain), number == m
            with torch.no_grad():
                if last:
                    conv.weight.zero_()
                else:
                    conv.weight.mul_(len(blocks) ** (-1 / (2 * m - 2)))
            setattr(block, f"conv{number}", conv)
            setattr(block, f"bn{number}", _like(conv, ScalarScale() if last else ScalarBias()))
        shortcut = getattr(block, "downsample", None)
        if shortcut is not None:
            shortcut[0], shortcut[1] = _biased(shortcut[0]), nn.Identity().train(block.training)
    setattr(model, parts.norm, _like(getattr(model, parts.convolution), ScalarBias()))
    classifier = _biased(getattr(model, parts.classifier))
    with torch.no_grad():
        for parameter in classifier.parameters():
            parameter.zero_()
    setattr(model, parts.classifier, classifier)
    return model


def _check(model: nn.Module, parts: ResidualParts) -> None:
    """Refuse a model that cannot be converted before any of it changes."""
    expected = [
        (parts.convolution, getattr(model, parts.convolution), nn.Conv2d),
        (parts.norm, getattr(model, parts.norm), _BatchNorm),
        (parts.classifier, getattr(model, parts.classifier), nn.Linear),
    ]
    for name, block in parts.blocks.items():
        for number, conv in enumerate(convolutions(block), start=1):
            expected.append((f"{name}.conv{number}", conv, nn.Conv2d))
            expected.append((f"{name}.bn{number}", getattr(block, f"bn{number}", None), _BatchNorm))
        shortcut = getattr(block, "downsample", None)
        if shortcut is not None:
            if not isinstance(shortcut, nn.Sequential) or len(shortcut) != 2:
                raise SettingsError(f"norm 'fixup': {name}.downsample is not a convolution and a batch norm")
            expected.append((f"{name}.downsample.0", shortcut[0], nn.Conv2d))
            expected.append((f"{name}.downsample.1", shortcut[1], _BatchNorm))
    for name, layer, kind in expected:
        check_stored(layer, name, "fixup")
        if not isinstance(layer, kind) or (kind is nn.Conv2d and type(layer) is not nn.Conv2d):
            wanted = {nn.Conv2d: "plain convolution", _BatchNorm: "batch norm"}.get(kind, "linear layer")
            raise SettingsError(f"norm 'fixup': {name} is a {type(layer).__name__}; expected a {wanted}")
    known = {layer for _, layer, _ in expected}
    for name, layer in model.named_modules():
        if isinstance(layer, _BatchNorm) and layer not in known:
            raise SettingsError(f"norm 'fixup': {name} is a batch norm outside the residual branches and the stem")


def _biased(layer: Any) -> Any:
    """The convolution or linear layer with a scalar bias before it, and the same parameter objects."""
    if isinstance(layer, nn.Conv2d):
        new: Any = remade(layer, BiasedConv2d)
    else:
        new = BiasedLinear(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
        new.weight, new.bias = layer.weight, layer.bias
    new.input_bias = nn.Parameter(layer.weight.new_zeros(1), layer.weight.requires_grad)
    return new.train(layer.training)


def _like(layer: Any, new: nn.Module) -> nn.Module:
    """`new` with the layer's device, dtype and training mode."""
    return new.to(layer.weight).requires_grad_(layer.weight.requires_grad).train(layer.training)
