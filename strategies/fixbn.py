"""FixBN (Zhong, Chen, Chao, "Making Batch Normalization Great in Federated Deep Learning").

Train with ordinary batch norm up to round T*, then freeze the aggregated statistics: in later rounds every batch norm
normalises with the global mean and variance, in training as in evaluation, while gamma, beta and the other layers
continue to train. This removes the mismatch between a client's batch statistics and the global ones without messages.

T* may also be found during training (Appendix B.6): with `freeze_round={"window": W, "below": tau}` it is the first
round in which Var = 1/W sum_i (dBN_i - mean dBN)^2, over the last W rounds, is below tau. The paper leaves open which
norm measures dBN_i, the change of the statistics in round i. Here it is a root mean square over all layers, of the
change of the means in units of the layer's standard deviation, and of the change of the log variances:

    dBN_i^2 = 1/L sum_l (mean_drift_l^2 + variance_drift_l^2)

These are the drifts that `evaluate.dynamics` records, so that you can choose W and tau from the norms.jsonl of a run.

With `refresh` the frozen statistics follow the data. In a frozen round clients record the moments of each batch along
with training, and the server moves its statistics towards theirs. `FixBN(FedAvg(), freeze_round=0, refresh=0.1)` is
Federated BatchNorm (FBN; Guerraoui et al. 2024, https://arxiv.org/abs/2405.14670). Its equations are those in the code
of HBN's authors (Hongyao-Chen/HybridBN), since FBN's own could not be had. There each batch of a round counts equally,
recording begins anew in each round, variances are biased, and the server's variance is about its new mean. Choices that
remain:

- That code divides variances by n - 1, where n counts images. Here it is n, since only the ratios of weights count.
- In rounds before the freeze, statistics are pooled (`FedAvg(statistics="pooled")`).
- The paper's variant against malicious clients is left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

import numpy as np
import torch
from annotated_types import Ge, Gt, Le, MinLen
from flwr.app import ArrayRecord
from flwr.serverapp.strategy import Strategy

from fedbn_flwr.client.node_state import LOCAL_ARRAYS
from fedbn_flwr.client.rule import MODEL, ClientRule, Key, LocalRound, Memo
from fedbn_flwr.errors import MessageError, SettingsError, log_once
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.aggregate import Array, Arrays, cast, pooled_mean
from fedbn_flwr.messages.arrays import unpack
from fedbn_flwr.messages.protocol import Config, Metrics
from fedbn_flwr.messages.reply import Reply
from fedbn_flwr.models.tensors import copied
from fedbn_flwr.norms.distances import distances, statistics_in
from fedbn_flwr.norms.roles import Role, is_variance, mean_of, of_roles, roles, split
from fedbn_flwr.norms.statistics import MomentRecorder
from fedbn_flwr.server.rule import require_norm
from fedbn_flwr.server.traits import Round, Traits, mean_is_enough
from fedbn_flwr.server.wrapper import Wrapper
from fedbn_flwr.trees import Json

FREEZE = "fedbn.freeze"
MOMENTS = "fedbn.moments"
_WORDS = "a round as an integer (0, 1, 2, ...) or a fraction of the rounds as a float (0.0 to 1.0)"
LastFree = Annotated[Annotated[int, Ge(0)] | Annotated[float, Ge(0), Le(1)], _WORDS]
_Key = Literal["window", "below"]
FreezeRound = Annotated[
    LastFree | Annotated[Mapping[_Key, Annotated[float, Gt(0)]], MinLen(2)],
    f"{_WORDS}, or {{window: W, below: tau}} with numbers > 0",
]
_Role = Literal["statistics", "affine"]
Frozen = Annotated[_Role | Annotated[Sequence[_Role], MinLen(1)], "one or both of ['affine', 'statistics']"]


class FixBN(Wrapper):
    """Freeze batch norm from a round on, around any strategy.

    Parameters
    ----------
    strategy : Strategy
        The strategy that trains and aggregates, for instance `FedAvg()`.
    freeze_round : int | float | dict (default: 0.5)
        T*, the last round with ordinary batch norm, as a round (int) or a fraction of all rounds (float). 0 freezes
        the initial statistics, and the number of rounds freezes nothing. `{window: W, below: tau}` freezes once the
        statistics have settled: when the variance of their changes in the last W rounds falls below tau. The paper's
        default is half.
    freeze : sequence of str (default: ["statistics"])
        The roles to freeze: "statistics", "affine" (gamma and beta), or both. The paper compares the three (Table H).
    refresh : float | None (default: None)
        How far each frozen round moves the statistics towards the moments of its batches, 0 to 1; FBN is 0.1 with
        `freeze_round=0`. None keeps the statistics.
    lr_factor : float | None (default: None)
        Clients multiply their learning rate by this factor after the freeze, instead of an experiment's
        `train.schedule.switch`.
    """

    argument = "freeze_round"  # the name of the argument T*, for errors

    @dataclass
    class Memory(Wrapper.Memory):
        changes: list[float] = field(default_factory=list)  # dBN_i of the last W rounds

    memory: Memory

    def __init__(
        self,
        strategy: Strategy,
        *,
        freeze_round: FreezeRound = 0.5,
        freeze: Frozen = ("statistics",),
        refresh: Annotated[float, Gt(0), Le(1)] | None = None,
        lr_factor: Annotated[float, Gt(0)] | None = None,
    ) -> None:
        cure = (
            "FixBN would freeze values that are not data statistics; wrap it: FixBN(MeanStatistics({inside}(...)), ...)"
        )
        needs = {"statistics": cure} if "statistics" in freeze else {}
        if isinstance(freeze_round, Mapping) and (freeze_round["window"] < 2 or freeze_round["window"] % 1):
            raise SettingsError(f"freeze_round has window {freeze_round['window']}; expected a whole number >= 2")
        if refresh is not None:
            needs["pooled"] = "with refresh {outer} would pool their statistics instead; leave refresh out"
        super().__init__(strategy, needs)
        self.freeze_round = freeze_round
        self.freeze = frozenset(map(Role, [freeze] if isinstance(freeze, str) else freeze))
        self.refresh, self.lr_factor = refresh, lr_factor
        self.memory.switch_round = switch_of(freeze_round)
        self._check_others()
        if refresh is not None:
            self._check_refresh()
            self.traits |= Traits(pooled=True)

    def _check_others(self) -> None:
        """Raise SettingsError if two rules freeze the same statistics."""
        both = [rule for rule in self.chain if isinstance(rule, FixBN) and Role.STATISTICS in rule.freeze]
        if len(both) > 1:
            names = " and ".join(
                f"{rule}({rule.argument}={rule.freeze_round}, refresh={rule.refresh})" for rule in both
            )
            raise SettingsError(f"{names} freeze the same statistics; leave one of the two out")

    def _check_refresh(self) -> None:
        """Raise SettingsError if the statistics do not pass through the server, or are not frozen."""
        reasons = {
            "freeze has only 'affine'; add 'statistics'": Role.STATISTICS not in self.freeze,
            f"with {self.chain[1]} statistics stay on the clients; leave one out": Role.STATISTICS in self.traits.local,
            f"{self.base} exchanges those of a round's first step; leave one out": self.traits.min_batch,
        }
        for reason in [reason for reason, holds in reasons.items() if holds]:
            raise SettingsError(
                f"refresh is {self.refresh}, which moves frozen statistics towards those of the clients' batches, but "
                f"{reason}"
            )

    def begin(self, num_rounds: int, arrays: ArrayRecord) -> None:
        super().begin(num_rounds, arrays)
        given, name = self.freeze_round, self.argument
        self.memory.switch_round = switch = switch_of(given, num_rounds)
        if isinstance(given, Mapping):
            self._check_window(given, num_rounds, arrays)
        if not num_rounds or switch is None:
            return
        if (last := switch - 1) > num_rounds:
            raise SettingsError(
                f"{name} is {given}, but there are {num_rounds} rounds; expected 0 to {num_rounds}, or a fraction such "
                "as 0.5"
            )
        if given and not last:
            words = "is round 0: the statistics are frozen at their initial values; train more rounds"
            log_once(f"{name}={given} of {num_rounds} rounds {words}")
        if self.refresh and not last and is_initial(unpack(arrays)):
            log_once("the statistics are 0 and 1 in round 1: nothing is normalised before they are refreshed")
        if last < num_rounds:
            require_norm(self, self.freeze, arrays, "freezes batch norm", instead="the base strategy alone")

    def _check_window(self, given: Mapping[_Key, float], num_rounds: int, arrays: ArrayRecord) -> None:
        """Raise SettingsError if there are no changes of statistics to measure."""
        if 0 < num_rounds < given["window"]:
            raise SettingsError(f"freeze_round has window {given['window']}, but there are {num_rounds} rounds")
        require_norm(
            self, self.freeze | {Role.STATISTICS}, arrays, "freezes batch norm", instead="the base strategy alone"
        )
        if Role.STATISTICS in self.traits.never_sent:
            raise SettingsError(
                f"freeze_round is {dict(given)}, but with {self.chain[1]} clients send no running statistics whose "
                "changes could be measured; give freeze_round as a round (an int) or a fraction (a float)"
            )

    def config(self, round: Round) -> Config:
        if self._is_free(round):
            return {}
        frozen = protocol.join(self.freeze | frozen_roles(round.config))  # a strategy around it may freeze others
        slower = {} if self.lr_factor is None else {protocol.LR_FACTOR: float(self.lr_factor)}
        return {FREEZE: frozen, **slower, **({MOMENTS: True} if self.refresh else {})}

    @mean_is_enough
    def problem(self, round: Round, reply: Reply) -> str | None:
        """The problem of a reply whose client ignored the freeze, and so trained another model."""
        for key, sent in self._frozen(round).items():
            if key in reply.arrays and not same_values(reply.arrays[key], sent):
                return (
                    f"it changed {key!r}, which is frozen. Its ClientApp ignores the config key {FREEZE!r}: serve "
                    "it by fedbn_flwr.client_app with a BNClient, or put its batch norms in eval mode in such rounds"
                )
        return None

    @mean_is_enough
    def combine(self, round: Round, replies: Sequence[Reply], weights: Sequence[float]) -> Arrays:
        model = super().combine(round, replies, weights)
        if self.refresh:
            model = {**model, **self._refreshed(round, replies, weights)}
        if isinstance(self.freeze_round, Mapping) and self._is_free(round):
            self._watch(self.freeze_round, round, model)
        # The mean of equal numbers may have a rounding error, but frozen arrays must not change at all.
        return {**model, **{key: sent for key, sent in self._frozen(round).items() if key in model}}

    def _watch(self, given: Mapping[_Key, float], round: Round, model: Arrays) -> None:
        """Freeze after this round if the statistics have settled."""
        before = unpack(round.arrays)
        moved = distances(statistics_in(before), statistics_in({**before, **model})).values()
        change = math.sqrt(sum(mean**2 + variance**2 for mean, variance, _ in moved) / len(moved))
        changes = self.memory.changes = [*self.memory.changes, change][-int(given["window"]) :]
        if len(changes) == given["window"] and np.var(changes) < given["below"]:
            self.memory.switch_round = round.number + 1

    def notes(self) -> Json:
        switch = self.memory.switch_round
        refreshed = {"refresh": self.refresh} if self.refresh else {}
        return {**super().notes(), "freeze_round": switch and switch - 1, "frozen": sorted(self.freeze), **refreshed}

    def _is_free(self, round: Round) -> bool:
        """Whether the round is one of the first T*."""
        name, switch = self.argument, self.memory.switch_round
        if isinstance(self.freeze_round, Mapping):
            return switch is None or round.number < switch
        if switch is None:
            raise SettingsError(
                f"{name}={self.freeze_round!r} is a share of the rounds, and their number is unknown: another strategy "
                f"wraps this one, or start() wasn't called. Give {name} as a round (an int), or wrap the other "
                "strategy instead: FixBN(OtherStrategy(...))"
            )
        return round.number < switch

    def _frozen(self, round: Round) -> Arrays:
        """The arrays that are frozen in the round, without a client's own arrays (FedBN)."""
        if self._is_free(round):
            return {}
        shared = split(unpack(round.arrays), self.traits.local_keys(round.arrays))[1]
        frozen = self.freeze - ({Role.STATISTICS} if self.refresh else set())
        return of_roles(shared, frozen)

    def _refreshed(self, round: Round, replies: Sequence[Reply], weights: Sequence[float]) -> Arrays:
        """The new statistics. In a frozen round mu_k and v_k are the moments of client k's batches.

        mu <- rate sum_k p_k mu_k + (1 - rate) mu,  v <- rate sum_k p_k (v_k + (mu_k - mu)^2) + (1 - rate) v
        """
        rate = 1.0 if self._is_free(round) else self.refresh or 0.0
        shared = split(unpack(round.arrays), self.traits.local_keys(round.arrays))[1]
        sent = of_roles(shared, {Role.STATISTICS})
        cohort = [{key: reply.arrays[key].astype(np.float64) for key in sent} for reply in replies]
        pooled = pooled_mean(cohort, weights)
        new: dict[str, Array] = {}
        for key in sorted(sent, key=is_variance):  # the new means first
            center = about(pooled, key, new) if is_variance(key) else pooled[key]
            new[key] = rate * center + (1 - rate) * sent[key].astype(np.float64)
        return {key: cast(value, sent[key].dtype) for key, value in new.items()}


def switch_of(given: int | float | Mapping[_Key, float], num_rounds: int = 0) -> int | None:
    """The round after T*, or None if that depends on a number of rounds that is not known, or on the statistics."""
    if isinstance(given, Mapping):
        return None
    if isinstance(given, int):
        return given + 1
    return int(given * num_rounds + 1e-9) + 1 if num_rounds else None  # 0.29 * 100 is 28.999999999999996


def about(statistics: Arrays, key: str, center: Arrays) -> Array:
    """The second moment about other means, from a variance and the means that belong to it."""
    second: Array = statistics[key] + np.square(statistics[mean_of(key)] - center[mean_of(key)])
    return second


def is_initial(arrays: Arrays) -> bool:
    """Whether all statistics are those of a new batch norm."""
    statistics = of_roles(arrays, {Role.STATISTICS})
    return bool(statistics) and all((value == is_variance(key)).all() for key, value in statistics.items())


def same_values(value: Array, sent: Array) -> bool:
    """Whether a client sent these values back unchanged, perhaps in another dtype.

    Some of Flower's strategies send float64 to a model of float32, and a model may have bfloat16.
    """

    def equals(known: Array) -> bool:
        return value.tobytes() == known.astype(value.dtype).tobytes()

    return equals(sent) or equals(torch.from_numpy(sent.copy()).bfloat16().float().numpy())


class FixBNClient(ClientRule):
    """Freezes the statistics, or gamma and beta, at the received values."""

    keys = {
        FREEZE: Key("`statistics`, `affine`, or both with a comma", "freeze these roles at the received values"),
        MOMENTS: Key("true", "send the means of the batches' moments (mean, biased variance) as frozen statistics"),
    }

    def __init__(self, local: LocalRound) -> None:
        super().__init__(local)
        frozen, role_of = frozen_roles(local.config), roles(local.model)
        unsent = {key: role for key, role in role_of.items() if role in frozen and key not in local.received}
        # Where roles stay on the client (FedBN, SiloBN), one that first trains after the freeze sets its values now.
        own = local.state.load(LOCAL_ARRAYS) if unsent else {}
        missing = {role: key for key, role in reversed(unsent.items()) if key not in own}
        if shared := [key for key in role_of if key in local.received and role_of[key] in missing]:
            role = role_of[shared[0]]
            raise MessageError(
                f"this client first trains after the freeze ({FREEZE!r}): it would have to set its own "
                f"{missing[role]!r}, while {shared[0]!r} is frozen; keep all {role} on the clients, or none"
            )
        self.frozen = frozen - missing.keys()
        refreshed = bool(local.config.get(MOMENTS))
        self.trains_alone |= refreshed  # compiled passes may leave out the hooks that measure
        self.moments = local.resources.enter_context(MomentRecorder(local.model)) if refreshed else None

    def finish(self, memo: Memo, steps: int, metrics: Metrics, records: dict[str, Arrays]) -> None:
        if self.moments is not None:
            measured = copied(self.moments.statistics())
            model = records[MODEL]
            sent = {key: cast(value, model[key].dtype) for key, value in measured.items() if key in model}
            records[MODEL] = {**model, **sent}


def frozen_roles(config: Config) -> frozenset[Role]:
    return protocol.roles_of(config, FREEZE, frozenset({Role.STATISTICS, Role.AFFINE}))
