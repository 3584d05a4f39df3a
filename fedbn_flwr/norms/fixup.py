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

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedbn_flwr.errors import SettingsError

from .wsconv import check_stored, remade


@dataclass(frozen=True)
class ResidualParts:
    """The parts of a residual network: names of children of the network, and its residual blocks by name.

    A block computes its branch with `conv1`, `bn1`, ReLU, `conv2`, `bn2` (and so on), and its shortcut with
    `downsample`, a convolution and a batch norm, if it has one.
    """

    convolution: str  # the stem's
    norm: str  # the stem's
    classifier: str
    blocks: dict[str, Any]  # by their names in the network, as `layer1.0`


def convolutions(block: Any) -> list[Any]:
    """The convolutions of a block's branch, in the order in which they compute; None for one that is missing."""
    names = ("conv1", "conv2", "conv3") if hasattr(block, "conv3") else ("conv1", "conv2")
    return [getattr(block, name, None) for name in names]


def residual_parts(model: Any, kind: str) -> ResidualParts:
    """The parts of a network for a norm of this kind; SettingsError if its branches are unknown."""
    if hasattr(model, "residual_parts"):
        return model.residual_parts()  # type: ignore[no-any-return]
    from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet

    if type(model) is not ResNet:
        raise SettingsError(
            f"norm {kind!r}: {type(model).__name__} is not a residual network with known branches, such as resnet20 "
            "and torchvision's resnet18, 34, 50 and deeper"
        )
    stages = [(name, stage) for name, stage in model.named_children() if name.startswith("layer")]
    blocks = {f"{name}.{child}": block for name, stage in stages for child, block in stage.named_children()}
    for name, block in blocks.items():
        if type(block) not in (BasicBlock, Bottleneck):
            raise SettingsError(
                f"norm {kind!r}: {name} is a {type(block).__name__}; expected a BasicBlock or a Bottleneck"
            )
    return ResidualParts("conv1", "bn1", "fc", blocks)


class _Biased:
    """A scalar that is added to a layer's input."""

    input_bias: nn.Parameter

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x + self.input_bias)  # type: ignore[misc]
        return y


class BiasedConv2d(_Biased, nn.Conv2d):
    pass


class BiasedLinear(_Biased, nn.Linear):
    pass


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
            if last:
                conv.weight.zero_()
            else:
                conv.weight.mul_(len(blocks) ** (-1 / (2 * m - 2)))
            setattr(block, f"conv{number}", conv)
            setattr(block, f"bn{number}", _scalars(conv, scaled=last))
        shortcut = getattr(block, "downsample", None)
        if shortcut is not None:
            shortcut[0], shortcut[1] = _biased(shortcut[0]), nn.Identity().train(block.training)
    setattr(model, parts.norm, _scalars(getattr(model, parts.convolution)))
    classifier = _biased(getattr(model, parts.classifier))
    for parameter in classifier.parameters():
        parameter.zero_()
    setattr(model, parts.classifier, classifier)
    return model


def _check(model: nn.Module, parts: ResidualParts) -> None:
    """Refuse a model that cannot be converted before any of it changes."""
    expected: dict[str, type[nn.Module]] = {
        parts.convolution: nn.Conv2d,
        parts.norm: _BatchNorm,
        parts.classifier: nn.Linear,
    }
    for name, block in parts.blocks.items():
        for number in range(1, len(convolutions(block)) + 1):
            expected |= {f"{name}.conv{number}": nn.Conv2d, f"{name}.bn{number}": _BatchNorm}
        if getattr(block, "downsample", None) is not None:
            expected |= {f"{name}.downsample.0": nn.Conv2d, f"{name}.downsample.1": _BatchNorm}
    found = dict(model.named_modules(remove_duplicate=False))
    for name, kind in expected.items():
        layer = found.get(name)
        if not isinstance(layer, kind) or (kind is nn.Conv2d and type(layer) is not nn.Conv2d):
            wanted = {nn.Conv2d: "plain convolution", _BatchNorm: "batch norm"}.get(kind, "linear layer")
            is_what = "nothing" if layer is None else f"a {type(layer).__name__}"
            raise SettingsError(f"norm 'fixup': {name} is {is_what}; expected a {wanted}")
        check_stored(layer, name, "fixup")
    known = {found[name] for name in expected}
    for name, layer in found.items():
        if isinstance(layer, _BatchNorm) and layer not in known:
            raise SettingsError(f"norm 'fixup': {name} is a batch norm outside the residual branches and the stem")


def _biased(layer: Any) -> Any:
    """The convolution or linear layer with a scalar bias before it, and the same parameter objects."""
    new: Any = remade(layer, BiasedConv2d if isinstance(layer, nn.Conv2d) else BiasedLinear)
    new.input_bias = nn.Parameter(layer.weight.new_zeros(1), layer.weight.requires_grad)
    return new


def _scalars(like: Any, scaled: bool = False) -> nn.Module:
    """Scalars with the layer's device, dtype and training mode."""
    return Scalars(scaled).to(like.weight).requires_grad_(like.weight.requires_grad).train(like.training)
