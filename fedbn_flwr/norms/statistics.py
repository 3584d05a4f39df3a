"""Re-estimation of batch norm's statistics from batches, and training with partly frozen batch norms."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from fedbn_flwr.batch import Batch, map_batches, map_tensors
from fedbn_flwr.errors import MessageError

from .roles import MEAN, VARIANCE, Role, batch_norms, key_of, norm_layers, roles
from .variants import MaskedBatchNorm1d, real_values


@torch.no_grad()
def reestimate(
    model: nn.Module, batches: Iterable[Batch], device: torch.device, *, pooled: bool = False, threads: int = 1
) -> tuple[dict[str, torch.Tensor], int]:
    """Measure the statistics of batch norms' inputs over `batches` of (inputs, targets).

    Returns them by state dict key, and the number of batches. By default they are the means of the batches' statistics,
    as torch's cumulative mean (momentum=None) tracks them, so that a small batch counts as much as a large one. With
    `pooled` they are the mean and variance of all values together. In both cases earlier layers normalise with the
    statistics of the batch.

    The model and its running statistics do not change. Static batch norm, which tracks none, is measured too. The
    result does not depend on the number of threads.
    """
    model = copy.deepcopy(model)  # leave the caller's model as it is
    model.eval()
    layers = batch_norms(model, "a measurement of statistics")
    names = {layer: name for name, layer in reversed(layers.items())}  # a layer that is used twice: its first name
    thread = threading.local()  # its `moments` are those of this thread's batch
    dtypes: dict[str, torch.dtype] = {}  # of the values

    def measure(name: str, layer: nn.Module, args: tuple[torch.Tensor, ...], kwargs: dict[str, torch.Tensor]) -> None:
        values = _values_of(layer, args, kwargs)
        dtypes[name] = values.dtype
        thread.moments.append((name, values.numel() // values.shape[1], *_moments(values)))

    for layer, name in names.items():
        layer.register_forward_pre_hook(partial(measure, name), with_kwargs=True)
        # Normalise with batch statistics, without updating running statistics and counter.
        layer.training, layer.track_running_stats = True, False

    @torch.no_grad()  # a setting of the thread
    def moments_of(model: nn.Module, batch: Batch) -> list[tuple[str, int, torch.Tensor, torch.Tensor]]:
        thread.moments = []
        model(map_tensors(lambda inputs: inputs.to(device), batch[0]))
        return list(thread.moments)

    # For each layer that the model uses, by its first name and in float64: the sum of the weights, and the weighted
    # sums of means, variances and squared means.
    sums: dict[str, torch.Tensor] = {}
    count = 0
    for measured in map_batches(moments_of, model, batches, threads):
        count += 1
        for name, n, var, mean in measured:
            weight, own = (n, var) if pooled else (1, var * n / max(n - 1, 1))  # unbiased, like running variances
            terms = torch.stack([torch.ones_like(mean), mean, own, mean.square()])
            sums[name] = sums.get(name, 0) + weight * terms
    if not count:
        raise ValueError("there are no examples to estimate statistics from")
    statistics: dict[str, torch.Tensor] = {}
    for name, layer in layers.items():
        if (first := names[layer]) in sums:
            total = sums[first][0]
            _, mean, variance, squares = sums[first] / total
            if pooled:  # within the batches and between them
                variance = (variance + (squares - mean.square()).clamp(min=0)) * total / (total - 1).clamp(min=1)
            for key, value in ((MEAN, mean), (VARIANCE, variance)):
                statistics[key_of(name, key)] = value.to(dtypes[first])
    return statistics, count


def _values_of(layer: nn.Module, args: tuple[torch.Tensor, ...], kwargs: dict[str, torch.Tensor]) -> torch.Tensor:
    """The values that a batch norm called with these arguments normalises."""
    if isinstance(layer, MaskedBatchNorm1d):
        return real_values(*args, **kwargs)
    return next(iter((*args, *kwargs.values())))


def _moments(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The biased variance and the mean of each channel, in float64."""
    var, mean = torch.var_mean(values, dim=[d for d in range(values.ndim) if d != 1], correction=0)
    return var.double(), mean.double()


class MomentRecorder:
    """Records mean and biased variance of what batch norms normalise, without changing it, until it is closed.

    `statistics` returns their means over the batches, by state dict key.
    """

    def __init__(self, model: nn.Module) -> None:
        self._layers = batch_norms(model, "a record of batches' moments")
        self._sums: dict[nn.Module, torch.Tensor] = {}  # of each layer: the number of batches, variances, means
        layers = dict.fromkeys(self._layers.values())  # one that is used twice has two names
        self._hooks = [layer.register_forward_pre_hook(self._record, with_kwargs=True) for layer in layers]

    def close(self) -> None:
        """Record no more."""
        for hook in self._hooks:
            hook.remove()

    @torch.no_grad()
    def _record(self, layer: nn.Module, args: tuple[torch.Tensor, ...], kwargs: dict[str, torch.Tensor]) -> None:
        var, mean = _moments(_values_of(layer, args, kwargs))
        terms = torch.stack([torch.ones_like(mean), var, mean])
        self._sums[layer] = self._sums[layer].add_(terms) if layer in self._sums else terms

    def statistics(self) -> dict[str, torch.Tensor]:
        statistics: dict[str, torch.Tensor] = {}
        for name, layer in self._layers.items():
            if layer in self._sums:
                count, var, mean = self._sums[layer]
                statistics |= {key_of(name, VARIANCE): var / count, key_of(name, MEAN): mean / count}
        return statistics


def _train_inside(layer: nn.Module, mode: bool = True) -> nn.Module:
    for module in layer.children():
        module.train(mode)
    return layer


@contextmanager
def frozen_norm(model: nn.Module, frozen_roles: frozenset[Role]) -> Iterator[None]:
    """Put `model` into training mode and, inside the block, freeze these roles of its batch norms.

    With frozen statistics, batch norms normalise with their running mean and variance and do not update them, while
    gamma, beta and all other layers train (dropout stays on). A batch norm without statistics normalises with the
    statistics of its batch as before. With frozen affine parameters, gamma and beta do not train. A loop inside the
    block may call `model.train()` and `model.eval()`, which frozen layers pass on to the modules in them.
    """
    model.train()
    layers = norm_layers(model) if frozen_roles else {}
    tracking: list[nn.Module] = []
    if Role.STATISTICS in frozen_roles:
        tracking = [layer for layer in layers.values() if getattr(layer, "running_mean", None) is not None]
        if layers and not tracking:
            raise MessageError(f"cannot freeze the statistics of batch norm {next(iter(layers))!r}: it tracks none")
        for layer in tracking:
            layer.training = False  # of the layer alone: dropout inside it stays on
            vars(layer)["train"] = partial(_train_inside, layer)
    role_of = roles(model) if Role.AFFINE in frozen_roles else {}
    frozen = [
        parameter
        for key, parameter in model.named_parameters(remove_duplicate=False)
        if role_of.get(key) is Role.AFFINE and parameter.requires_grad
    ]
    for parameter in frozen:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for layer in tracking:
            vars(layer).pop("train", None)  # the layer may have two names
            layer.training = model.training
        for parameter in frozen:
            parameter.requires_grad_(True)
