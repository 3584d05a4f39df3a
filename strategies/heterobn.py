"""HeteroFL's static batch norm (Diao et al. 2021, ICLR, https://arxiv.org/abs/2010.01264, section 3, "sBN").

Clients normalise with the statistics of each batch and track none while they train; gamma and beta are averaged with
the weights. "Static" is the layer (model.norm=sbn), so this rule is FedAvg and, where one is asked for, the query
after training: the paper estimates the global statistics once, from all clients' data under the global model, and its
authors' code as the cumulative mean over the batches of the whole training set. Over the clients in order that is the
mean of theirs weighted by their numbers of batches. HeteroFL's models of several widths are not part of this.
"""

from __future__ import annotations

from typing import Any, Literal

from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedbn_flwr.errors import SettingsError
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.aggregate import fault, weighted_mean
from fedbn_flwr.messages.arrays import pack, record_of, unpack
from fedbn_flwr.norms.roles import Role, roles

from .fedavg import FedAvg


class HeteroBN(FedAvg):
    """FedAvg for models with static batch norm.

    Parameters
    ----------
    statistics : "batch" | "query" (default: "batch")
        What the global model normalises with when it is tested: each test batch's own statistics, or those that
        all clients are asked for, in rounds that are evaluated. Clients' own evaluation uses the batch's.
    query_timeout : float (default: 3600)
        Seconds that the clients may take to answer.

    The other arguments are FedAvg's.
    """

    def __init__(
        self,
        *args: Any,
        statistics: Literal["batch", "query"] = "batch",
        query_timeout: float = 3600,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        if statistics not in ("batch", "query"):
            raise SettingsError(f"statistics is {statistics!r}; expected 'batch' or 'query'")
        self.statistics = statistics
        self.query_timeout = query_timeout

    def prepare(self, num_rounds: int, arrays: ArrayRecord) -> None:
        super().prepare(num_rounds, arrays)
        if tracked := [key for key, role in roles(arrays).items() if role is Role.STATISTICS]:
            raise SettingsError(
                f"HeteroBN trains static batch norm, and the model tracks statistics ({tracked[0]!r}); use "
                "model.norm=sbn, or convert_norm(model, 'sbn') on server and clients"
            )

    def global_model(self, server_round: int, arrays: ArrayRecord, grid: Grid) -> ArrayRecord:
        """The model with the statistics of all clients' data under it."""
        if self.statistics == "batch":
            return arrays
        told = ConfigRecord(self._run | {protocol.ROUND: server_round})
        content = RecordDict({self.arrayrecord_key: arrays, self.configrecord_key: told})
        nodes = self._wait_for_nodes(grid, self.min_available_nodes)
        questions = [Message(content, node, protocol.STATISTICS_QUERY) for node in nodes]
        what = f"round {server_round}, statistics"
        answered = list(grid.send_and_receive(questions, timeout=self.query_timeout))
        replies = self.screen(what, answered, len(nodes), lambda content: None)
        like = unpack(self._arrays(replies[0].content))
        replies = self.screen(what, replies, len(replies), lambda content: fault(unpack(self._arrays(content)), like))
        found = [unpack(self._arrays(reply.content)) for reply in replies]
        batches = self.weights(server_round, [reply.content for reply in replies])
        return record_of({**arrays, **pack(weighted_mean(found, batches))})
