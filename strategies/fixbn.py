"""FixBN (Zhong, Chen, Chao, "Making Batch Normalization Great in Federated Deep Learning").

Train with ordinary batch norm up to round T*, then freeze the aggregated statistics: in later rounds every batch norm
normalises with the global mean and variance, in training as in evaluation, while gamma, beta and the other layers
continue to train. This removes the mismatch between a client's batch statistics and the global ones without messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
from annotated_types import Ge, Gt
from flwr.serverapp.strategy import Strategy

from fedbn_flwr.client.rule import ClientRule, Key
from fedbn_flwr.errors import SettingsError
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.aggregate import Array, Arrays, same_values
from fedbn_flwr.messages.gate import Reply
from fedbn_flwr.norms.freeze import frozen_norm
from fedbn_flwr.norms.roles import Role, roles, split_by_role

from ._freezing import Freezable, Freezing, LastFree
from ._rule import Round

FREEZE = "fedbn.freeze"


class FixBN(Freezing):
    """Freeze batch norm from a round on, around any strategy.

    Parameters
    ----------
    strategy : Strategy
        The strategy that trains and aggregates, for instance `FedAvg()`.
    freeze_round : int | float | "auto" (default: 0.5)
        T*, the last round with ordinary batch norm: a round as an int (with 0 the initial statistics are frozen, with
        the number of rounds nothing is), or a fraction of all rounds as a float. The paper's default is half.
        "auto" applies the criterion of its Appendix B.6; see `window` and `threshold`.
    freeze : sequence of str (default: ["statistics"])
        The roles to freeze: "statistics", "affine" (gamma and beta), or both. The paper compares the three (Table H).
    window : int (default: 10)
        W, with "auto": the number of rounds over which the variance of the change is computed.
    threshold : float (default: 1e-4)
        tau, with "auto": freeze after the first round in which this variance is below tau for every client.
    """

    @dataclass
    class Memory(Freezing.Memory):
        last: dict[str, Array] = field(default_factory=dict)  # with "auto": each client's last statistics s_t
        changes: dict[str, list[float]] = field(default_factory=dict)  # with "auto": their changes in W rounds

    memory: Memory
    lacks = {}
    key = FREEZE

    def __init__(
        self,
        strategy: Strategy,
        *,
        freeze_round: LastFree = 0.5,
        freeze: Freezable = ("statistics",),
        window: Annotated[int, Ge(2)] = 10,  # a variance needs two values
        threshold: Annotated[float, Gt(0)] = 1e-4,
    ) -> None:
        if freeze_round == "auto":
            reason = "compares the statistics of each client (auto)"
            self.lacks = {**self.lacks, **dict.fromkeys(("known", "no statistics"), reason)}
        if "statistics" in freeze:
            self.lacks = {**self.lacks, "free statistics": "freezes the statistics"}
            self.needs = {
                "statistics": "FixBN would freeze what is no statistic of the data; wrap it: "
                "FixBN(MeanStatistics({inside}(...)), ...)"
            }
        super().__init__(strategy, freeze_round, freeze)
        self.window, self.threshold = window, threshold

    def instructions(self, round: Round) -> dict[str, Any]:
        if self.is_free(round):
            return super().instructions(round)
        return {FREEZE: protocol.join(self.freeze | frozen_roles(round.config))}  # a rule around it may freeze others

    def problem(self, round: Round, reply: Reply) -> str | None:
        """Refuse the reply of a client that ignored the freeze: it trained a different model."""
        # Roles that stay on the client (FedBN) are frozen there with the client's own values: do not compare them.
        for key, sent in self.frozen(round, self.freeze - self.traits.kept).items():
            if key in reply.arrays and not same_values(reply.arrays[key], sent):
                return self.changed(key)
        return None

    def combine(self, round: Round, replies: Sequence[Reply], weights: Sequence[float]) -> Arrays:
        model = super().combine(round, replies, weights)
        # The mean of equal numbers may differ from them by a rounding error, but frozen arrays must not change at all.
        return {**model, **{key: value for key, value in self.frozen(round, self.freeze).items() if key in model}}

    def after_round(self, round: Round, replies: Sequence[Reply], weights: Sequence[float]) -> None:
        """With "auto", freeze from the next round on if every client's statistics change at a steady rate."""
        if self.freeze_round == "auto" and self.is_free(round):
            changes = [self._changes(reply) for reply in replies]
            if changes and all(len(each) == self.window and np.var(each) < self.threshold for each in changes):
                self.memory.last_free = round.number
        super().after_round(round, replies, weights)

    def _changes(self, reply: Reply) -> list[float]:
        """A client's last W changes. The paper does not define them: |s_t - s_(t-1)| / |s_(t-1)| has no unit."""
        # By partition if the client reports it, since node ids change when a run is resumed.
        who = f"node {reply.node}" if reply.partition is None else f"partition {reply.partition}"
        changes, before = self.memory.changes.setdefault(who, []), self.memory.last.get(who)
        statistics = split_by_role(reply.arrays, roles(reply.arrays), {Role.STATISTICS})[0]
        if not statistics:
            raise SettingsError(f"{self.argument} is 'auto', but the clients send no statistics; expected a round")
        now = np.concatenate([array.ravel().astype(np.float64) for array in statistics.values()])
        if before is not None:
            changes.append(float(np.linalg.norm(now - before)) / max(float(np.linalg.norm(before)), 1e-12))
            del changes[: -self.window]
        self.memory.last[who] = now
        return changes


class FixBNClient(ClientRule):
    """Freezes the statistics, or gamma and beta, at the received values."""

    keys = {FREEZE: Key("`statistics`, `affine`, or both with a comma", "freeze these roles at the received values")}

    def around(self) -> AbstractContextManager[None]:
        return frozen_norm(self.local.model, frozen_roles(self.local.config))


def frozen_roles(config: Mapping[str, Any]) -> frozenset[Role]:
    return protocol.roles_of(config, FREEZE, frozenset({Role.STATISTICS, Role.AFFINE}))
