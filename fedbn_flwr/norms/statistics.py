"""Re-estimation of batch norm's statistics from batches, and training with partly frozen batch norms."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from fedbn_flwr.batch import each, map_batches
from fedbn_flwr.errors import MessageError

from .roles import AFFINE, MEAN, VARIANCE, Role, batch_norms, norm_layers
from .variants import MaskedBatchNorm1d, real_values


@dataclass
class _Moments:
    """Mean and variance of the values that a layer has normalised so far, per channel, in float64.

    With `pooled` they are those of all values together; otherwise the means of the batches' own.
    """

    pooled: bool
    dtype: torch.dtype  # of the values
    batches: int = 0
    values: int = 0
    mean: Any = 0.0
    squares: Any = 0.0  # pooled: the sum of squared distances from the mean; else: the mean unbiased variance

    def add(self, n: int, var: torch.Tensor, mean: torch.Tensor) -> None:
        """Variance (not corrected) and mean of `n` values."""
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
    model: nn.Module, batches: Iterable[Any], device: torch.device, *, pooled: bool = False, threads: int = 1
) -> tuple[dict[str, torch.Tensor], int]:
    """Statistics of the values that batch norms normalise in `batches` of (inputs, targets), by state dict key, and the
    number of batches.

    By default they are the means of the batches' statistics, as torch's cumulative mean (momentum=None) tracks them,
    so that a small batch counts as much as a large one. With `pooled` they are the mean and variance of all values
    together. In both cases earlier layers normalise with the statistics of the batch. The model and its running
    statistics do not change; static batch norm, which tracks none, is measured too. The result does not depend on the
    number of threads.
    """
    model = copy.deepcopy(model).eval()  # the caller's stays as it is
    layers = batch_norms(model, "a measurement of statistics")
    names = {layer: name for name, layer in reversed(layers.items())}  # a layer that is used twice: its first name
    found = threading.local()  # the moments of the batch that this thread has

    def measure(name: str, layer: nn.Module, args: tuple[torch.Tensor, ...], kwargs: dict[str, torch.Tensor]) -> None:
        values = real_values(*args, **kwargs) if isinstance(layer, MaskedBatchNorm1d) else args[0]
        var, mean = torch.var_mean(values, dim=[d for d in range(values.ndim) if d != 1], correction=0)
        found.moments.append((name, values.numel() // values.shape[1], var, mean))

    for layer, name in names.items():
        layer.register_forward_pre_hook(partial(measure, name), with_kwargs=True)
        # Normalise with batch statistics, without updating running statistics and counter.
        layer.training, layer.track_running_stats = True, False

    @torch.no_grad()  # a setting of the thread
    def moments_of(model: nn.Module, batch: Any) -> list[tuple[str, int, torch.Tensor, torch.Tensor]]:
        found.moments = []
        model(each(lambda inputs: inputs.to(device), batch[0]))
        return list(found.moments)

    moments: dict[str, _Moments] = {}  # by the first name of each layer that the model uses
    count = 0
    for measured in map_batches(moments_of, model, batches, threads):
        count += 1
        for name, n, var, mean in measured:
            moments.setdefault(name, _Moments(pooled, mean.dtype)).add(n, var.double(), mean.double())
    if not count:
        raise ValueError("there are no examples to estimate statistics from")
    statistics: dict[str, torch.Tensor] = {}
    for name, layer in layers.items():
        if (own := moments.get(names[layer])) is not None:
            prefix = f"{name}." if name else ""
            statistics |= {f"{prefix}{MEAN}": own.mean.to(own.dtype), f"{prefix}{VARIANCE}": own.variance.to(own.dtype)}
    return statistics, count


@contextmanager
def frozen_norm(model: nn.Module, what: frozenset[Role]) -> Iterator[None]:
    """Put `model` into training mode and freeze the roles `what` of its batch norms inside the block.

    Frozen statistics: batch norms normalise with their running mean and variance and do not update them, while
    gamma, beta and all other layers train (dropout stays on). A batch norm without statistics normalises by its batch
    as before. Frozen affine: gamma and beta do not train.
    """
    model.train()
    layers = norm_layers(model) if what else {}
    if Role.STATISTICS in what:
        tracking = [layer for layer in layers.values() if getattr(layer, "running_mean", None) is not None]
        if layers and not tracking:
            raise MessageError(f"cannot freeze the statistics of batch norm {next(iter(layers))!r}: it tracks none")
        for layer in tracking:
            layer.eval()
    own = [layer._parameters.get(name) for layer in layers.values() for name in AFFINE if Role.AFFINE in what]
    frozen = [parameter for parameter in own if parameter is not None and parameter.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(True)
