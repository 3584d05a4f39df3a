"""Networks of other libraries with random initial weights: nothing is downloaded.

Most come from torchvision. DeepLabV3+ (Chen et al. 2018), with one output per pixel, comes from
segmentation-models-pytorch, which is an extra.

`stem` selects the first layers: `large` is torchvision's stem for 224 pixels, with a last feature map of 1/32 of each
side; `small` is for 32 and 64 pixels, with a last feature map of 1/8. `auto` is small up to 64 pixels. For RGB images
and a large stem, a seed gives the same weights as in torchvision.
"""

from __future__ import annotations

from typing import Any, Literal

from torch import nn

from fedbn_flwr.data import Size
from fedbn_flwr.declared import checked
from fedbn_flwr.errors import needs

Stem = Literal["auto", "small", "large"]
SMALL = 64  # pixels; `auto` is large for larger images


def resnet18(num_classes: int, in_channels: int = 3, image_size: Size | None = None, stem: Stem = "auto") -> nn.Module:
    """torchvision's ResNet-18; up to 64 pixels with a 3x3 first convolution and no pooling after it."""
    return _network("resnet18", num_classes, in_channels, is_small(stem, image_size), ("conv1", "maxpool"))


def resnet50(num_classes: int, in_channels: int = 3, image_size: Size | None = None, stem: Stem = "auto") -> nn.Module:
    """torchvision's ResNet-50; up to 64 pixels with a 3x3 first convolution and no pooling after it."""
    return _network("resnet50", num_classes, in_channels, is_small(stem, image_size), ("conv1", "maxpool"))


def densenet121(
    num_classes: int, in_channels: int = 3, image_size: Size | None = None, stem: Stem = "auto"
) -> nn.Module:
    """torchvision's DenseNet-121; up to 64 pixels with a 3x3 first convolution and no pooling after it."""
    first = "features.conv0", "features.pool0"
    return _network("densenet121", num_classes, in_channels, is_small(stem, image_size), first, mode="fan_in")


def mobilenet_v2(
    num_classes: int, in_channels: int = 3, image_size: Size | None = None, stem: Stem = "auto"
) -> nn.Module:
    """torchvision's MobileNetV2; for images of up to 64 pixels, the first two strides are dropped."""
    small = is_small(stem, image_size)
    # Expansion, channels, blocks and stride of each stage (Sandler et al. 2018, table 2), stride 1 in the second.
    stages = [[1, 16, 1, 1], [6, 24, 2, 1], [6, 32, 3, 2], [6, 64, 4, 2], [6, 96, 3, 1], [6, 160, 3, 2], [6, 320, 1, 1]]
    return _network(
        "mobilenet_v2",
        num_classes,
        in_channels,
        small,
        ("features.0.0", None),
        inverted_residual_setting=stages if small else None,
    )


def alexnet(num_classes: int, in_channels: int = 3) -> nn.Module:
    """torchvision's AlexNet, which has no normalisation, for 64 pixels and more."""
    return _network("alexnet", num_classes, in_channels, False, ("features.0", None), mode=None)


@checked
def is_small(stem: Stem, image_size: Size | None) -> bool:
    return stem == "small" or (stem == "auto" and image_size is not None and max(image_size) <= SMALL)


def _network(
    name: str,
    num_classes: int,
    in_channels: int,
    small: bool,
    first: tuple[str, str | None],
    mode: Literal["fan_in", "fan_out"] | None = "fan_out",
    **options: Any,
) -> nn.Module:
    """A torchvision network with a first convolution that suits the images; a small stem has no pooling after it.

    `first` names the convolution and the pooling. A new convolution is initialised like the network's others, from
    Kaiming's normal distribution with this mode.
    """
    from torchvision import models  # here, so that other commands need not wait for it

    model: nn.Module = getattr(models, name)(weights=None, num_classes=num_classes, **options)
    convolution, pooling = first
    old: Any = model.get_submodule(convolution)
    if in_channels != old.in_channels or small:
        shape: tuple[Any, Any, Any] = (3, 1, 1) if small else (old.kernel_size, old.stride, old.padding)
        new = nn.Conv2d(in_channels, old.out_channels, *shape, bias=old.bias is not None)
        if mode is not None:
            nn.init.kaiming_normal_(new.weight, mode=mode, nonlinearity="relu")
        model.set_submodule(convolution, new)
    if small and pooling is not None:
        model.set_submodule(pooling, nn.Identity())
    return model


def deeplabv3plus_mobilenet_v2(num_classes: int, in_channels: int = 3) -> nn.Module:
    """DeepLabV3+ on MobileNetV2, for segmentation; needs the extra `segmentation`."""
    return _deeplab("mobilenet_v2", num_classes, in_channels)


def deeplabv3plus_resnet50(num_classes: int, in_channels: int = 3) -> nn.Module:
    """DeepLabV3+ on ResNet-50, for segmentation; needs the extra `segmentation`."""
    return _deeplab("resnet50", num_classes, in_channels)


def _deeplab(encoder: str, num_classes: int, in_channels: int) -> nn.Module:
    with needs("segmentation", f"model.name='deeplabv3plus_{encoder}'"):
        import segmentation_models_pytorch as smp
    # No pretrained weights, because they would be downloaded.
    return smp.DeepLabV3Plus(  # type: ignore[no-any-return]
        encoder_name=encoder, encoder_weights=None, in_channels=in_channels, classes=num_classes
    )
