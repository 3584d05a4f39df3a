"""FedBN (Li et al. 2021, ICLR, https://arxiv.org/abs/2102.07623): batch norm stays on the client, the rest is averaged.

Algorithm 1 of the paper: each round replaces every layer except batch norm by the clients' mean; gamma, beta and the
running statistics of each client continue from that client's previous round. So every client has its own model and is
evaluated with it (`evaluate.clients` is on by default).

The paper does not define the server's batch norm, nor a model for users outside the federation; see `global_norm`.
"""

from __future__ import annotations

from typing import Any, Literal

from flwr.app import ArrayRecord

from fedbn_flwr.norms.roles import Role
from fedbn_flwr.server.hooks import require_norm
from fedbn_flwr.server.traits import Traits
from fedbn_flwr.trees import Tree

from .fedavg import FedAvg


class LocalNorm(FedAvg):
    """FedAvg in which arrays of the roles `traits.local` stay on the client.

    A model without these roles raises an error, since training would be plain FedAvg. The subclasses describe
    `global_norm`, which is also about arrays that stay by FedAvg's `kept`.
    """

    def __init__(self, *, global_norm: Literal["average", "initial"] = "average", **options: Any) -> None:
        super().__init__(global_kept=global_norm, **options)
        self.global_norm = global_norm

    def begin(self, num_rounds: int, arrays: ArrayRecord) -> None:
        super().begin(num_rounds, arrays)
        norm_roles = type(self).traits.local & {Role.AFFINE, Role.STATISTICS}
        words = " and ".join(sorted(norm_roles))
        require_norm(self, {*map(Role, norm_roles)}, arrays, f"keeps batch norm ({words}) on the clients")

    def notes(self) -> Tree:
        return {**super().notes(), "global_norm": self.global_norm}


class FedBN(LocalNorm):
    """Each client has its own batch norm (gamma, beta and statistics); the rest is averaged.

    Accepts FedAvg's arguments too.

    Parameters
    ----------
    global_norm : "average" | "initial" (default: "average")
        The batch norm of the global model, which no client uses: "average" is the mean over the round's clients, which
        send their batch norm for this purpose; "initial" keeps the initial values, and clients send no batch norm. The
        server never sends batch norm: a new client begins with the batch norm of a newly built model.
    """

    traits = Traits(
        client_memory=("their own batch norm",), local=frozenset({Role.AFFINE, Role.STATISTICS, Role.COUNTER})
    )
