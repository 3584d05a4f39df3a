"""FixBN (Zhong, Chen, Chao, "Making Batch Normalization Great in Federated Deep Learning").

Train with ordinary batch norm up to round T*, then freeze the aggregated statistics: in later rounds every batch norm
normalises with the global mean and variance, in training as in evaluation, while gamma, beta and the other layers
continue to train. This removes the mismatch between a client's batch statistics and the global ones without messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Le, MinLen
from flwr.app import ArrayRecord
from flwr.serverapp.strategy import Strategy

from fedbn_flwr.client.node_state import OWN
from fedbn_flwr.client.rule import ClientRule, Key, LocalRound
from fedbn_flwr.errors import LOG, SettingsError
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.aggregate import Array, Arrays
from fedbn_flwr.messages.arrays import unpack
from fedbn_flwr.messages.reply import Reply
from fedbn_flwr.norms.roles import Role, roles, split_by_role

from ._hooks import Config, Json, Round, require_norm
from ._wrapper import Wrapper

FREEZE = "fedbn.freeze"
_WORDS = "a round as an integer (0, 1, 2, ...) or a fraction of the rounds as a float (0.0 to 1.0)"
LastFree = Annotated[Annotated[int, Ge(0)] | Annotated[float, Ge(0), Le(1)], _WORDS]
_Role = Literal["statistics", "affine"]
Frozen = Annotated[_Role | Annotated[Sequence[_Role], MinLen(1)], "one or both of ['affine', 'statistics']"]


class FixBN(Wrapper):
    """Freeze batch norm from a round on, around any strategy.

    Parameters
    ----------
    strategy : Strategy
        The strategy that trains and aggregates, for instance `FedAvg()`.
    freeze_round : int | float (default: 0.5)
        T*, the last round with ordinary batch norm, as a round (int) or a fraction of all rounds (float). 0 freezes
        the initial statistics, and the number of rounds freezes nothing. The paper's default is half.
    freeze : sequence of str (default: ["statistics"])
        The roles to freeze: "statistics", "affine" (gamma and beta), or both. The paper compares the three (Table H).
    """

    breaks = {}
    argument = "freeze_round"  # the name of the argument T*, for errors

    def __init__(self, strategy: Strategy, *, freeze_round: LastFree = 0.5, freeze: Frozen = ("statistics",)) -> None:
        cure = (
            "FixBN would freeze values that are not data statistics; wrap it: FixBN(MeanStatistics({inside}(...)), ...)"
        )
        super().__init__(strategy, {"statistics": cure} if "statistics" in freeze else {})
        self.freeze_round = freeze_round
        self.freeze = frozenset(map(Role, [freeze] if isinstance(freeze, str) else freeze))
        self.memory.switch_round = freeze_round + 1 if isinstance(freeze_round, int) else None

    def begin(self, num_rounds: int, arrays: ArrayRecord) -> None:
        super().begin(num_rounds, arrays)
        given, name = self.freeze_round, self.argument
        if not num_rounds:
            self.memory.switch_round = given + 1 if isinstance(given, int) else None
            return
        last = int(given * num_rounds + 1e-9) if isinstance(given, float) else given  # 0.29 * 100 is 28.999999999999996
        self.memory.switch_round = last + 1
        if last > num_rounds:
            raise SettingsError(
                f"{name} is {given}, but there are {num_rounds} rounds; expected 0 to {num_rounds}, or a fraction such "
                "as 0.5"
            )
        if given and not last:
            text = "%s=%s of %d rounds is round 0: the statistics are frozen at their initial values; train more rounds"
            LOG.warning(text, name, given, num_rounds)
        if last < num_rounds:
            require_norm(self, self.freeze, arrays, "freezes batch norm", instead="its base strategy")

    def config(self, round: Round) -> Config:
        if self._is_free(round):
            return {}
        return {FREEZE: protocol.join(self.freeze | frozen_roles(round.config))}  # a rule around it may freeze others

    def problem(self, round: Round, reply: Reply) -> str | None:
        """The problem of a reply whose client ignored the freeze, and so trained another model."""
        for key, sent in self._frozen(round).items():
            if key in reply.arrays and not same_values(reply.arrays[key], sent):
                return (
                    f"it changed {key!r}, which is frozen. Its ClientApp ignores the config key {FREEZE!r}: serve "
                    "it by fedbn_flwr.client_app with a BNClient, or put its batch norms in eval mode in such rounds"
                )
        return None

    def combine(self, round: Round, replies: Sequence[Reply], weights: Sequence[float]) -> Arrays:
        model = super().combine(round, replies, weights)
        # The mean of equal numbers may have a rounding error, but frozen arrays must not change at all.
        return {**model, **{key: sent for key, sent in self._frozen(round).items() if key in model}}

    def notes(self) -> Json:
        switch = self.memory.switch_round
        return {**super().notes(), "freeze_round": switch and switch - 1, "frozen": sorted(self.freeze)}

    def _is_free(self, round: Round) -> bool:
        """Whether the round is one of the first T*."""
        name, switch = self.argument, self.memory.switch_round
        if switch is None:
            raise SettingsError(
                f"{name}={self.freeze_round!r} depends on the number of rounds, which start() of a fedbn_flwr strategy "
                "passes on, but another strategy wraps this one, or start() was not called. Give "
                f"{name} as a round (an int), or wrap the other strategy instead: FixBN(OtherStrategy(...))"
            )
        return round.number < switch

    def _frozen(self, round: Round) -> Arrays:
        """The arrays that are frozen in the round, without a client's own arrays (FedBN)."""
        which = self.freeze - self.traits.local_roles.keys()
        return {} if self._is_free(round) else split_by_role(unpack(round.arrays), roles(round.arrays), which)[0]


def same_values(value: Array, sent: Array) -> bool:
    """Whether a client sent these values back unchanged, perhaps in another dtype.

    Some of Flower's strategies send float64 to a model of float32, and a model may have bfloat16.
    """
    rounded = torch.from_numpy(sent.copy()).bfloat16().float().numpy()
    return value.tobytes() in [each.astype(value.dtype).tobytes() for each in (sent, rounded)]


class FixBNClient(ClientRule):
    """Freezes the statistics, or gamma and beta, at the received values."""

    keys = {FREEZE: Key("`statistics`, `affine`, or both with a comma", "freeze these roles at the received values")}

    def __init__(self, local: LocalRound) -> None:
        super().__init__(local)
        frozen, sent = frozen_roles(local.config), local.records["arrays"]
        kept = {key: role for key, role in local.roles.items() if role in frozen and key not in sent}
        # Where roles stay on the client (FedBN, SiloBN), one that first trains after the freeze sets its values now.
        own = local.state.load(OWN) if kept else {}
        self.frozen = frozen - {role for key, role in kept.items() if key not in own}


def frozen_roles(config: Config) -> frozenset[Role]:
    return protocol.roles_of(config, FREEZE, frozenset({Role.STATISTICS, Role.AFFINE}))
