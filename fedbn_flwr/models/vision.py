"""torchvision's networks with random initial weights: nothing is downloaded.

`stem` selects the first layers: `large` is torchvision's stem for 224 pixels, with a last feature map of 1/32 of each
side; `small` is for 32 and 64 pixels, with a last feature map of 1/8. `auto` is small up to 64 pixels. For RGB images
and a large stem, a network has torchvision's weights for the same seed.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from fedbn_flwr.data import Size
from fedbn_flwr.errors import SettingsError, did_you_mean

STEMS = ("auto", "small", "large")
SMALL = 64  # pixels; `auto` is large for larger images


def resnet18(num_classes: int, in_channels: int = 3, image_size: Size | None = None, stem: str = "auto") -> nn.Module:
    """torchvision's ResNet-18; up to 64 pixels with a 3x3 first convolution and no pooling after it."""
    return _resnet("resnet18", num_classes, in_channels, image_size, stem)


def resnet50(num_classes: int, in_channels: int = 3, image_size: Size | None = None, stem: str = "auto") -> nn.Module:
    """torchvision's ResNet-50; up to 64 pixels with a 3x3 first convolution and no pooling after it."""
    return _resnet("resnet50", num_classes, in_channels, image_size, stem)


def _network(name: str, **options: Any) -> Any:
    from torchvision import models  # here, so that other commands need not wait for it

    return getattr(models, name)(weights=None, **options)


def _resnet(name: str, num_classes: int, in_channels: int, image_size: Size | None, stem: str) -> nn.Module:
    small = is_small(stem, image_size)
    model = _network(name, num_classes=num_classes)
    model.conv1 = _first(model.conv1, in_channels, small, mode="fan_out")
    if small:
        model.maxpool = nn.Identity()
    return model  # type: ignore[no-any-return]


def mobilenet_v2(
    num_classes: int, in_channels: int = 3, image_size: Size | None = None, stem: str = "auto"
) -> nn.Module:
    """torchvision's MobileNetV2; up to 64 pixels without the first two strides."""
    small = is_small(stem, image_size)
    # Expansion, channels, blocks and stride of each stage (Sandler et al. 2018, table 2), stride 1 in the second.
    stages = [[1, 16, 1, 1], [6, 24, 2, 1], [6, 32, 3, 2], [6, 64, 4, 2], [6, 96, 3, 1], [6, 160, 3, 2], [6, 320, 1, 1]]
    setting = stages if small else None
    model = _network("mobilenet_v2", num_classes=num_classes, inverted_residual_setting=setting)
    model.features[0][0] = _first(model.features[0][0], in_channels, small, mode="fan_out")
    return model  # type: ignore[no-any-return]


def alexnet(num_classes: int, in_channels: int = 3) -> nn.Module:
    """torchvision's AlexNet, which has no normalisation, for 64 pixels and more."""
    model = _network("alexnet", num_classes=num_classes)
    model.features[0] = _first(model.features[0], in_channels, small=False, mode=None)
    return model  # type: ignore[no-any-return]


def densenet121(
    num_classes: int, in_channels: int = 3, image_size: Size | None = None, stem: str = "auto"
) -> nn.Module:
    """torchvision's DenseNet-121; up to 64 pixels with a 3x3 first convolution and no pooling after it."""
    small = is_small(stem, image_size)
    model = _network("densenet121", num_classes=num_classes)
    model.features.conv0 = _first(model.features.conv0, in_channels, small, mode="fan_in")
    if small:
        model.features.pool0 = nn.Identity()
    return model  # type: ignore[no-any-return]


def is_small(stem: str, image_size: Size | None) -> bool:
    if stem not in STEMS:
        raise SettingsError(f"model.stem={stem!r} is not a stem; {did_you_mean(stem, STEMS)}")
    return stem == "small" or (stem == "auto" and image_size is not None and max(image_size) <= SMALL)


def _first(old: nn.Conv2d, in_channels: int, small: bool, mode: str | None) -> nn.Conv2d:
    """The first convolution for these images, initialised as the network's other convolutions."""
    if in_channels == old.in_channels and not small:
        return old
    shape: tuple[Any, Any, Any] = (3, 1, 1) if small else (old.kernel_size, old.stride, old.padding)
    new = nn.Conv2d(in_channels, old.out_channels, *shape, bias=old.bias is not None)
    if mode is not None:
        nn.init.kaiming_normal_(new.weight, mode=mode, nonlinearity="relu")  # type: ignore[arg-type]
    return new
