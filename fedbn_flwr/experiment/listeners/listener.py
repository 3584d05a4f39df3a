"""The state of a run between rounds, and the base class of its listeners."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flwr.app import ArrayRecord, Message

from fedbn_flwr.engines.base import GridAround

from ..parts import Parts
from ..settings import Settings


@dataclass
class RunState:
    """The state of a run after a round."""

    prepared: Parts
    grid: GridAround
    # The config keys that name the run to its clients, and those of the moments on which the sites agreed.
    identity: Mapping[str, Any]
    arrays: ArrayRecord  # that training continues from
    round: int = 0  # the last finished one
    trained: dict[int, int] = field(default_factory=dict)  # client -> the last round in which it trained
    kept_round: int = 0  # the round of the last checkpoint
    line: dict[str, Any] = field(default_factory=dict)  # the round's line in the history; listeners add to it
    clients: dict[int, dict[str, float]] = field(default_factory=dict)  # the values of each client
    dynamics: dict[str, Any] | None = None  # the round's line in norms.jsonl, if it has one
    best: ArrayRecord | None = None  # the model of the best round, until it is in the run folder
    nodes: dict[int, int] = field(default_factory=dict)  # client -> node
    unseen: dict[int, int] = field(default_factory=dict)  # likewise, of the clients that never train
    ended: str | None = None  # the reason why training ends before the last round
    stop: bool = False  # the user asked to stop after this round
    error: BaseException | None = None  # that ended the run before its last round

    def __post_init__(self) -> None:
        self.model = self.arrays  # the model for use outside the federation

    @property
    def run(self) -> Settings:
        return self.prepared.run

    @property
    def is_evaluated(self) -> bool:
        """Whether the models of this round are evaluated."""
        return self.round % self.run.evaluate.every == 0 or self.round == self.run.rounds

    @property
    def is_last(self) -> bool:
        return self.round == self.run.rounds or self.ended is not None


class Listener:
    """Hooks that are called during a run; by default they do nothing."""

    def on_start(self, state: RunState) -> None:
        """Before the first round, or the first one after resuming."""

    def on_messages(self, state: RunState) -> None:
        """Before the messages of the round after `state.round` are sent."""

    def on_replies(self, state: RunState, replies: Sequence[Message]) -> None:
        """When these replies of a round have become `state.arrays`, before `on_round`; the replies are not kept."""

    def on_round(self, state: RunState) -> None:
        """After a round, in the order of the listeners."""

    def on_end(self, state: RunState) -> None:
        """After the last round, or after `state.error`."""
