"""FedProx (Li et al. 2020, "Federated Optimization in Heterogeneous Networks", https://arxiv.org/abs/1812.06127).

FedAvg whose clients add mu/2 ||w - w_t||^2 to their loss, where w are the parameters and w_t those received from the
server (equation 2). The server requests the term by Flower's key `proximal-mu`, so this strategy works with clients
written for Flower's FedProx, and Flower's FedProx works with a BNClient.
"""

from __future__ import annotations

from typing import Any, Unpack

from fedbn_flwr.client.rules.fedprox import PROXIMAL_MU
from fedbn_flwr.errors import SettingsError

from ._rule import Round
from .fedavg import FedAvg, FedAvgOptions


class FedProx(FedAvg):
    """FedAvg with a proximal term.

    Accepts FedAvg's arguments too.

    Parameters
    ----------
    proximal_mu : float (default: 0.01)
        mu; with 0 the strategy is FedAvg.
    """

    def __init__(self, *, proximal_mu: float = 0.01, **options: Unpack[FedAvgOptions]) -> None:
        super().__init__(**options)
        if not proximal_mu >= 0:
            raise SettingsError(f"proximal_mu is {proximal_mu!r}; expected zero or more")
        self.proximal_mu = proximal_mu

    def instructions(self, round: Round) -> dict[str, Any]:
        return {PROXIMAL_MU: float(self.proximal_mu)}
