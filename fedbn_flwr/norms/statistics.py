"""Re-estimation of batch norm's statistics from batches."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


@dataclass
class _Moments:
    """Mean and variance of the values that a layer has normalised so far, per channel, in float64.

    With `pooled` they are those of all values together; otherwise the means of the batches' own.
    """

    pooled: bool
    batches: int = 0
    values: int = 0
    mean: Any = 0.0
    squares: Any = 0.0  # pooled: the sum of squared distances from the mean; else: the mean unbiased variance

    def add(self, inputs: torch.Tensor) -> None:
        n = inputs.numel() // inputs.shape[1]
        var, mean = torch.var_mean(inputs, dim=[d for d in range(inputs.ndim) if d != 1], correction=0)
        var, mean = var.double(), mean.double()
        self.batches += 1
        self.values += n
        if self.pooled:  # Chan et al. 1979
            distance = mean - self.mean
            self.squares = self.squares + n * var + distance.square() * n * (self.values - n) / self.values
            self.mean = self.mean + distance * (n / self.values)
        else:
            self.squares = self.squares + (var * n / max(n - 1, 1) - self.squares) / self.batches
            self.mean = self.mean + (mean - self.mean) / self.batches

    @property
    def variance(self) -> torch.Tensor:
        """Unbiased, like running variances."""
        variance: torch.Tensor = self.squares / max(self.values - 1, 1) if self.pooled else self.squares
        return variance


@torch.no_grad()
def reestimate(
    model: nn.Module, batches: Iterable[Any], device: torch.device, *, pooled: bool = False
) -> tuple[dict[str, torch.Tensor], int]:
    """Statistics of the values that batch norms normalise in `batches` of (inputs, targets), by state dict key, and the
    number of batches.

    By default they are the means of the batches' statistics, as torch's cumulative mean (momentum=None) tracks them,
    so that a small batch counts as much as a large one. With `pooled` they are the mean and variance of all values
    together. In both cases earlier layers normalise with the statistics of the batch. The model and its running
    statistics do not change; static batch norm, which tracks none, is measured too.
    """
    names: dict[_BatchNorm, list[str]] = {}  # a layer that is used twice has two names
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, _BatchNorm):
            names.setdefault(module, []).append(name)
    moments: dict[_BatchNorm, _Moments] = {}
    dtypes: dict[_BatchNorm, torch.dtype] = {}

    def measure(layer: _BatchNorm, inputs: tuple[torch.Tensor, ...]) -> None:
        moments.setdefault(layer, _Moments(pooled)).add(inputs[0])
        dtypes[layer] = inputs[0].dtype

    hooks = [layer.register_forward_pre_hook(measure) for layer in names]
    modes = {module: module.training for module in model.modules()}
    tracks = {layer: layer.track_running_stats for layer in names}
    model.eval()
    count = 0
    try:
        for layer in names:
            # Normalise with batch statistics, without updating running statistics and counter.
            layer.training, layer.track_running_stats = True, False
        for inputs, _ in batches:
            model(inputs.to(device))
            count += 1
    finally:
        for hook in hooks:
            hook.remove()
        for layer, tracked in tracks.items():
            layer.track_running_stats = tracked
        for module, training in modes.items():
            module.training = training
    if not count:
        raise ValueError("there are no examples to estimate statistics from")
    statistics: dict[str, torch.Tensor] = {}
    for layer, measured in moments.items():
        mean, variance = (value.to(dtypes[layer]) for value in (measured.mean, measured.variance))
        for name in names[layer]:
            prefix = f"{name}." if name else ""
            statistics |= {f"{prefix}running_mean": mean, f"{prefix}running_var": variance}
    return statistics, count
