"""This project's own networks, with batch norm; `convert_norm` replaces it with other normalisation layers."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

from torch import Tensor, fx, nn
from torch.nn import functional as F

from fedbn_flwr.data import Size
from fedbn_flwr.errors import SettingsError
from fedbn_flwr.norms.fixup import ResidualBlock
from fedbn_flwr.norms.variants import MaskedBatchNorm1d


def cnn(num_classes: int, in_channels: int = 1) -> nn.Module:
    """Two convolutions with batch norm and a linear layer, for small images such as digits."""
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(in_channels, 16, 3, padding=1, bias=False),
            bn1=nn.BatchNorm2d(16),
            relu1=nn.ReLU(),
            conv2=nn.Conv2d(16, 32, 3, padding=1, bias=False),
            bn2=nn.BatchNorm2d(32),
            relu2=nn.ReLU(),
            pool=MaxOfQuarters(),
            flatten=nn.Flatten(),
            classify=nn.Linear(32 * 2 * 2, num_classes),
        )
    )


class MaxOfQuarters(nn.Module):
    """`AdaptiveMaxPool2d(2)`, bit for bit, by a layer that ONNX has. In odd sizes the quarters overlap by a pixel."""

    def forward(self, x: Tensor) -> Tensor:
        return _max_of_quarters(x)


def _max_of_quarters(x: Tensor) -> Tensor:
    height, width = x.shape[2:]
    if min(height, width) < 2:
        return F.adaptive_max_pool2d(x, 2)
    return F.max_pool2d(x, ((height + 1) // 2, (width + 1) // 2), (height // 2, width // 2))


fx.wrap("_max_of_quarters")  # one operation in a trace, which could not follow its branch


def mlp(num_classes: int, input_shape: Sequence[int] = (1, 28, 28), hidden: int = 30) -> nn.Module:
    """Perceptron 784-30-10 with one batch norm (FedTAN paper, MNIST); one input for each value of an example."""
    return nn.Sequential(
        OrderedDict(
            flatten=nn.Flatten(),
            hidden=nn.Linear(math.prod(input_shape), hidden),
            bn=nn.BatchNorm1d(hidden),
            relu=nn.ReLU(),
            classify=nn.Linear(hidden, num_classes),
        )
    )


def linear(num_classes: int, input_shape: Sequence[int] = (1, 28, 28)) -> nn.Module:
    """Logistic or linear regression: one linear layer, without batch norm."""
    return nn.Sequential(OrderedDict(flatten=nn.Flatten(), classify=nn.Linear(math.prod(input_shape), num_classes)))


class CNN1d(nn.Module):
    """Two 1-d convolutions with batch norm, the mean over time and a linear layer, for series of any length.

    Batch norm and the mean leave out padded positions.
    """

    def __init__(self, num_classes: int, input_shape: Sequence[int] = (1, 128)) -> None:
        super().__init__()
        if len(input_shape) != 2:
            raise SettingsError(
                f"model.name='cnn1d' takes series, [channels, time], but these inputs have the shape "
                f"{list(input_shape)}"
            )
        self.conv1 = nn.Conv1d(input_shape[0], 32, 5, padding=2, bias=False)
        self.bn1 = MaskedBatchNorm1d(32)
        self.conv2 = nn.Conv1d(32, 64, 5, padding=2, bias=False)
        self.bn2 = MaskedBatchNorm1d(64)
        self.classify = nn.Linear(64, num_classes)

    def forward(self, inputs: Tensor | dict[str, Tensor]) -> Tensor:
        x, mask = (inputs["inputs"], inputs["mask"]) if isinstance(inputs, dict) else (inputs, None)
        x = F.relu(self.bn1(self.conv1(x), mask))  # [N, 32, T], zero where there is no real position
        x = F.relu(self.bn2(self.conv2(x), mask))
        lengths = x.shape[2] if mask is None else mask.sum(1, keepdim=True)
        return self.classify(x.sum(2) / lengths)  # type: ignore[no-any-return]


class ResNet20(nn.Module):
    """ResNet-20 for 32x32 images (He et al. 2015, section 4.2), shortcuts without parameters (option A).

    Three stages of three blocks; 269,722 parameters and 1,376 statistics for ten classes and RGB images.
    """

    def __init__(self, num_classes: int, in_channels: int = 3) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, 16, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(16)
        channels = (16, 16, 16, 16, 32, 32, 32, 64, 64, 64)  # before, between and after the blocks
        self.stages = nn.Sequential(*map(_BasicBlock, channels[:-1], channels[1:]))
        self.classify = nn.Linear(64, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn(self.conv(x)))  # [N, 16, 32, 32]
        x = self.stages(x)  # [N, 64, 8, 8]
        return self.classify(x.mean((2, 3)))  # type: ignore[no-any-return]


class _BasicBlock(ResidualBlock):
    """Halves the sides if there are more channels."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.added = outputs - inputs
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=2 if self.added else 1, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        if self.added:  # option A: every second pixel, and channels of zeros before and after
            half = self.added // 2
            x = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, half, self.added - half))
        return F.relu(y + x)


# --- plain convolutional networks of the papers, with batch norm after each convolution ---
# Those that end in linear layers are built for one image size, `image_size` as (height, width).


def lenet(num_classes: int, in_channels: int = 1, image_size: Size = (28, 28)) -> nn.Module:
    """LeNet-5 (LeCun et al. 1998) with ReLU, max pooling and batch norm after both convolutions."""
    padding = 2 if min(image_size) < 32 else 0  # LeCun et al. place digits of 28x28 in 32x32
    layers = [(6, 5, padding, True), (16, 5, 0, True)]
    return _plain(("lenet", 12), in_channels, image_size, layers, num_classes, (120, 84))


def digits_cnn(num_classes: int, in_channels: int = 3, image_size: Size = (28, 28)) -> nn.Module:
    """FedBN's six-layer network for Digits-Five (Li et al. 2021), batch norm after all layers but the last."""
    layers = [(64, 5, 2, True), (64, 5, 2, True), (128, 5, 2, False)]
    return _plain(("digits_cnn", 4), in_channels, image_size, layers, num_classes, (2048, 512), norm=True)


# FedBS states only filters and units. Padding every convolution by two pixels gives the first linear layer the stated
# number of inputs: 4500 = 500 * 3 * 3 from 32x32 and 1568 = 32 * 7 * 7 from 28x28.


def fedbs_cifar(num_classes: int, in_channels: int = 3, image_size: Size = (32, 32)) -> nn.Module:
    """FedBS's network for CIFAR-10: four convolutions with batch norm, three linear layers."""
    layers = [(100, 5, 2, True), (150, 3, 2, True), (250, 3, 2, True), (500, 3, 2, True)]
    return _plain(("fedbs_cifar", 2), in_channels, image_size, layers, num_classes, (270, 150))


def fedbs_mnist(num_classes: int, in_channels: int = 1, image_size: Size = (28, 28)) -> nn.Module:
    """FedBS's network for MNIST and Fashion-MNIST: two convolutions with batch norm, one linear layer."""
    layers = [(16, 5, 2, True), (32, 5, 2, True)]
    return _plain(("fedbs_mnist", 4), in_channels, image_size, layers, num_classes)


def alexnet_bn(num_classes: int, in_channels: int = 3) -> nn.Module:
    """FedBN's AlexNet for Office-Caltech-10 and DomainNet: torchvision's, with batch norm instead of dropout."""
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(in_channels, 64, 11, stride=4, padding=2),
            bn1=nn.BatchNorm2d(64),
            relu1=nn.ReLU(inplace=True),
            pool1=nn.MaxPool2d(3, 2),
            conv2=nn.Conv2d(64, 192, 5, padding=2),
            bn2=nn.BatchNorm2d(192),
            relu2=nn.ReLU(inplace=True),
            pool2=nn.MaxPool2d(3, 2),
            conv3=nn.Conv2d(192, 384, 3, padding=1),
            bn3=nn.BatchNorm2d(384),
            relu3=nn.ReLU(inplace=True),
            conv4=nn.Conv2d(384, 256, 3, padding=1),
            bn4=nn.BatchNorm2d(256),
            relu4=nn.ReLU(inplace=True),
            conv5=nn.Conv2d(256, 256, 3, padding=1),
            bn5=nn.BatchNorm2d(256),
            relu5=nn.ReLU(inplace=True),
            pool5=nn.MaxPool2d(3, 2),
            mean=nn.AdaptiveAvgPool2d(6),
            flatten=nn.Flatten(),
            hidden1=nn.Linear(256 * 6 * 6, 4096),
            bn6=nn.BatchNorm1d(4096),
            relu6=nn.ReLU(inplace=True),
            hidden2=nn.Linear(4096, 4096),
            bn7=nn.BatchNorm1d(4096),
            relu7=nn.ReLU(inplace=True),
            classify=nn.Linear(4096, num_classes),
        )
    )


def _plain(
    smallest: tuple[str, int],
    channels: int,
    image_size: Size,
    convolutions: Sequence[tuple[int, int, int, bool]],
    num_classes: int,
    hidden: Sequence[int] = (),
    *,
    norm: bool = False,
) -> nn.Module:
    """Convolutions of (filters, kernel, padding, whether max pooling follows), then linear layers, perhaps with a norm.

    `smallest` is the network's name and the smallest side of its images.
    """
    name, least = smallest
    if min(image_size) < least:
        height, width = image_size
        raise SettingsError(
            f"model.name={name!r} needs images of at least {least}x{least} pixels; these have {height}x{width}"
        )
    layers = OrderedDict[str, nn.Module]()
    sides = list(image_size)
    for number, (filters, kernel, padding, pooled) in enumerate(convolutions, start=1):
        layers[f"conv{number}"] = nn.Conv2d(channels, filters, kernel, padding=padding)
        layers[f"bn{number}"] = nn.BatchNorm2d(filters)
        layers[f"relu{number}"] = nn.ReLU()
        if pooled:
            layers[f"pool{number}"] = nn.MaxPool2d(2)
        sides = [(side + 2 * padding - kernel + 1) // (2 if pooled else 1) for side in sides]
        channels = filters
    layers["flatten"] = nn.Flatten()
    inputs = channels * sides[0] * sides[1]
    for number, units in enumerate(hidden, start=1):
        layers[f"hidden{number}"] = nn.Linear(inputs, units)
        if norm:
            layers[f"bn{len(convolutions) + number}"] = nn.BatchNorm1d(units)
        layers[f"relu{len(convolutions) + number}"] = nn.ReLU()
        inputs = units
    layers["classify"] = nn.Linear(inputs, num_classes)
    return nn.Sequential(layers)
