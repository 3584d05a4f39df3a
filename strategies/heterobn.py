"""HeteroFL's static batch norm (Diao et al. 2021, ICLR, https://arxiv.org/abs/2010.01264, section 3, "sBN").

Clients normalise with the statistics of each batch and track no running statistics; gamma and beta are averaged like
the weights. The static layer is part of the model (model.norm=sbn), so this strategy is FedAvg with an optional query
for statistics. The paper estimates the global statistics once, after training, from all clients' data under the global
model; the authors' code computes them as the cumulative mean over the batches of the whole training set. That is the
mean of the clients' statistics, weighted by their numbers of batches, which leaves out how far the clients' means are
apart ("pooled" adds it). HeteroFL's models of different widths are not implemented.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from flwr.app import ArrayRecord

from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.aggregate import Arrays, pooled_mean, weighted_mean
from fedbn_flwr.messages.arrays import pack, record_of
from fedbn_flwr.messages.reply import Reply
from fedbn_flwr.norms.roles import NORM_STATE, roles
from fedbn_flwr.server.traits import Round

from .fedavg import FedAvg


class HeteroBN(FedAvg):
    """FedAvg for models with static batch norm.

    Accepts FedAvg's arguments too.

    Parameters
    ----------
    statistics : "batch" | "query" | "pooled" (default: "batch")
        Evaluate the global model with the statistics of each test batch ("batch"), or with their mean over all clients
        ("query"), which are queried in every round with an evaluation; "pooled" also adds the variance between the
        clients' means. Clients always evaluate with batch statistics.
    """

    without_statistics = (
        "HeteroBN trains static batch norm, but the model tracks statistics ({!r}); use model.norm=sbn, or "
        "convert_norm(model, 'sbn') on server and clients"
    )

    def __init__(self, *, statistics: Literal["batch", "query", "pooled"] = "batch", **options: Any) -> None:
        super().__init__(**options)
        self.statistics = statistics
        if statistics != "batch":
            self.breaks = {**self.breaks, "mean": "queries the statistics of each client's data"}

    def global_model(self, round: Round) -> ArrayRecord:
        """The global model, unless "batch" with statistics that all clients measure on their data."""
        if self.statistics == "batch":
            return round.arrays
        return with_measured_statistics(self, round, weighted_mean if self.statistics == "query" else pooled_mean)


def with_measured_statistics(
    rule: FedAvg, round: Round, mean: Callable[[Iterable[Arrays], Sequence[float]], Arrays]
) -> ArrayRecord:
    """The global model with the mean of the statistics that all clients measure on their data under it."""
    queries = rule.messages_to(rule.connected(round.grid), protocol.STATISTICS_QUERY, round)
    what, poll = f"round {round.number}, statistics", rule.poll_of(queries, round.arrays)

    def problem(reply: Reply) -> str | None:
        role_of = roles({**round.arrays, **reply.arrays})
        wrong = [key for key in reply.arrays if role_of[key] not in NORM_STATE]
        return f"it sent {wrong[0]!r}; expected only statistics of batch norm" if wrong else None

    replies = rule.query(round, what, poll, queries, problem)
    weights = rule.bound_weights(what, [float(reply.metrics[protocol.NUM_EXAMPLES]) for reply in replies])
    return record_of({**round.arrays, **pack(mean((reply.arrays for reply in replies), weights))})
