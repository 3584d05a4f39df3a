"""Averages batch norm's statistics when a server optimiser or another strategy of Flower aggregates the rest.

FedAdam, FedAvgM and others treat the clients' mean change as a pseudo-gradient and take an optimiser step along it
(Reddi et al. 2021, https://arxiv.org/abs/2003.00295). Such a step can make a running variance negative. This wrapper
averages statistics and counters by number of examples, or by the metric that the wrapped strategy names in
`weighted_by_key`, and leaves the other arrays to that strategy:

    MeanStatistics(FedAdam(eta=0.01))

A strategy of Flower inside this wrapper does not receive statistics and counters at all:

- QFedAvg, which cannot compute with integers, works.
- Robust strategies measure distances without them, and counters keep their dtype.
- Flower's wrappers for differential privacy neither clip them nor add noise to them, so they are not protected.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
from flwr.serverapp.strategy import Strategy

from fedbn_flwr.errors import SettingsError
from fedbn_flwr.messages.aggregate import Arrays, cast, pooled_mean, weighted_mean
from fedbn_flwr.messages.arrays import unpack
from fedbn_flwr.messages.reply import Reply
from fedbn_flwr.norms.roles import NORM_STATE, Role, of_roles
from fedbn_flwr.server.traits import Round, mean_is_enough
from fedbn_flwr.server.wrapper import Wrapper
from fedbn_flwr.trees import Tree


class MeanStatistics(Wrapper):
    """Average batch norm's statistics, around a strategy that would treat them as weights, such as FedAdam.

    Flower's strategies do not check replies. So this wrapper first leaves out replies whose arrays do not match the
    server's or are not finite.

    Parameters
    ----------
    strategy : Strategy
        The strategy that aggregates the other arrays, for instance `FedAdam()`.
    statistics : "mean" | "pooled" | "median" (default: "mean")
        How statistics and counters are combined: "median" counts each client once, so that one client cannot set them
        to any value, and "pooled" adds the variance between the clients' means to the mean of the variances. Around a
        robust strategy such as `FedMedian()` use "median".
    """

    restores = frozenset({"statistics", "pooled"})

    def __init__(self, strategy: Strategy, *, statistics: Literal["mean", "pooled", "median"] = "mean") -> None:
        # Only the outer one's statistics would count, as around a strategy of Flower that an experiment names.
        super().__init__(strategy.strategy if isinstance(strategy, MeanStatistics) else strategy)
        if Role.STATISTICS in self.traits.never_sent:
            raise SettingsError(
                f"MeanStatistics has nothing to combine: with this {strategy}, clients do not send batch norm's "
                f"statistics. Use {strategy} without it"
            )
        if statistics == "median":
            reason = "takes the median of the clients' statistics"
            self.breaks = {**self.breaks, "mean": reason, "pooled": reason}
            self.restores = frozenset({"statistics"})
        self.statistics = statistics
        self.traits = replace(self.traits, pooled=statistics == "pooled")

    @mean_is_enough
    def combine(self, round: Round, replies: Sequence[Reply], weights: Sequence[float]) -> Arrays:
        sent = unpack(round.arrays)
        norm_state = of_roles(sent, NORM_STATE)
        # Those of a layer may stay on the clients.
        statistics = [{key: reply.arrays[key] for key in norm_state if key in reply.arrays} for reply in replies]
        combined = _MEANS[self.statistics](statistics, weights)
        model = {**super().combine(round, replies, weights), **combined}
        # Keep the dtypes that were sent: FedAdam returns float64 arrays.
        return {key: cast(model[key], sent[key].dtype) for key in sent if key in model}

    def notes(self) -> Tree:
        return {**super().notes(), "norm_statistics": self.statistics}


def median(replies: Sequence[Arrays], weights: Sequence[float] = ()) -> Arrays:
    """The coordinatewise median, in the dtypes of the input; clients have no weights."""
    rows = {key: np.stack([reply[key] for reply in replies]).astype(np.float64) for key in replies[0]}
    return {key: cast(np.median(values, axis=0), replies[0][key].dtype) for key, values in rows.items()}


_MEANS: Mapping[str, Callable[[Sequence[Arrays], Sequence[float]], Arrays]] = {
    "mean": weighted_mean,
    "pooled": pooled_mean,
    "median": median,
}
