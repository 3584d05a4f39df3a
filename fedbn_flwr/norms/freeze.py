"""Training with partly frozen batch norms."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from fedbn_flwr.errors import MessageError

from .roles import AFFINE, Role, norm_layers


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
