"""FedProx (Li et al. 2020, "Federated Optimization in Heterogeneous Networks", https://arxiv.org/abs/1812.06127).

FedAvg whose clients add mu/2 ||w - w_t||^2 to their loss, over parameters, w_t being the model they were sent
(equation 2). The term is the client's; it is asked for by Flower's own key `proximal-mu`, so this rule drives
clients written for Flower's FedProx, and Flower's FedProx drives ours.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid

from fedbn_flwr.errors import SettingsError
from fedbn_flwr.messages import protocol

from .fedavg import FedAvg


class FedProx(FedAvg):
    """FedAvg with a proximal term.

    Parameters
    ----------
    proximal_mu : float (default: 0.01)
        mu; 0 is FedAvg.

    The other arguments are FedAvg's.
    """

    def __init__(self, *args: Any, proximal_mu: float = 0.01, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not proximal_mu >= 0:
            raise SettingsError(f"proximal_mu is {proximal_mu!r}; expected zero or more")
        self.proximal_mu = proximal_mu

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        config[protocol.PROXIMAL_MU] = float(self.proximal_mu)
        return super().configure_train(server_round, arrays, config, grid)
