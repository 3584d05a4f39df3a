"""Averages batch norm's statistics, for use around server optimisers.

FedAdam, FedAvgM and others treat the clients' mean change as a pseudo-gradient and take an optimiser step along it
(Reddi et al. 2021, https://arxiv.org/abs/2003.00295). Such a step can make a running variance negative. This wrapper
replaces the statistics and counters by the weighted mean of the clients' values and leaves the other arrays to the
wrapped strategy:

    MeanStatistics(FedAdam(eta=0.01))

Robust strategies such as Krum choose among whole replies and do not need this wrapper.
"""

from __future__ import annotations

from collections.abc import Sequence

from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.aggregate import Arrays, cast, fault, weighted_mean
from fedbn_flwr.messages.arrays import unpack
from fedbn_flwr.messages.screening import Reply, number_problem
from fedbn_flwr.norms.roles import Role, roles, split_by_role

from ._rule import Round
from ._wrapper import Wrapper


class MeanStatistics(Wrapper):
    """Any strategy, with statistics and counters of batch norm averaged by number of examples.

    Replies whose arrays do not match those that were sent, or are not finite, are left out first, since Flower's
    strategies do not check them.
    """

    def problem(self, round: Round, reply: Reply) -> str | None:
        return number_problem(reply.metrics, protocol.NUM_EXAMPLES) or fault(reply.arrays, unpack(round.arrays))

    def combine(self, round: Round, replies: Sequence[Reply], weights: Sequence[float]) -> Arrays:
        sent = unpack(round.arrays)
        # Keep the dtypes that were sent: FedAdam returns float64 arrays.
        stepped = {key: cast(value, sent[key].dtype) for key, value in super().combine(round, replies, weights).items()}
        of_norms = split_by_role(sent, roles(sent), {Role.STATISTICS, Role.COUNTER})[0]
        statistics = [{key: reply.arrays[key] for key in of_norms} for reply in replies]
        return {**stepped, **weighted_mean(statistics, weights)}
