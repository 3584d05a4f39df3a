"""The networks in PyTorch, and a task's batches as its tensors; without this library, which rivals do not have."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .task import BATCH, CLASSES, Task

Batches = list[tuple[Tensor, Tensor]]


def build(name: str) -> nn.Module:
    kind, _, norm = name.partition("-")
    match kind:
        case "mlp":
            return mlp(bool(norm))
        case "cnn":
            return cnn(bool(norm))
        case _:
            return ResNet20()


def mlp(norm: bool) -> nn.Module:
    layers = OrderedDict[str, nn.Module]()
    for number, (inputs, outputs) in enumerate([(64, 64), (64, 32)], start=1):
        layers[f"hidden{number}"] = nn.Linear(inputs, outputs)
        layers |= {f"bn{number}": nn.BatchNorm1d(outputs)} if norm else {}
        layers[f"relu{number}"] = nn.ReLU()
    return nn.Sequential(layers | {"classify": nn.Linear(32, CLASSES)})


def cnn(norm: bool) -> nn.Module:
    layers = OrderedDict[str, nn.Module]()
    for number, (inputs, outputs) in enumerate([(1, 32), (32, 64)], start=1):
        layers[f"conv{number}"] = nn.Conv2d(inputs, outputs, 3, padding=1)
        layers |= {f"bn{number}": nn.BatchNorm2d(outputs)} if norm else {}
        layers |= {f"relu{number}": nn.ReLU(), f"pool{number}": nn.MaxPool2d(2)}
    return nn.Sequential(layers | {"flatten": nn.Flatten(), "classify": nn.Linear(64 * 7 * 7, CLASSES)})


class ResNet20(nn.Module):
    """He et al. 2015, section 4.2, shortcuts without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        channels = (16, 16, 16, 16, 32, 32, 32, 64, 64, 64)  # before, between and after the blocks
        self.blocks = nn.Sequential(*map(Block, channels[:-1], channels[1:]))
        self.classify = nn.Linear(64, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(F.relu(self.bn(self.conv(x))))
        return self.classify(x.mean((2, 3)))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.added = outputs - inputs
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=2 if self.added else 1, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        if self.added:  # every second pixel, and channels of zeros before and after
            x = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.added // 2, self.added // 2))
        return F.relu(y + x)


def load(module: nn.Module, task: Task) -> None:
    """Give the module the task's initial values; running statistics start at their defaults."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(torch.from_numpy(task.initial[name]))


def batches(task: Task) -> list[Batches]:
    """Of each client, cut beforehand: what is measured is training."""
    inputs, targets = torch.from_numpy(task.inputs), torch.from_numpy(task.targets)
    return [list(zip(x.split(BATCH), y.split(BATCH), strict=True)) for x, y in zip(inputs, targets, strict=True)]
