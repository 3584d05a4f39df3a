"""A wrapper that freezes roles of the model after round T*: when this is, and which clients cannot do it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from logging import WARNING
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le, MinLen
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.common import log
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedbn_flwr.engines.base import wait_for_nodes
from fedbn_flwr.errors import RunFailed, SettingsError
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.aggregate import Arrays
from fedbn_flwr.messages.arrays import metrics_in, unpack
from fedbn_flwr.messages.gate import Reply, one_line
from fedbn_flwr.norms.roles import Role, roles, split_by_role

from ._rule import Round
from ._wrapper import Wrapper

_WORDS = "a round as an integer (0, 1, 2, ...), a fraction of the rounds as a float (0.0 to 1.0) or 'auto'"
LastFree = Annotated[Annotated[int, Ge(0)] | Annotated[float, Ge(0), Le(1)] | Literal["auto"], _WORDS]

_Role = Literal["statistics", "affine"]
Freezable = Annotated[_Role | Annotated[Sequence[_Role], MinLen(1)], "one or both of ['affine', 'statistics']"]


class Freezing(Wrapper):
    """Freezes after round T*; with "auto" the subclass decides on it."""

    @dataclass
    class Memory(Wrapper.Memory):
        last_free: int | None = None  # T*; with "auto" the number of rounds until it is decided

    memory: Memory
    lacks = {}
    argument = "freeze_round"  # the name of the argument T*, for errors
    key: str  # the config key that asks clients to freeze

    def __init__(self, strategy: Strategy, freeze_round: LastFree, freeze: Freezable) -> None:
        super().__init__(strategy)
        self.freeze_round = freeze_round
        self.freeze = frozenset(map(Role, [freeze] if isinstance(freeze, str) else freeze))
        self.traits = replace(self.traits, freezes=self.traits.freezes | self.freeze)
        self.memory.last_free = freeze_round if isinstance(freeze_round, int) else None

    def check(self, num_rounds: int) -> None:
        super().check(num_rounds)
        if isinstance(self.freeze_round, int) and self.freeze_round > num_rounds:
            raise SettingsError(
                f"{self.argument} is {self.freeze_round}, but there are {num_rounds} rounds; expected 0 to "
                f"{num_rounds}, or a fraction such as 0.5"
            )

    def begin(self, num_rounds: int, arrays: ArrayRecord) -> None:
        super().begin(num_rounds, arrays)
        last_free = num_rounds if self.freeze_round == "auto" else self.freeze_round
        if isinstance(last_free, float):
            last_free = int(last_free * num_rounds + 1e-9)  # 0.29 * 100 is 28.999999999999996
        self.memory.last_free = last_free
        if self.freeze_round and last_free == 0:
            log(
                WARNING,
                "%s=%s of %d rounds is round 0: the statistics are frozen at their initial values. Train for more "
                "rounds, or set %s to 0 for a model that has statistics already",
                self.argument, self.freeze_round, num_rounds, self.argument,
            )  # fmt: skip
        if self._freezes():
            self.require_norm(self.freeze, arrays, "freezes batch norm", instead="its base strategy")

    def switched(self, server_round: int) -> bool:
        free = self.memory.last_free
        return super().switched(server_round) or (free is not None and server_round > free)

    def notes(self) -> dict[str, Any]:
        return {**super().notes(), "freeze_round": self.memory.last_free, "frozen": sorted(self.freeze)}

    def instructions(self, round: Round) -> dict[str, Any]:
        # The clients of an experiment (which has a name) are this library's, and FedTAN inside needs a BNClient anyway.
        ours = protocol.RUN in round.config or self.traits.replaces_norm
        if round.number == 1 and self.is_free(round) and self._freezes() and not ours:
            check_honoured(round.grid, self.key, round.number)
        return {}

    def after_round(self, round: Round, replies: Sequence[Reply], weights: Sequence[float]) -> None:
        """Name the clients whose statistics are not in the model of round T*."""
        if round.number == self.memory.last_free != self.num_rounds:
            absent = sorted({*self.leaf.memory.partitions.values()} - {reply.partition for reply in replies})
            if absent and getattr(self.leaf, "fraction_train", 1.0) == 1:
                text = "FixBN: the statistics of round %d, which are frozen from now on, are without clients %s"
                log(WARNING, text, round.number, ", ".join(map(str, absent)))

    def is_free(self, round: Round) -> bool:
        """Whether the round is one of the first T*."""
        if self.memory.last_free is None:
            raise SettingsError(
                f"{self.argument}={self.freeze_round!r} depends on the number of rounds, which only the start() of a "
                "strategy of fedbn_flwr knows: another strategy is around this one, or start() was not called. Give "
                f"{self.argument} as a round (an int), or wrap the other strategy instead: FixBN(OtherStrategy(...))"
            )
        return round.number <= self.memory.last_free

    def frozen(self, round: Round, which: frozenset[Role]) -> Arrays:
        """The arrays of these roles that are frozen in a round."""
        return {} if self.is_free(round) else split_by_role(unpack(round.arrays), roles(round.arrays), which)[0]

    def changed(self, key: str) -> str:
        """The problem of a reply with another value of an array that is frozen."""
        return (
            f"it changed {key!r}, which is frozen. Its ClientApp does not honour the config key {self.key!r}: serve it "
            "by fedbn_flwr.client_app with a BNClient, or put its batch norms in eval mode in such rounds"
        )

    def _freezes(self) -> bool:
        """Whether a later round may be frozen."""
        return self.freeze_round == "auto" or self.memory.last_free != self.num_rounds


_TIMEOUT = 600  # seconds to wait for a node, and for the nodes' answers


def check_honoured(grid: Grid, key: str, server_round: int) -> None:
    """Ask the connected nodes whether their clients honour a config key; RunFailed lists those that do not confirm it.

    The rounds before the first message with the key would be lost if a client ignored it.
    """
    nodes = wait_for_nodes(grid, 1, _TIMEOUT, "start SuperNodes")
    content = RecordDict({"config": ConfigRecord({protocol.ROUND: server_round})})
    queries = [Message(content, node, protocol.KEYS_QUERY) for node in nodes]
    problems = []
    for reply in grid.send_and_receive(queries, timeout=_TIMEOUT):
        who = f"node {reply.metadata.src_node_id}"
        # A node that is offline, or answers nothing since it cannot make its client, is left to the rounds.
        if reply.has_error() and reply.error.code == ErrorCode.CLIENT_APP_RAISED_EXCEPTION:
            problems.append(f"{who}: {one_line(str(reply.error.reason))}")
        elif reply.has_content() and not all(key in honoured for honoured in metrics_in(reply.content).values()):
            problems.append(f"{who}: its client does not honour it")
    if problems:
        listed = "".join(f"\n  - {problem}" for problem in sorted(problems))
        raise RunFailed(
            f"the run cannot begin: its later rounds need clients that honour the config key {key!r}, and these do not "
            f"confirm it. Serve them by fedbn_flwr.client_app with a BNClient, or answer {protocol.KEYS_QUERY!r} "
            f"as docs/plugin.md shows:{listed}"
        )
