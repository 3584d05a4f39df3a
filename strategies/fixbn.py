"""FixBN (Zhong, Chen, Chao, "Making Batch Normalization Great in Federated Deep Learning").

Train with ordinary batch norm up to round T*, then freeze the aggregated statistics: in later rounds every batch norm
normalises with the global mean and variance, in training as in evaluation, while gamma, beta and the other layers
continue to train. This removes the mismatch between a client's batch statistics and the global ones without messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from logging import WARNING
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Ge, Gt, Le, MinLen
from flwr.app import ArrayRecord
from flwr.common import log
from flwr.serverapp.strategy import Strategy

from fedbn_flwr.client.rule import ClientRule, Key
from fedbn_flwr.errors import SettingsError
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.aggregate import Array, Arrays, same_values
from fedbn_flwr.messages.arrays import unpack
from fedbn_flwr.messages.gate import Reply
from fedbn_flwr.norms.freeze import frozen_norm
from fedbn_flwr.norms.roles import Role, roles, split_by_role

from ._rule import Round, check_honoured, require_norm
from ._wrapper import Wrapper

FREEZE = "fedbn.freeze"
_WORDS = "a round as an integer (0, 1, 2, ...), a fraction of the rounds as a float (0.0 to 1.0) or 'auto'"
LastFree = Annotated[Annotated[int, Ge(0)] | Annotated[float, Ge(0), Le(1)] | Literal["auto"], _WORDS]
_Role = Literal["statistics", "affine"]
Freezable = Annotated[_Role | Annotated[Sequence[_Role], MinLen(1)], "one or both of ['affine', 'statistics']"]


class FixBN(Wrapper):
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
    class Memory(Wrapper.Memory):
        last: dict[str, Array] = field(default_factory=dict)  # with "auto": each client's last statistics s_t
        changes: dict[str, list[float]] = field(default_factory=dict)  # with "auto": their changes in W rounds

    memory: Memory
    lacks = {}
    argument = "freeze_round"  # the name of the argument T*, for errors

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
            self.needs = {
                "statistics": "FixBN would freeze what is no statistic of the data; wrap it: "
                "FixBN(MeanStatistics({inside}(...)), ...)"
            }
        super().__init__(strategy)
        self.freeze_round, self.window, self.threshold = freeze_round, window, threshold
        self.freeze = frozenset(map(Role, [freeze] if isinstance(freeze, str) else freeze))
        self.traits = replace(self.traits, freezes=self.traits.freezes | self.freeze)
        self.memory.switch_round = freeze_round + 1 if isinstance(freeze_round, int) else None

    def begin(self, num_rounds: int, arrays: ArrayRecord) -> None:
        super().begin(num_rounds, arrays)
        given = num_rounds if self.freeze_round == "auto" else self.freeze_round
        # 0.29 * 100 is 28.999999999999996
        last = int(given * num_rounds + 1e-9) if isinstance(given, float) else given  # T*; with "auto" not yet known
        self.memory.switch_round = last + 1
        if last > num_rounds:
            raise SettingsError(
                f"{self.argument} is {given}, but there are {num_rounds} rounds; expected 0 to {num_rounds}, or a "
                "fraction such as 0.5"
            )
        if given and not last:
            log(
                WARNING,
                "%s=%s of %d rounds is round 0: the statistics are frozen at their initial values. Train for more "
                "rounds, or set %s to 0 for a model that has statistics already",
                self.argument, given, num_rounds, self.argument,
            )  # fmt: skip
        if self.freeze_round == "auto" or last < num_rounds:
            require_norm(self, self.freeze, arrays, "freezes batch norm", instead="its base strategy")

    def instructions(self, round: Round) -> dict[str, Any]:
        if not self._is_free(round):  # a rule around it may freeze other roles
            return {FREEZE: protocol.join(self.freeze | frozen_roles(round.config))}
        # The clients of an experiment (which has a name) are this library's, and FedTAN inside needs a BNClient anyway.
        ours = protocol.RUN in round.config or self.traits.min_batch
        freezes = self.freeze_round == "auto" or self.memory.switch_round != (round.total or 0) + 1
        if round.number == 1 and freezes and not ours:
            check_honoured(round.grid, FREEZE, round.number)
        return {}

    def problem(self, round: Round, reply: Reply) -> str | None:
        """Refuse the reply of a client that ignored the freeze: it trained a different model."""
        # Roles that stay on the client (FedBN) are frozen there with the client's own values: do not compare them.
        for key, sent in self._frozen(round, self.freeze - self.traits.kept).items():
            if key in reply.arrays and not same_values(reply.arrays[key], sent):
                return (
                    f"it changed {key!r}, which is frozen. Its ClientApp does not honour the config key {FREEZE!r}: "
                    "serve it by fedbn_flwr.client_app with a BNClient, or put its batch norms in eval mode in such "
                    "rounds"
                )
        return None

    def combine(self, round: Round, replies: Sequence[Reply], weights: Sequence[float]) -> Arrays:
        model = super().combine(round, replies, weights)
        # The mean of equal numbers may differ from them by a rounding error, but frozen arrays must not change at all.
        return {**model, **{key: value for key, value in self._frozen(round, self.freeze).items() if key in model}}

    def after_round(self, round: Round, replies: Sequence[Reply], weights: Sequence[float]) -> None:
        """With "auto", freeze from the next round on if every client's statistics change at a steady rate."""
        if self.freeze_round == "auto" and self._is_free(round):
            changes = [self._changes(reply) for reply in replies]
            if changes and all(len(each) == self.window and np.var(each) < self.threshold for each in changes):
                self.memory.switch_round = round.number + 1
        if round.number + 1 == self.memory.switch_round and round.number != round.total:
            absent = sorted({*self.leaf.memory.partitions.values()} - {reply.partition for reply in replies})
            if absent and getattr(self.leaf, "fraction_train", 1.0) == 1:
                text = "FixBN: the statistics of round %d, which are frozen from now on, are without clients %s"
                log(WARNING, text, round.number, ", ".join(map(str, absent)))

    def notes(self) -> dict[str, Any]:
        last = None if self.memory.switch_round is None else self.memory.switch_round - 1
        return {**super().notes(), "freeze_round": last, "frozen": sorted(self.freeze)}

    def _is_free(self, round: Round) -> bool:
        """Whether the round is one of the first T*."""
        if self.memory.switch_round is None:
            raise SettingsError(
                f"{self.argument}={self.freeze_round!r} depends on the number of rounds, which only the start() of a "
                "strategy of fedbn_flwr knows: another strategy is around this one, or start() was not called. Give "
                f"{self.argument} as a round (an int), or wrap the other strategy instead: FixBN(OtherStrategy(...))"
            )
        return round.number < self.memory.switch_round

    def _frozen(self, round: Round, which: frozenset[Role]) -> Arrays:
        """The arrays of these roles that are frozen in the round."""
        return {} if self._is_free(round) else split_by_role(unpack(round.arrays), roles(round.arrays), which)[0]

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
