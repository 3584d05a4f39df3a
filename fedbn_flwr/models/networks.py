"""Networks defined here, with batch norm; `convert_norm` replaces it by other normalisation layers."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedbn_flwr.norms.residual import ResidualParts


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
            pool=nn.AdaptiveMaxPool2d(2),
            flatten=nn.Flatten(),
            classify=nn.Linear(32 * 2 * 2, num_classes),
        )
    )


def mlp(num_classes: int, in_channels: int = 1, image_size: tuple[int, int] = (28, 28)) -> nn.Module:
    """Perceptron 784-30-10 with one batch norm (FedTAN paper, MNIST); one input for each value of an image."""
    return nn.Sequential(
        OrderedDict(
            flatten=nn.Flatten(),
            hidden=nn.Linear(image_size[0] * image_size[1] * in_channels, 30),
            bn=nn.BatchNorm1d(30),
            relu=nn.ReLU(),
            classify=nn.Linear(30, num_classes),
        )
    )


class ResNet20(nn.Module):
    """ResNet-20 for 32x32 images (He et al. 2015, section 4.2), shortcuts without parameters (option A).

    Three stages of three blocks; 269,722 parameters and 1,376 statistics for ten classes and RGB images.
    """

    def __init__(self, num_classes: int, in_channels: int = 3) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, 16, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(16)
        self.stages = nn.Sequential(
            *(_BasicBlock(16, 16) for _ in range(3)),
            *(_BasicBlock(16 if i == 0 else 32, 32, stride=2 if i == 0 else 1) for i in range(3)),
            *(_BasicBlock(32 if i == 0 else 64, 64, stride=2 if i == 0 else 1) for i in range(3)),
        )
        self.classify = nn.Linear(64, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn(self.conv(x)))  # [N, 16, 32, 32]
        x = self.stages(x)  # [N, 64, 8, 8]
        logits: Tensor = self.classify(x.mean((2, 3)))
        return logits

    def residual_parts(self) -> ResidualParts:
        blocks = {f"stages.{name}": block for name, block in self.stages.named_children()}
        return ResidualParts("conv", "bn", "classify", blocks)


class _BasicBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.stride = stride
        self.added = outputs - inputs

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return F.relu(y + self._shortcut(x))

    def _shortcut(self, x: Tensor) -> Tensor:
        """Option A: every second pixel, and channels of zeros before and after."""
        if self.stride == 1 and not self.added:
            return x
        half = self.added // 2
        return torch.nn.functional.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, half, self.added - half))
