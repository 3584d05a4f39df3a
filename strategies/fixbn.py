"""FixBN (Zhong, Chen, Chao, "Making Batch Normalization Great in Federated Deep Learning").

Train with ordinary batch norm up to round T*, then freeze the aggregated statistics: in later rounds every batch norm
normalises with the global mean and variance, in training as in evaluation, while gamma, beta and the other layers
continue to train. This removes the mismatch between a client's batch statistics and the global ones without messages.

T* may also be found during training (Appendix B.6). With `freeze_round={"window": W, "below": tau}` it is the first
round in which

    Var_m = 1/W sum_i (dBN_{m,i} - mean dBN_m)^2 < tau    for every client m of the round,

over the last W rounds of the client. dBN_{m,i} is the change of its local statistics in round i. The paper leaves open
from where it is counted, by which norm, and whether all clients must have settled. Here it is the change between what
the client receives and what it sends, a root mean square over the L layers, of the change of the means in units of the
layer's standard deviation, and of the change of the log variances:

    dBN^2 = 1/L sum_l (mean_drift_l^2 + variance_drift_l^2)

`{"window": W, "mean_below": tau}` is a variant of this project: a single dBN_i, of the mean of the clients' statistics.
It works with secure aggregation, and you can choose W and tau from the norms.jsonl of a run, because
`evaluate.dynamics` records the same drifts.

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
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
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
from fedbn_flwr.messages.aggregate import Array, Arrays, cast, pooled_mean, squared_distance, weighted_mean
from fedbn_flwr.messages.arrays import unpack
from fedbn_flwr.messages.protocol import Config, Metrics
from fedbn_flwr.messages.reply import Reply
from fedbn_flwr.models.tensors import copied
from fedbn_flwr.norms.distances import distances, statistics_in
from fedbn_flwr.norms.roles import Role, is_variance, of_roles, roles, split
from fedbn_flwr.norms.statistics import MomentRecorder
from fedbn_flwr.server.hooks import require_norm
from fedbn_flwr.server.traits import Round, Traits, mean_is_enough
from fedbn_flwr.server.wrapper import Wrapper
from fedbn_flwr.trees import Tree

FREEZE = "fedbn.fixbn-freeze"
MOMENTS = "fedbn.fixbn-moments"
_WORDS = "a round as an integer (0, 1, 2, ...) or a fraction of the rounds as a float (0.0 to 1.0)"
LastFree = Annotated[Annotated[int, Ge(0)] | Annotated[float, Ge(0), Le(1)], _WORDS]
_Tau = Annotated[float, Gt(0)]
Window = (
    Annotated[Mapping[Literal["window", "below"], _Tau], MinLen(2)]
    | Annotated[Mapping[Literal["window", "mean_below"], _Tau], MinLen(2)]
)
FreezeRound = Annotated[
    LastFree | Window, f"{_WORDS}, or {{window: W, below: tau}} or {{window: W, mean_below: tau}} with numbers > 0"
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
        statistics have settled: when the variance of each client's last W changes is below tau (with `mean_below`, of
        the changes of their mean). The paper's default is half.
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
        changes: dict[int, list[float]] = field(default_factory=dict)  # each client's last W dBN; -1 has the mean's

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
        if refresh is not None:
            needs["pooled"] = "with refresh {outer} would pool their statistics instead; leave refresh out"
        super().__init__(strategy, needs)
        self.freeze_round = freeze_round
        self.freeze = frozenset(map(Role, [freeze] if isinstance(freeze, str) else freeze))
        self.refresh, self.lr_factor = refresh, lr_factor
        self.memory.switch_round = switch_of(freeze_round)
        self.traits |= Traits(pooled=refresh is not None)
        both = [rule for rule in self.chain if isinstance(rule, FixBN) and Role.STATISTICS in rule.freeze]
        if len(both) > 1:
            names = (f"{rule}({rule.argument}={rule.freeze_round}, refresh={rule.refresh})" for rule in both)
            raise SettingsError(f"{' and '.join(names)} freeze the same statistics; leave one of the two out")
        stays = {
            f"with {self.chain[1]} statistics stay on the clients; leave one out": Role.STATISTICS in self.traits.local
        }
        if isinstance(freeze_round, Mapping):
            whole = freeze_round["window"] >= 2 and not freeze_round["window"] % 1
            words = f"freeze_round is {dict(freeze_round)}, which waits until the clients' statistics have settled"
            refuse(words, {"its window isn't a whole number >= 2": not whole, **stays})
            if "below" in freeze_round:
                self.breaks = {"mean": "measures each client's own statistics (with mean_below their mean)"}
        if refresh is not None:
            words = f"refresh is {refresh}, which moves frozen statistics towards those of the clients' batches"
            affine = {"freeze has only 'affine'; add 'statistics'": Role.STATISTICS not in self.freeze}
            exchanges = f"{self.base} exchanges those of a round's first step; leave one out"
            refuse(words, {**affine, **stays, exchanges: self.traits.min_batch > 0})

    # --- T* ---

    def begin(self, num_rounds: int, arrays: ArrayRecord) -> None:
        super().begin(num_rounds, arrays)
        given, name = self.freeze_round, self.argument
        self.memory.switch_round = switch_of(given, num_rounds)
        last = given["window"] if isinstance(given, Mapping) else (self.memory.switch_round or math.inf) - 1
        if num_rounds and last > num_rounds:
            raise SettingsError(
                f"{name} is {given}, but there are {num_rounds} rounds; expected at most {num_rounds}, or a fraction "
                "such as 0.5"
            )
        if given and not last:
            words = "is round 0: the statistics are frozen at their initial values; train more rounds"
            log_once(f"{name}={given} of {num_rounds} rounds {words}")
        initial = of_roles(unpack(arrays), {Role.STATISTICS})
        if self.refresh and not last and all((value == is_variance(key)).all() for key, value in initial.items()):
            log_once("the statistics are 0 and 1 in round 1: nothing is normalised before they are refreshed")
        if last < (num_rounds or math.inf):
            require_norm(self, self.freeze, arrays, "freezes batch norm", instead="the base strategy alone")

    def _is_free(self, round: Round) -> bool:
        """Whether the round is one of the first T*."""
        name, switch = self.argument, self.memory.switch_round
        if switch is None and not isinstance(self.freeze_round, Mapping):
            raise SettingsError(
                f"{name}={self.freeze_round!r} is a share of the rounds, and their number is unknown: another strategy "
                f"wraps this one, or start() wasn't called. Give {name} as a round (an int), or wrap the other "
                "strategy instead: FixBN(OtherStrategy(...))"
            )
        return switch is None or round.number < switch

    @mean_is_enough
    def after_round(self, round: Round, replies: Sequence[Reply], weights: Sequence[float]) -> None:
        """Freeze from the next round on if the statistics have settled."""
        if not isinstance(given := self.freeze_round, Mapping) or not self._is_free(round):
            return
        sent, roster, changes = self._shared(round, {Role.STATISTICS}), self.base.roster, self.memory.changes
        own = {roster.client(reply.message.metadata.src_node_id): reply.arrays for reply in replies}
        if "mean_below" in given:
            own = {-1: weighted_mean([{key: arrays[key] for key in sent} for arrays in own.values()], weights)}
        window, below = int(given["window"]), next(tau for key, tau in given.items() if key != "window")
        for client, arrays in own.items():
            moved = distances(statistics_in(sent), statistics_in(arrays)).values()
            change = math.sqrt(sum(mean**2 + variance**2 for mean, variance, _ in moved) / len(moved))
            changes[client] = [*changes.get(client, []), change][-window:]
        if all(len(changes[client]) == window and np.var(changes[client]) < below for client in own):
            self.memory.switch_round = round.number + 1

    # --- the frozen arrays ---

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
            model = {**model, **self._refreshed(round, replies, weights, 1.0 if self._is_free(round) else self.refresh)}
        # The mean of equal numbers may have a rounding error, but frozen arrays must not change at all.
        return {**model, **{key: sent for key, sent in self._frozen(round).items() if key in model}}

    def notes(self) -> Tree:
        switch = self.memory.switch_round
        refreshed = {"refresh": self.refresh} if self.refresh else {}
        return {**super().notes(), "freeze_round": switch and switch - 1, "frozen": sorted(self.freeze), **refreshed}

    def _shared(self, round: Round, wanted: Collection[Role]) -> Arrays:
        """The arrays of these roles, without a client's own arrays (FedBN)."""
        return of_roles(split(unpack(round.arrays), self.traits.local_keys(round.arrays))[1], wanted)

    def _frozen(self, round: Round) -> Arrays:
        """The arrays that the round does not change."""
        still = self.freeze - ({Role.STATISTICS} if self.refresh else set())
        return {} if self._is_free(round) else self._shared(round, still)

    def _refreshed(
        self, round: Round, replies: Sequence[Reply], weights: Sequence[float], rate: float
    ) -> Mapping[str, Array]:
        """The new statistics. In a frozen round mu_k and v_k are the moments of client k's batches.

        mu <- rate sum_k p_k mu_k + (1 - rate) mu,  v <- rate sum_k p_k (v_k + (mu_k - mu)^2) + (1 - rate) v
        """
        sent = self._shared(round, {Role.STATISTICS})
        old = {key: value.astype(np.float64) for key, value in sent.items()}
        pooled = pooled_mean(
            [{key: reply.arrays[key].astype(np.float64) for key in sent} for reply in replies], weights
        )
        means = {key: rate * pooled[key] + (1 - rate) * old[key] for key in sent if not is_variance(key)}
        new = means | {
            key: rate * (pooled[key] + shift) + (1 - rate) * old[key]
            for key, shift in squared_distance(pooled, means).items()
        }
        return {key: cast(value, sent[key].dtype) for key, value in new.items()}


def switch_of(given: int | float | Window, num_rounds: int = 0) -> int | None:
    """The round after T*, or None if that depends on a number of rounds that is not known, or on the statistics."""
    if isinstance(given, Mapping):
        return None
    if isinstance(given, int):
        return given + 1
    return int(given * num_rounds + 1e-9) + 1 if num_rounds else None  # 0.29 * 100 is 28.999999999999996


def refuse(what: str, reasons: Mapping[str, bool]) -> None:
    """Raise SettingsError for the first reason that holds."""
    for reason in [reason for reason, holds in reasons.items() if holds]:
        raise SettingsError(f"{what}, but {reason}")


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
        self.moments = local.resources.enter_context(closing(MomentRecorder(local.model))) if refreshed else None

    def finish(self, memo: Memo, steps: int, metrics: Metrics, records: dict[str, Arrays]) -> None:
        if self.moments is not None:
            measured = copied(self.moments.statistics())
            model = records[MODEL]
            sent = {key: cast(value, model[key].dtype) for key, value in measured.items() if key in model}
            records[MODEL] = {**model, **sent}


def frozen_roles(config: Config) -> frozenset[Role]:
    return protocol.roles_of(config, FREEZE, frozenset({Role.STATISTICS, Role.AFFINE}))
