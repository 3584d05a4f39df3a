"""FedBN (Li et al. 2021, ICLR, https://arxiv.org/abs/2102.07623): batch norm stays on the client, all else is averaged.

Algorithm 1 of the paper: in a round each layer that is not batch norm is replaced by the clients' mean; gamma, beta
and the running statistics of each client go on from where its own last round left them. So there are as many models
as clients, and each client is to be judged by its own (`evaluate.clients` is on by default).

The paper leaves open what somebody outside the federation uses, and what its server holds; see `global_norm`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid

from fedbn_flwr.errors import SettingsError
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.arrays import record_of
from fedbn_flwr.norms.roles import Role, roles, split

from .fedavg import FedAvg


class LocalNorm(FedAvg):
    """FedAvg of what is not at home on the clients; a model without batch norm makes it FedAvg itself.

    Parameters
    ----------
    global_norm : "average" | "initial" (default: "average")
        What the global model, which no client uses, has in the place of the clients' batch norm: the mean over
        the clients of this round, who then send theirs as well; or what the model began with, and nothing of it
        travels. Neither is ever sent to a client: one that is new begins with the batch norm it was built with.

    The other arguments are FedAvg's.
    """

    personal = True
    kept_by_clients = "their own batch norm"
    at_home: frozenset[Role]  # the roles that stay on the client

    def __init__(self, *args: Any, global_norm: Literal["average", "initial"] = "average", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if global_norm not in ("average", "initial"):
            raise SettingsError(f"global_norm is {global_norm!r}; expected 'average' or 'initial'")
        self.global_norm = global_norm

    def notes(self) -> dict[str, Any]:
        return {"global_norm": self.global_norm}

    def outgoing(self, arrays: ArrayRecord) -> ArrayRecord:
        return record_of(split(arrays, roles(arrays), self.at_home)[1])

    def expected(self) -> list[str]:
        if self._global is None or self.global_norm == "initial":
            return super().expected()
        return list(self._global)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        # Only roles that the global model has: a server that holds no counters has no use for them.
        kept = self.at_home & set(roles(arrays).values())
        if kept and self.global_norm == "average":
            config[protocol.RETURN] = protocol.join(kept)
        return super().configure_train(server_round, arrays, config, grid)


class FedBN(LocalNorm):
    """Gamma, beta and the statistics stay on the client.

    Parameters
    ----------
    share : "nothing" | "statistics" (default: "nothing")
        With "statistics" these are averaged and sent as in FedAvg, and gamma and beta alone stay.

    The other arguments are LocalNorm's and FedAvg's.
    """

    def __init__(self, *args: Any, share: Literal["nothing", "statistics"] = "nothing", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if share not in ("nothing", "statistics"):
            raise SettingsError(f"share is {share!r}; expected 'nothing' or 'statistics'")
        affine, statistics = frozenset({Role.AFFINE}), frozenset({Role.STATISTICS, Role.COUNTER})
        self.at_home = affine if share == "statistics" else affine | statistics
