"""FedProx (Li et al. 2020, "Federated Optimization in Heterogeneous Networks", https://arxiv.org/abs/1812.06127).

FedAvg whose clients add mu/2 ||w - w_t||^2 to their loss, over parameters, w_t being the model they were sent
(equation 2). The term is the client's; Flower's own key `proximal-mu` asks for it, so this rule drives clients written
for Flower's FedProx, and Flower's FedProx drives ours.
"""

from __future__ import annotations

from typing import Any, Unpack

from fedbn_flwr.client.rules.fedprox import PROXIMAL_MU
from fedbn_flwr.errors import SettingsError

from ._rule import Round
from .fedavg import FedAvg, FedAvgOptions


class FedProx(FedAvg):
    """FedAvg with a proximal term.

    Takes FedAvg's arguments too.

    Parameters
    ----------
    proximal_mu : float (default: 0.01)
        mu; 0 is FedAvg.
    """

    def __init__(self, *, proximal_mu: float = 0.01, **options: Unpack[FedAvgOptions]) -> None:
        super().__init__(**options)
        if not proximal_mu >= 0:
            raise SettingsError(f"proximal_mu is {proximal_mu!r}; expected zero or more")
        self.proximal_mu = proximal_mu

    def instructions(self, round: Round) -> dict[str, Any]:
        return {PROXIMAL_MU: float(self.proximal_mu)}
