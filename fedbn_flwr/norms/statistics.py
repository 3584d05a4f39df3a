"""Re-estimation of batch norm's statistics from batches."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


@torch.no_grad()
def reestimate(model: nn.Module, batches: Iterable[Any], device: torch.device) -> tuple[dict[str, torch.Tensor], int]:
    """The mean batch statistics over `batches` of (inputs, targets), by state dict key, and the number of batches.

    These are the statistics that torch's cumulative mean (momentum=None) would track. The model and its running
    statistics do not change; static batch norm, which tracks none, is measured too.
    """
    names: dict[_BatchNorm, list[str]] = {}  # a layer that is used twice has two names
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, _BatchNorm):
            names.setdefault(module, []).append(name)
    totals: dict[_BatchNorm, tuple[int, torch.Tensor, torch.Tensor]] = {}

    def measure(layer: _BatchNorm, inputs: tuple[torch.Tensor, ...]) -> None:
        dims = [d for d in range(inputs[0].ndim) if d != 1]
        var, mean = torch.var_mean(inputs[0], dim=dims)  # unbiased, like running statistics
        calls, means, variances = totals.get(layer, (0, torch.zeros_like(mean), torch.zeros_like(var)))
        totals[layer] = (calls + 1, means + mean, variances + var)

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
    for layer, (calls, means, variances) in totals.items():
        for name in names[layer]:
            prefix = f"{name}." if name else ""
            statistics |= {f"{prefix}running_mean": means / calls, f"{prefix}running_var": variances / calls}
    return statistics, count
