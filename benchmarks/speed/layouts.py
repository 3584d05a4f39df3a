"""Training steps with channels last beside those without."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedbn_flwr.client.optimizers import SGD
from fedbn_flwr.client.training import backpropagate
from fedbn_flwr.models.build import build_model
from fedbn_flwr.models.layout import lay_out, suits_channels_last

from .common import Figure, Options, figure, seconds

# Network, channels and sides of the images, and batch sizes, as in the shipped experiments.
NETWORKS = (
    ("cnn", 1, 8, 16),
    ("cnn", 1, 28, 20),
    ("lenet", 3, 32, 20),
    ("fedbs_mnist", 1, 28, 10),
    ("fedbs_cifar", 3, 32, 10),
    ("digits_cnn", 3, 28, 32),
    ("resnet20", 3, 32, 20),
    ("resnet20", 3, 32, 128),
    ("resnet18", 3, 32, 20),
    ("mobilenet_v2", 3, 32, 32),
    ("alexnet_bn", 3, 128, 32),
)
NORMS = ("bn", "brn", "gn", "ln", "in", "gn+ws", "won", "fixup")


def layouts(options: Options) -> Iterator[Figure]:
    """The time of a training step with plain convolutions over that with channels last, on one thread."""
    torch.set_num_threads(1)
    for name, channels, size, batch in NETWORKS:
        inputs, targets = torch.randn(batch, channels, size, size), torch.randint(0, 10, (batch,))
        for norm in NORMS:
            if (norm == "fixup" and "resnet" not in name) or (norm == "in" and name in ("digits_cnn", "alexnet_bn")):
                continue  # no residual blocks; batch norm after linear layers, which instance norm cannot replace
            model = build_model(name, 10, norm, input_shape=(channels, size, size))
            last = copy.deepcopy(model)
            lay_out(last)
            plain, laid = (_stepper(each, inputs, targets) for each in (model, last))
            steps = max(1, int(0.3 / (seconds(plain) + seconds(laid))))
            ratios = [_ratio(plain, laid, steps) for _ in range(options.repeats)]
            chosen = "auto" if suits_channels_last(model) else "not by auto"
            yield figure(f"{name}, {size} pixels, batch {batch}, {norm}, {chosen}", ratios, "x")


def _stepper(model: nn.Module, inputs: Tensor, targets: Tensor) -> Callable[[], None]:
    model.train()
    optimizer = SGD(model.parameters(), 0.001, 0.9)

    def step() -> None:
        optimizer.zero_grad()
        backpropagate(model, inputs, targets, F.cross_entropy)
        optimizer.step()

    return step


def _ratio(plain: Callable[[], None], laid: Callable[[], None], steps: int) -> float:
    """Of the medians over steps that alternate: other programs then slow both sides alike."""
    times = [(seconds(plain), seconds(laid)) for _ in range(steps)]
    return statistics.median(before for before, _ in times) / statistics.median(after for _, after in times)
