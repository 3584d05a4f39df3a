"""FedBN (Li et al. 2021, ICLR, https://arxiv.org/abs/2102.07623): batch norm stays on the client, the rest is averaged.

Algorithm 1 of the paper: each round replaces every layer except batch norm by the clients' mean; gamma, beta and the
running statistics of each client continue from that client's previous round. So every client has its own model and is
evaluated with it (`evaluate.clients` is on by default).

The paper does not define the server's batch norm, nor a model for users outside the federation; see `global_norm`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from flwr.app import ArrayRecord

from fedbn_flwr.norms.roles import Role

from ._hooks import Json, require_norm
from .fedavg import FedAvg


class LocalNorm(FedAvg):
    """FedAvg over all roles except `local_roles`, which stay on the client.

    A model without these roles raises an error, since training would be plain FedAvg. The subclasses describe
    `global_norm`; FedAvg's arguments are accepted too.
    """

    local_roles: frozenset[Role]  # the roles that stay on the client

    def __init__(self, *, global_norm: Literal["average", "initial"] = "average", **options: Any) -> None:
        super().__init__(**options)
        self.global_norm = global_norm
        self.traits = replace(
            self.traits,
            client_memory="their own batch norm",
            local_roles=dict.fromkeys(self.local_roles, global_norm == "average"),
        )

    def begin(self, num_rounds: int, arrays: ArrayRecord) -> None:
        super().begin(num_rounds, arrays)
        names = " and ".join(sorted(role.value for role in self.local_roles - {Role.COUNTER}))
        require_norm(self, self.local_roles, arrays, f"keeps batch norm ({names}) on the clients")

    def notes(self) -> Json:
        return {**super().notes(), "global_norm": self.global_norm}


class FedBN(LocalNorm):
    """Batch norm (gamma, beta and statistics) stays on the client; the rest is averaged.

    Accepts FedAvg's arguments too.

    Parameters
    ----------
    global_norm : "average" | "initial" (default: "average")
        The batch norm of the global model, which no client uses: "average" is the mean over the round's clients, which
        send their batch norm for this purpose; "initial" keeps the initial values, and clients send no batch norm. The
        server never sends batch norm: a new client begins with the batch norm of a newly built model.
    """

    local_roles = frozenset({Role.AFFINE, Role.STATISTICS, Role.COUNTER})
