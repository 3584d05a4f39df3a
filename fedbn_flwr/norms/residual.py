"""The branches of a residual network, which Fixup and the scale of `won`'s branches change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fedbn_flwr.errors import SettingsError


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
