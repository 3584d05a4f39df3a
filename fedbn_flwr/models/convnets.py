"""Plain convolutional networks of the papers, with batch norm after each convolution.

Networks that end in linear layers are built for one image size, `image_size` as (height, width).
"""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from fedbn_flwr.data import Size
from fedbn_flwr.errors import SettingsError


def lenet(num_classes: int, in_channels: int = 1, image_size: Size = (28, 28)) -> nn.Module:
    """LeNet-5 (LeCun et al. 1998) with ReLU, max pooling and batch norm after both convolutions."""
    _at_least("lenet", image_size, 12)
    padding = 2 if min(image_size) < 32 else 0  # LeCun et al. place digits of 28x28 in 32x32
    height, width = (((side + 2 * padding - 4) // 2 - 4) // 2 for side in image_size)
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(in_channels, 6, 5, padding=padding),
            bn1=nn.BatchNorm2d(6),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(6, 16, 5),
            bn2=nn.BatchNorm2d(16),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(2),
            flatten=nn.Flatten(),
            hidden1=nn.Linear(16 * height * width, 120),
            relu3=nn.ReLU(),
            hidden2=nn.Linear(120, 84),
            relu4=nn.ReLU(),
            classify=nn.Linear(84, num_classes),
        )
    )


def digits_cnn(num_classes: int, in_channels: int = 3, image_size: Size = (28, 28)) -> nn.Module:
    """FedBN's six-layer network for Digits-Five (Li et al. 2021), batch norm after all layers but the last."""
    _at_least("digits_cnn", image_size, 4)
    height, width = (side // 4 for side in image_size)
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(in_channels, 64, 5, padding=2),
            bn1=nn.BatchNorm2d(64),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(64, 64, 5, padding=2),
            bn2=nn.BatchNorm2d(64),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(2),
            conv3=nn.Conv2d(64, 128, 5, padding=2),
            bn3=nn.BatchNorm2d(128),
            relu3=nn.ReLU(),
            flatten=nn.Flatten(),
            hidden1=nn.Linear(128 * height * width, 2048),
            bn4=nn.BatchNorm1d(2048),
            relu4=nn.ReLU(),
            hidden2=nn.Linear(2048, 512),
            bn5=nn.BatchNorm1d(512),
            relu5=nn.ReLU(),
            classify=nn.Linear(512, num_classes),
        )
    )


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


# FedBS states only filters and units. With a padding of two pixels in every convolution, the first linear layer has as
# many inputs as stated: 4500 = 500 * 3 * 3 from 32x32 and 1568 = 32 * 7 * 7 from 28x28.


def fedbs_cifar(num_classes: int, in_channels: int = 3, image_size: Size = (32, 32)) -> nn.Module:
    """FedBS's network for CIFAR-10: four convolutions with batch norm, three linear layers."""
    _at_least("fedbs_cifar", image_size, 2)
    height, width = image_size
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    inputs = in_channels
    for number, (kernel, filters) in enumerate(((5, 100), (3, 150), (3, 250), (3, 500)), start=1):
        layers[f"conv{number}"] = nn.Conv2d(inputs, filters, kernel, padding=2)
        layers[f"bn{number}"] = nn.BatchNorm2d(filters)
        layers[f"relu{number}"] = nn.ReLU()
        layers[f"pool{number}"] = nn.MaxPool2d(2)
        height, width = ((side + 5 - kernel) // 2 for side in (height, width))
        inputs = filters
    layers["flatten"] = nn.Flatten()
    layers["hidden1"] = nn.Linear(500 * height * width, 270)
    layers["relu5"] = nn.ReLU()
    layers["hidden2"] = nn.Linear(270, 150)
    layers["relu6"] = nn.ReLU()
    layers["classify"] = nn.Linear(150, num_classes)
    return nn.Sequential(layers)


def fedbs_mnist(num_classes: int, in_channels: int = 1, image_size: Size = (28, 28)) -> nn.Module:
    """FedBS's network for MNIST and Fashion-MNIST: two convolutions with batch norm, one linear layer."""
    _at_least("fedbs_mnist", image_size, 4)
    height, width = (side // 4 for side in image_size)
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(in_channels, 16, 5, padding=2),
            bn1=nn.BatchNorm2d(16),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(16, 32, 5, padding=2),
            bn2=nn.BatchNorm2d(32),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(2),
            flatten=nn.Flatten(),
            classify=nn.Linear(32 * height * width, num_classes),
        )
    )


def _at_least(name: str, image_size: Size, least: int) -> None:
    if min(image_size) < least:
        height, width = image_size
        raise SettingsError(
            f"model.name={name!r} needs images of at least {least}x{least} pixels; these have {height}x{width}"
        )
