"""Averages batch norm's statistics, for use around server optimisers and other strategies of Flower.

FedAdam, FedAvgM and others treat the clients' mean change as a pseudo-gradient and take an optimiser step along it
(Reddi et al. 2021, https://arxiv.org/abs/2003.00295). Such a step can make a running variance negative. This wrapper
averages statistics and counters by number of examples, or by the metric that the wrapped strategy names in
`weighted_by_key`, and leaves the other arrays to that strategy:

    MeanStatistics(FedAdam(eta=0.01))

A strategy of Flower does not receive statistics and counters at all. So QFedAvg, which cannot compute with integers,
works; robust strategies measure distances without them and keep the counters' dtype; Flower's wrappers for differential
privacy neither count them in the norm that they clip nor add noise to them, which means that they are not protected.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvgM, QFedAvg, Strategy
from flwr.serverapp.strategy.fedopt import FedOpt

from fedbn_flwr.errors import SettingsError
from fedbn_flwr.messages.aggregate import Arrays, cast, fault, weighted_mean
from fedbn_flwr.messages.arrays import record_of, unpack
from fedbn_flwr.messages.gate import Reply, number_problem
from fedbn_flwr.messages.screening import with_arrays, without_norm_state
from fedbn_flwr.norms.roles import Role, roles, split_by_role

from ._rule import Round
from ._wrapper import Foreign, Wrapper

OF_NORMS = frozenset({Role.STATISTICS, Role.COUNTER})


def server_optimiser(strategy: Strategy) -> str | None:
    """The name of the strategy, or of one inside it, whose optimiser would change statistics; None if there is none."""
    inside: object = strategy
    while isinstance(inside, Strategy) and not isinstance(inside, MeanStatistics):
        if isinstance(inside, FedOpt | FedAvgM | QFedAvg):
            return type(inside).__name__
        inside = getattr(inside, "strategy", None)
    return None


def refuse_server_optimiser(strategy: Strategy, rule: str) -> None:
    """Raise SettingsError if statistics that the rule freezes would be those of an optimiser."""
    if (name := server_optimiser(strategy)) is not None:
        raise SettingsError(
            f"{rule} freezes batch norm's statistics, which {name} changes by steps of its optimiser, so that they are "
            f"no statistics of the data; wrap it: {rule}(MeanStatistics({name}(...)), ...)"
        )


class MeanStatistics(Wrapper):
    """Any strategy, with statistics and counters of batch norm averaged by number of examples.

    Replies whose arrays do not match those that were sent, or are not finite, are left out first, since Flower's
    strategies do not check them.

    Parameters
    ----------
    strategy : Strategy
        The strategy that aggregates the other arrays, for instance `FedAdam()`.
    statistics : "mean" | "median" (default: "mean")
        How statistics and counters are combined: "median" counts each client once, so that one client cannot set them
        to any value. Around a robust strategy such as `FedMedian()` use "median".
    """

    def __init__(self, strategy: Strategy, *, statistics: Literal["mean", "median"] = "mean") -> None:
        super().__init__(strategy)
        if statistics not in ("mean", "median"):
            raise SettingsError(f"statistics is {statistics!r}; expected 'mean' or 'median'")
        if OF_NORMS & (self.traits.kept - self.traits.returned):
            inside = type(strategy).__name__
            raise SettingsError(
                f"MeanStatistics has nothing to combine around this {inside}, whose clients do not send batch norm's "
                f"statistics; use {inside} without it"
            )
        if statistics == "median":
            self.traits = replace(self.traits, individual="takes the median of the clients' statistics")
        self.statistics = statistics

    def problem(self, round: Round, reply: Reply) -> str | None:
        return number_problem(reply.metrics, self.weighted_by_key) or fault(reply.arrays, unpack(round.arrays))

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        if not isinstance(self.rule, Foreign):
            return super().configure_train(server_round, arrays, config, grid)
        messages = list(super().configure_train(server_round, without_norm_state(arrays), config, grid))
        assert self.round is not None
        self.round = replace(self.round, arrays=arrays)
        merged: dict[int, ArrayRecord] = {}  # the messages of a round share their arrays

        def whole(sent: ArrayRecord) -> ArrayRecord:
            return merged.setdefault(id(sent), merged.get(id(sent)) or record_of({**arrays, **sent}))

        return [with_arrays(message, whole) for message in messages]

    def combine(self, round: Round, replies: Sequence[Reply], weights: Sequence[float]) -> Arrays:
        sent = unpack(round.arrays)
        inner = replies
        if isinstance(self.rule, Foreign):
            inner = [replace(reply, message=with_arrays(reply.message, without_norm_state)) for reply in replies]
        # Keep the dtypes that were sent: FedAdam returns float64 arrays.
        stepped = {key: cast(value, sent[key].dtype) for key, value in super().combine(round, inner, weights).items()}
        of_norms = split_by_role(sent, roles(sent), OF_NORMS)[0]
        used, weights = self.used_of(replies, weights)
        if not sum(weights) > 0:  # a strategy that does not weight by examples
            weights = [1.0] * len(used)
        statistics = [{key: reply.arrays[key] for key in of_norms} for reply in used]
        combined = median(statistics) if self.statistics == "median" else weighted_mean(statistics, weights)
        model = {**stepped, **combined}
        return {key: model[key] for key in sent}

    def notes(self) -> dict[str, Any]:
        return {**super().notes(), "norm_statistics": self.statistics}


def median(replies: Sequence[Arrays]) -> Arrays:
    """The coordinatewise median, in the dtypes of the input."""
    rows = {key: np.stack([reply[key] for reply in replies]).astype(np.float64) for key in replies[0]}
    return {key: cast(np.median(each, axis=0), replies[0][key].dtype) for key, each in rows.items()}
