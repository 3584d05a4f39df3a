"""Keeps server optimisers away from batch norm's statistics.

FedAdam, FedAvgM and others take the clients' mean as a pseudo-gradient and step along it (Reddi et al. 2021,
https://arxiv.org/abs/2003.00295). A running variance that is stepped like a weight can overshoot below zero. Around
such a strategy, statistics and counters are the plain weighted mean of the clients', and all else is as it decides:

    MeanStatistics(FedAdam(eta=0.01))

Robust rules such as Krum choose among whole replies and need no such help.
"""

from __future__ import annotations

from collections.abc import Iterable

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.aggregate import Arrays, cast, fault, weighted_mean
from fedbn_flwr.messages.arrays import arrays_in, metrics_of, pack, unpack
from fedbn_flwr.norms.roles import Role, roles, split

from ._wrapper import Wrapper, check_some_left, refused


class MeanStatistics(Wrapper):
    """Any strategy, with statistics and counters of batch norm averaged by number of examples.

    Replies that do not fit what was sent, or are not finite, are left out first: Flower's strategies do not look.
    """

    def __init__(self, strategy: Strategy) -> None:
        super().__init__(strategy)
        self._sent: Arrays = {}

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        self._sent = unpack(arrays)
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        replies = [self._checked(reply) for reply in replies]
        usable = [reply for reply in replies if reply.has_content()]
        # Node ids are random in every run: sums go by partition where it is known.
        usable.sort(key=lambda reply: (_metrics(reply).get(protocol.PARTITION, -1), reply.metadata.src_node_id))
        of_norms = split(self._sent, roles(self._sent), {Role.STATISTICS, Role.COUNTER})[0]
        parts = [{key: _record(reply)[key].numpy() for key in of_norms} for reply in usable]
        weights = [float(_metrics(reply)[protocol.NUM_EXAMPLES]) for reply in usable]  # type: ignore[arg-type]
        # Only now: FedMedian and FedTrimmedAvg empty the replies that they read.
        # In order, as their sums are: Flower asks clients in a random one.
        failed = [reply for reply in replies if not reply.has_content()]
        arrays, metrics = super().aggregate_train(server_round, [*usable, *failed])
        if arrays is None:
            check_some_left(server_round, replies)
            return arrays, metrics
        # In the dtypes that were sent: FedAdam returns float64 for all it steps.
        stepped = {key: cast(array.numpy(), self._sent[key].dtype) for key, array in arrays.items()}
        return pack({**stepped, **weighted_mean(parts, weights)}), metrics

    def _checked(self, reply: Message) -> Message:
        if not reply.has_content():
            return reply
        problem = fault(unpack(_record(reply)), self._sent)
        return reply if problem is None else refused(reply, problem)


def _record(reply: Message) -> ArrayRecord:
    return next(iter(arrays_in(reply.content).values()))


def _metrics(reply: Message) -> MetricRecord:
    return metrics_of(reply.content)
