"""FedBN (Li et al. 2021, ICLR, https://arxiv.org/abs/2102.07623): batch norm stays on the client, all else is averaged.

Algorithm 1 of the paper: in a round each layer that is not batch norm is replaced by the clients' mean; gamma, beta
and the running statistics of each client continue from its own last round. So there are as many models as clients, and
each client is evaluated with its own (`evaluate.clients` is on by default).

The paper leaves open which model a user outside the federation uses, and what the server holds; see `global_norm`.
"""

from __future__ import annotations

from typing import Any, Literal, Unpack

from fedbn_flwr.errors import SettingsError
from fedbn_flwr.norms.roles import Role

from ._rule import Traits
from .fedavg import FedAvg, FedAvgOptions


class LocalNorm(FedAvg):
    """FedAvg over everything that clients do not keep; for a model without batch norm it is plain FedAvg.

    Takes FedAvg's arguments too.

    Parameters
    ----------
    global_norm : "average" | "initial" (default: "average")
        What the global model, which no client uses, has in the place of the clients' batch norm: the mean over
        the clients of this round, who then send theirs as well; or what the model began with, and nothing of it
        travels. Neither is ever sent to a client: one that is new begins with the batch norm it was built with.
    """

    kept: frozenset[Role]  # the roles that stay on the client

    def __init__(
        self, *, global_norm: Literal["average", "initial"] = "average", **options: Unpack[FedAvgOptions]
    ) -> None:
        super().__init__(**options)
        if global_norm not in ("average", "initial"):
            raise SettingsError(f"global_norm is {global_norm!r}; expected 'average' or 'initial'")
        self.global_norm = global_norm
        returned = self.kept if global_norm == "average" else frozenset[Role]()
        self.traits = Traits(personal=True, client_memory="their own batch norm", kept=self.kept, returned=returned)

    def notes(self) -> dict[str, Any]:
        return {"global_norm": self.global_norm}


class FedBN(LocalNorm):
    """Gamma, beta and the statistics stay on the client.

    Takes LocalNorm's and FedAvg's arguments too.

    Parameters
    ----------
    share : "nothing" | "statistics" (default: "nothing")
        With "statistics" these are averaged and sent as in FedAvg, and only gamma and beta stay.
    """

    def __init__(
        self,
        *,
        share: Literal["nothing", "statistics"] = "nothing",
        global_norm: Literal["average", "initial"] = "average",
        **options: Unpack[FedAvgOptions],
    ) -> None:
        if share not in ("nothing", "statistics"):
            raise SettingsError(f"share is {share!r}; expected 'nothing' or 'statistics'")
        statistics = frozenset({Role.STATISTICS, Role.COUNTER}) if share == "nothing" else frozenset[Role]()
        self.kept = statistics | {Role.AFFINE}
        super().__init__(global_norm=global_norm, **options)
