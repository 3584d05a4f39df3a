"""FedProx (Li et al. 2020, "Federated Optimization in Heterogeneous Networks", https://arxiv.org/abs/1812.06127).

FedAvg whose clients add mu/2 ||w - w_t||^2 to their loss, where w are the parameters and w_t the ones received from the
server (equation 2). The server requests the term by Flower's key `proximal-mu`, so this strategy works with clients
written for Flower's FedProx, and Flower's FedProx works with a BNClient.
"""

from __future__ import annotations

from typing import Annotated, Any

from annotated_types import Ge

from fedbn_flwr.client.rule import ClientRule, Key, Memo, Tensors, add_, clone, elementwise, sub
from fedbn_flwr.messages.protocol import Config
from fedbn_flwr.server.traits import Round

from .fedavg import FedAvg

PROXIMAL_MU = "proximal-mu"  # Flower's key


class FedProx(FedAvg):
    """FedAvg with a proximal term.

    Accepts FedAvg's arguments too.

    Parameters
    ----------
    proximal_mu : float (default: 0.01)
        mu; with 0 the strategy is FedAvg.
    """

    def __init__(self, *, proximal_mu: Annotated[float, Ge(0)] = 0.01, **options: Any) -> None:
        super().__init__(**options)
        self.proximal_mu = proximal_mu

    def config(self, round: Round) -> Config:
        return {PROXIMAL_MU: float(self.proximal_mu)}


class FedProxClient(ClientRule):
    """Adds mu/2 ||w - w_t||^2 to the loss by adding its gradient mu (w - w_t), which needs no autograd graph."""

    keys = {PROXIMAL_MU: Key("float", "add mu/2 times the squared distance to the received parameters (Flower's key)")}

    def begin(self, w: Tensors) -> Memo:
        return {"received": clone(w)}  # w_t

    @elementwise
    def adjust(self, w: Tensors, g: Tensors, memo: Memo) -> None:
        add_(g, sub(w, memo["received"]), alpha=float(self.local.config[PROXIMAL_MU]))
