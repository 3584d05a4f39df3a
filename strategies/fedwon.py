"""FedWon (Zhuang, Lyu, "FedWon: Triumphing Multi-domain Federated Learning Without Normalization", arXiv 2306.05879).

The network has no normalisation layers: batch norms are removed, convolutions are reparametrised by scaled weight
standardisation (`model.norm=won`, see `fedbn_flwr.norms.wsconv`), and clients clip their gradients adaptively. The
server averages as FedAvg does.

The paper uses lambda = 0.1 for larger batches and no clipping for small ones (1 to 4 images). The last linear layer is
not clipped, as in Brock et al. 2021, who introduced adaptive clipping.
"""

from __future__ import annotations

from typing import Annotated, Any

import torch
from annotated_types import Ge
from torch import Tensor, nn

from fedbn_flwr.client.rule import ClientRule, Key, Memo, Tensors
from fedbn_flwr.messages.protocol import Config
from fedbn_flwr.server.traits import Round

from .fedavg import FedAvg

CLIP = "fedbn.fedwon-clip"


class FedWon(FedAvg):
    """FedAvg for a network without normalisation.

    Accepts FedAvg's arguments too.

    Parameters
    ----------
    clip : float or None (default: 0.1)
        lambda, the largest ratio of a unit's gradient norm to its weight norm; None or 0 turns clipping off.
    """

    without_statistics = (
        "FedWon is for networks without normalisation, but the model has batch norm ({!r}); use a model with "
        "model.norm=won, or convert_norm(model, 'won') on server and clients"
    )

    def __init__(self, *, clip: Annotated[float, Ge(0)] | None = 0.1, **options: Any) -> None:
        super().__init__(**options)
        self.clip = clip

    def config(self, round: Round) -> Config:
        return {CLIP: float(self.clip)} if self.clip else {}


class FedWonClient(ClientRule):
    """Adaptive clipping (Brock et al. 2021, https://arxiv.org/abs/2102.06171, section 4)."""

    keys = {CLIP: Key("float", "clip gradients adaptively with this factor, except in the last linear layer")}
    order = 1  # clips the gradients that the other rules have changed

    def begin(self, w: Tensors) -> Memo:
        model = self.local.model
        linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
        last = {*map(id, linear[-1].parameters())} if linear else set()
        self.exempt = {name for name, parameter in model.named_parameters() if id(parameter) in last}
        return {}

    def adjust(self, w: Tensors, g: Tensors, memo: Memo) -> None:
        clipped = {name: gradient for name, gradient in g.items() if name not in self.exempt}
        clip_adaptively(w, clipped, float(self.local.config[CLIP]))


@torch.no_grad()
def clip_adaptively(w: Tensors, g: Tensors, factor: float, eps: float = 1e-3) -> None:
    """Limit the norm of each unit's gradient to `factor` times the norm of the unit's weights (at least `eps`).

    A unit is a row of a linear layer, a filter of a convolution, or a whole bias.
    """
    for name, gradient in g.items():
        limit = _unit_norm(w[name]).clamp_(min=eps) * factor
        norm = _unit_norm(gradient)
        gradient.mul_(torch.where(norm > limit, limit / norm.clamp(min=1e-6), 1.0))


def _unit_norm(x: Tensor) -> Tensor:
    """The norm of each output unit, in a shape that broadcasts with x."""
    dims = tuple(range(1, x.ndim)) if x.ndim > 1 else None
    return torch.linalg.vector_norm(x, dim=dims, keepdim=x.ndim > 1)  # type: ignore[no-any-return]
