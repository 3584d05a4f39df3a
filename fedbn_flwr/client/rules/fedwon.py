"""FedWon's adaptive gradient clipping (Brock et al. 2021, https://arxiv.org/abs/2102.06171, section 4)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from fedbn_flwr.client.rule import ClientRule, Key

CLIP = "fedbn.clip"


class FedWon(ClientRule):
    """Clips the gradients of all parameters except those of the last linear layer."""

    keys = {CLIP: Key("float", "clip gradients adaptively by this factor, except those of the last linear layer")}
    order = 1  # clips the gradients that the other rules have changed

    def begin(self) -> None:
        linear = [module for module in self.local.model.modules() if isinstance(module, nn.Linear)]
        exempt = {id(p) for p in linear[-1].parameters()} if linear else set()
        self.clipped = [p for p in self.local.parameters.values() if id(p) not in exempt]

    def adjust(self) -> None:
        clip_adaptively(self.clipped, float(self.local.config[CLIP]))


@torch.no_grad()
def clip_adaptively(parameters: Iterable[nn.Parameter], factor: float, eps: float = 1e-3) -> None:
    """Limit the norm of each unit's gradient to `factor` times the norm of the unit's weights (at least `eps`).

    A unit is a row of a linear layer, a filter of a convolution, or a whole bias.
    """
    for parameter in parameters:
        if (gradient := parameter.grad) is None:
            continue
        limit = _unit_norm(parameter).clamp_(min=eps) * factor
        norm = _unit_norm(gradient)
        gradient.mul_(torch.where(norm > limit, limit / norm.clamp(min=1e-6), 1.0))


def _unit_norm(x: Tensor) -> Tensor:
    """The norm of each output unit, in a shape that broadcasts with x."""
    dims = tuple(range(1, x.ndim)) if x.ndim > 1 else None
    norm: Tensor = torch.linalg.vector_norm(x, dim=dims, keepdim=x.ndim > 1)
    return norm
