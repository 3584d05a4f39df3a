"""HeteroFL's static batch norm (Diao et al. 2021, ICLR, https://arxiv.org/abs/2010.01264, section 3, "sBN").

Clients normalise with the statistics of each batch and track none while they train; gamma and beta are averaged with
the weights. "Static" is the layer (model.norm=sbn), so this rule is FedAvg and, where one is asked for, the query
after training: the paper estimates the global statistics once, from all clients' data under the global model, and its
authors' code as the cumulative mean over the batches of the whole training set. Over the clients in order that is the
mean of theirs weighted by their numbers of batches. HeteroFL's models of several widths are not part of this.
"""

from __future__ import annotations

from typing import Literal, Unpack

from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict

from fedbn_flwr.errors import SettingsError
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.aggregate import fault, weighted_mean
from fedbn_flwr.messages.arrays import pack, record_of
from fedbn_flwr.messages.screening import read_reply
from fedbn_flwr.norms.roles import Role, roles

from ._rule import Round
from .fedavg import FedAvg, FedAvgOptions


class HeteroBN(FedAvg):
    """FedAvg for models with static batch norm.

    Takes FedAvg's arguments too.

    Parameters
    ----------
    statistics : "batch" | "query" (default: "batch")
        What the global model normalises with when it is tested: each test batch's own statistics, or those that
        all clients are asked for, in rounds that are evaluated. Clients' own evaluation uses the batch's.
    query_timeout : float (default: 3600)
        Seconds that the clients may take to answer.
    """

    def __init__(
        self,
        *,
        statistics: Literal["batch", "query"] = "batch",
        query_timeout: float = 3600,
        **options: Unpack[FedAvgOptions],
    ) -> None:
        super().__init__(**options)
        if statistics not in ("batch", "query"):
            raise SettingsError(f"statistics is {statistics!r}; expected 'batch' or 'query'")
        self.statistics = statistics
        self.query_timeout = query_timeout

    def begin(self, num_rounds: int, arrays: ArrayRecord) -> None:
        super().begin(num_rounds, arrays)
        if tracked := [key for key, role in roles(arrays).items() if role is Role.STATISTICS]:
            raise SettingsError(
                f"HeteroBN trains static batch norm, and the model tracks statistics ({tracked[0]!r}); use "
                "model.norm=sbn, or convert_norm(model, 'sbn') on server and clients"
            )

    def global_model(self, round: Round) -> ArrayRecord:
        """The model with the statistics of all clients' data under it."""
        if self.statistics == "batch":
            return round.arrays
        told = ConfigRecord({**protocol.run_keys(round.config), protocol.ROUND: round.number})
        content = RecordDict({self.arrayrecord_key: round.arrays, self.configrecord_key: told})
        nodes = self._wait_for_nodes(round.grid, self.min_available_nodes)
        questions = [Message(content, node, protocol.STATISTICS_QUERY) for node in nodes]
        what = f"round {round.number}, statistics"
        answered = round.grid.send_and_receive(questions, timeout=self.query_timeout)
        messages = self.screen(what, answered, len(nodes), lambda message: None)
        like = read_reply(messages[0], self.arrayrecord_key).arrays

        def problem(message: Message) -> str | None:
            return fault(read_reply(message, self.arrayrecord_key).arrays, like)

        messages = self.screen(what, messages, len(messages), problem)
        replies = [read_reply(message, self.arrayrecord_key) for message in messages]
        mean = weighted_mean([reply.arrays for reply in replies], self.weights(round, replies))
        return record_of({**round.arrays, **pack(mean)})
