"""The state of a run between rounds, and the base class of its listeners."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flwr.app import ArrayRecord

from fedbn_flwr.engines.base import GridAround

from ..prepare import Prepared
from ..settings import Settings


@dataclass
class RunState:
    """The state of a run after a round."""

    prepared: Prepared
    grid: GridAround
    identity: Mapping[str, str]  # the config keys that name the run to its clients
    arrays: ArrayRecord  # that training continues from
    round: int = 0  # the last finished one
    trained: dict[int, int] = field(default_factory=dict)  # client -> the last round in which it trained
    kept_round: int = 0  # the round of the last checkpoint
    line: dict[str, Any] = field(default_factory=dict)  # the round's line in the history; listeners add to it
    stop: bool = False  # the user asked to stop after this round
    error: BaseException | None = None  # that ended the run before its last round

    def __post_init__(self) -> None:
        self.model = self.arrays  # the model for use outside the federation

    @property
    def run(self) -> Settings:
        return self.prepared.run


class Listener:
    """Hooks that are called during a run; by default they do nothing."""

    def on_start(self, state: RunState) -> None:
        """Before the first round, or the first one after resuming."""

    def on_round(self, state: RunState) -> None:
        """After a round, in the order of the listeners."""

    def on_end(self, state: RunState) -> None:
        """After the last round, or after `state.error`."""
