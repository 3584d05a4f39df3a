"""FixBN (Zhong, Chen, Chao, "Making Batch Normalization Great in Federated Deep Learning").

Train with ordinary batch norm up to round T*, then freeze the aggregated statistics: in later rounds every batch norm
normalises with the global mean and variance, in training as in evaluation, while gamma, beta and the other layers
continue to train. This removes the mismatch between a client's batch statistics and the global statistics without
additional communication.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from logging import WARNING
from typing import Any, Literal

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common import log
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedbn_flwr.client.rule import ClientRule, Key
from fedbn_flwr.engines.base import wait_for_nodes
from fedbn_flwr.errors import RunFailed, SettingsError
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.aggregate import Array, Arrays, same_values
from fedbn_flwr.messages.arrays import metrics_in, unpack
from fedbn_flwr.messages.gate import Reply, one_line
from fedbn_flwr.norms.freeze import frozen_norm
from fedbn_flwr.norms.roles import Role, roles, split_by_role

from ._rule import Round
from ._wrapper import Wrapper

FREEZE = "fedbn.freeze"
FREEZABLE = frozenset({Role.STATISTICS, Role.AFFINE})


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
        The roles to freeze: "statistics", "affine" (gamma and beta), or both. The paper compares the three (Table H)
        and freezes only the statistics.
    window : int (default: 10)
        W, with "auto": the number of rounds over which the variance of the change is computed.
    threshold : float (default: 1e-4)
        tau, with "auto": freeze after the first round in which this variance is below tau for every client. The paper
        does not define the change of a client's statistics from one round to the next. Here it is the relative
        distance |s_t - s_(t-1)| / |s_(t-1)|, so that tau does not depend on the size of the model. The statistics are
        those of the clients' replies.
    """

    @dataclass
    class Memory(Wrapper.Memory):
        last_free: int | None = None  # T*; with "auto" the number of rounds until it is decided
        last: dict[str, Array] = field(default_factory=dict)  # with "auto": each client's last statistics s_t
        changes: dict[str, list[float]] = field(default_factory=dict)  # with "auto": their changes in W rounds

    memory: Memory
    lacks = {}
    argument = "freeze_round"  # the name of the argument T*, for errors

    def __init__(
        self,
        strategy: Strategy,
        *,
        freeze_round: int | float | Literal["auto"] = 0.5,
        freeze: Sequence[str] = ("statistics",),
        window: int = 10,
        threshold: float = 1e-4,
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
        super().__init__(strategy)
        is_number = isinstance(freeze_round, int | float) and not isinstance(freeze_round, bool)
        if freeze_round != "auto" and not (is_number and freeze_round >= 0):
            raise SettingsError(
                f"{self.argument} is {freeze_round!r}; expected a round (0, 1, 2, ...), a fraction of the rounds "
                "(0.0 to 1.0) or 'auto'"
            )
        if isinstance(freeze_round, float) and freeze_round > 1:
            raise SettingsError(
                f"{self.argument} is {freeze_round!r}; a fraction of the rounds must be at most 1.0, and a round is an "
                f"integer: {int(freeze_round)}"
            )
        names = [freeze] if isinstance(freeze, str) else list(freeze)
        if not names or not set(names) <= FREEZABLE:
            raise SettingsError(f"freeze is {freeze!r}; expected one or both of {sorted(map(str, FREEZABLE))}")
        if window < 2:
            raise SettingsError(f"window is {window}; expected at least 2 rounds, since a variance needs two values")
        if not threshold > 0:
            raise SettingsError(f"threshold is {threshold}; expected a number above zero")
        self.freeze_round = freeze_round
        self.freeze = frozenset(Role(name) for name in names)
        self.traits = replace(self.traits, freezes=self.traits.freezes | self.freeze)
        self.window = window
        self.threshold = threshold
        self._asks = True  # before the first round, whether clients honour the freeze
        if isinstance(freeze_round, int):
            self.memory.last_free = freeze_round

    def check(self, num_rounds: int) -> None:
        super().check(num_rounds)
        if isinstance(self.freeze_round, int) and self.freeze_round > num_rounds:
            raise SettingsError(
                f"{self.argument} is {self.freeze_round}, but there are {num_rounds} rounds; expected 0 to "
                f"{num_rounds}, or a fraction such as 0.5"
            )

    def begin(self, num_rounds: int, arrays: ArrayRecord) -> None:
        super().begin(num_rounds, arrays)
        if self.freeze_round == "auto":
            last_free = num_rounds
        elif isinstance(self.freeze_round, float):
            last_free = int(self.freeze_round * num_rounds + 1e-9)  # 0.29 * 100 is 28.999999999999996
        else:
            last_free = int(self.freeze_round)
        self.memory.last_free = last_free
        if self.freeze_round and last_free == 0:
            log(
                WARNING,
                "%s=%s of %d rounds is round 0: the statistics are frozen at their initial values. Train for more "
                "rounds, or set %s to 0 for a model that has statistics already",
                self.argument, self.freeze_round, num_rounds, self.argument,
            )  # fmt: skip
        freezes = self.freeze_round == "auto" or last_free < num_rounds
        # In round 1 a reply shows whether the client honours the freeze, and FedTAN inside needs a BNClient anyway.
        self._asks = freezes and last_free > 0 and not self.traits.replaces_norm
        if freezes:
            self.require_norm(self.freeze, arrays, "freezes batch norm", instead="its base strategy")

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        # The clients of an experiment (which has a name) are always those of this library.
        if self._asks and protocol.RUN not in config:
            _check_honoured(grid, FREEZE, server_round)
        self._asks = False
        return super().configure_train(server_round, arrays, config, grid)

    def switched(self, server_round: int) -> bool:
        return super().switched(server_round) or (
            self.memory.last_free is not None and server_round > self.memory.last_free
        )

    def notes(self) -> dict[str, Any]:
        return {**super().notes(), "freeze_round": self.memory.last_free, "frozen": sorted(self.freeze)}

    def instructions(self, round: Round) -> dict[str, Any]:
        if not self._frozen(round):
            return {}
        return {FREEZE: protocol.join(self.freeze | frozen_roles(round.config))}  # a rule around it may freeze others

    def problem(self, round: Round, reply: Reply) -> str | None:
        """Refuse the reply of a client that ignored the freeze: it trained a different model."""
        # Roles that stay on the client (FedBN) are frozen there with the client's own values: do not compare them.
        for key, sent in self._frozen(round, self.freeze - self.traits.kept).items():
            value = reply.arrays.get(key)
            if value is not None and not same_values(value, sent):
                return (
                    f"it changed {key!r}, which is frozen. Its ClientApp does not honour the config key "
                    f"{FREEZE!r}: serve it by fedbn_flwr.client_app with a BNClient, or put its batch "
                    "norms in eval mode in such rounds"
                )
        return None

    def combine(self, round: Round, replies: Sequence[Reply], weights: Sequence[float]) -> Arrays:
        model = super().combine(round, replies, weights)
        # The mean of equal numbers may differ from them by a rounding error, but frozen arrays must not change at all.
        frozen = {key: value for key, value in self._frozen(round).items() if key in model}
        return {**model, **frozen} if frozen else model

    def after_round(self, round: Round, replies: Sequence[Reply], weights: Sequence[float]) -> None:
        """With "auto", freeze from the next round on if every client's statistics change at a steady rate."""
        if self.freeze_round == "auto" and not self._frozen(round):
            steady = [self._is_steady(reply) for reply in replies]  # a list, since each call updates the state
            if steady and all(steady):
                self.memory.last_free = round.number
        if round.number != self.memory.last_free or round.number == self.num_rounds:
            return
        if getattr(self.leaf, "fraction_train", 1.0) != 1:
            return
        if absent := sorted({*self.leaf.memory.partitions.values()} - {reply.partition for reply in replies}):
            log(
                WARNING,
                "FixBN: the statistics of round %d, which are frozen from now on, are without clients %s",
                round.number, ", ".join(map(str, absent)),
            )  # fmt: skip

    def _frozen(self, round: Round, which: frozenset[Role] | None = None) -> Arrays:
        """The arrays that are frozen in a round: none up to round T*."""
        if self.memory.last_free is None:
            raise SettingsError(
                f"{self.argument}={self.freeze_round!r} depends on the number of rounds, which only the start() of a "
                "strategy of fedbn_flwr knows: another strategy is around this one, or start() was not called. Give "
                f"{self.argument} as a round (an int), or wrap the other strategy instead: FixBN(OtherStrategy(...))"
            )
        if round.number <= self.memory.last_free:
            return {}
        return split_by_role(unpack(round.arrays), roles(round.arrays), self.freeze if which is None else which)[0]

    def _is_steady(self, reply: Reply) -> bool:
        """Record a client's change |s_t - s_(t-1)| / |s_(t-1)|; is the variance of W changes below tau?"""
        statistics = split_by_role(reply.arrays, roles(reply.arrays), {Role.STATISTICS})[0]
        if not statistics:
            raise SettingsError(
                f"{self.argument} is 'auto', but the clients send no statistics to measure; expected a round or a "
                "fraction of the rounds"
            )
        vector = np.concatenate([array.ravel().astype(np.float64) for array in statistics.values()])
        # By partition if the client reports it, since node ids change when a run is resumed.
        who = f"node {reply.node}" if reply.partition is None else f"partition {reply.partition}"
        changes = self.memory.changes.setdefault(who, [])
        if (last := self.memory.last.get(who)) is not None:
            changes.append(float(np.linalg.norm(vector - last)) / max(float(np.linalg.norm(last)), 1e-12))
            del changes[: -self.window]
        self.memory.last[who] = vector
        return len(changes) == self.window and float(np.var(changes)) < self.threshold


class FixBNClient(ClientRule):
    """Freezes the statistics, or gamma and beta, at the received values."""

    keys = {FREEZE: Key("`statistics`, `affine`, or both with a comma", "freeze these roles at the received values")}

    def around(self) -> AbstractContextManager[None]:
        return frozen_norm(self.local.model, frozen_roles(self.local.config))


def frozen_roles(config: Mapping[str, Any]) -> frozenset[Role]:
    return protocol.roles_of(config, FREEZE, FREEZABLE)


_TIMEOUT = 600  # seconds to wait for a node, and for the nodes' answers


def _check_honoured(grid: Grid, key: str, server_round: int) -> None:
    """Ask the connected nodes whether their clients honour a config key; RunFailed lists those that do not confirm it.

    The rounds before the first message with the key would be lost if a client ignored it.
    """
    nodes = wait_for_nodes(grid, 1, _TIMEOUT, "start SuperNodes")
    content = RecordDict({"config": ConfigRecord({protocol.ROUND: server_round})})
    queries = [Message(content, node, protocol.KEYS_QUERY) for node in nodes]
    problems = []
    for reply in grid.send_and_receive(queries, timeout=_TIMEOUT):
        node = reply.metadata.src_node_id
        if reply.has_content():
            if key not in next(iter(metrics_in(reply.content).values()), MetricRecord()):
                problems.append(f"node {node}: its client does not honour it")
            continue
        reason = str(reply.error.reason)
        if reply.error.code == ErrorCode.CLIENT_APP_RAISED_EXCEPTION and protocol.KEYS_TASK not in reason:
            problems.append(f"node {node}: {one_line(reason)}")
        # A node that is offline, or cannot make its client, is left to the rounds: other nodes may suffice.
    if problems:
        listed = "".join(f"\n  - {problem}" for problem in sorted(problems))
        raise RunFailed(
            f"the run cannot begin: its later rounds need clients that honour the config key {key!r}, and these do not "
            f"confirm it. Serve them by fedbn_flwr.client_app with a BNClient, or answer {protocol.KEYS_QUERY!r} "
            f"as docs/plugin.md shows:{listed}"
        )
