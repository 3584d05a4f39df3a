"""Networks with one output per pixel: DeepLabV3+ (Chen et al. 2018) from segmentation-models-pytorch, an extra."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from fedbn_flwr.errors import needs


def deeplabv3plus_mobilenet_v2(num_classes: int, in_channels: int = 3) -> nn.Module:
    """DeepLabV3+ on MobileNetV2, for segmentation; needs the extra `segmentation`."""
    return _deeplab("mobilenet_v2", num_classes, in_channels)


def deeplabv3plus_resnet50(num_classes: int, in_channels: int = 3) -> nn.Module:
    """DeepLabV3+ on ResNet-50, for segmentation; needs the extra `segmentation`."""
    return _deeplab("resnet50", num_classes, in_channels)


def _deeplab(encoder: str, num_classes: int, in_channels: int) -> nn.Module:
    modules: dict[str, Any] = sys.modules
    # timm would import it: seconds, and two temporary folders that stay if this process is killed.
    modules.setdefault("wandb", None)
    try:
        with needs("segmentation", f"model.name='deeplabv3plus_{encoder}'"):
            import segmentation_models_pytorch as smp
    finally:
        if modules["wandb"] is None:
            del modules["wandb"]
    # No pretrained weights, because they would be downloaded.
    model: Any = smp.DeepLabV3Plus(
        encoder_name=encoder, encoder_weights=None, in_channels=in_channels, classes=num_classes
    )
    return model  # type: ignore[no-any-return]
