"""Training with partly frozen batch norms."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedbn_flwr.errors import MessageError

from .roles import Role


@contextmanager
def frozen_norm(model: nn.Module, what: frozenset[Role]) -> Iterator[None]:
    """Put `model` into training mode and freeze the roles `what` of its batch norms inside the block.

    Frozen statistics: batch norms normalise with their running mean and variance and do not update them, while
    gamma, beta and all other layers train (dropout stays on). Frozen affine: gamma and beta do not train.
    """
    model.train()
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, _BatchNorm)} if what else {}
    frozen = []
    for name, layer in layers.items():
        if Role.STATISTICS in what:
            if layer.running_mean is None:
                raise MessageError(f"cannot freeze the statistics of batch norm {name!r}: it tracks none")
            layer.eval()
        if Role.AFFINE in what:
            frozen += [p for p in layer.parameters(recurse=False) if p.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(True)
