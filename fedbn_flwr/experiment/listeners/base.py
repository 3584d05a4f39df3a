"""A run between its rounds, and what listens to it."""

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
    """A run after a round."""

    prepared: Prepared
    grid: GridAround
    identity: Mapping[str, str]  # the config keys that name the run to its clients
    arrays: ArrayRecord  # what training continues from
    round: int = 0  # the last one that is done
    trained: dict[int, int] = field(default_factory=dict)  # client -> the last round that it trained in
    kept_round: int = 0  # the round that the run would be resumed from
    line: dict[str, Any] = field(default_factory=dict)  # of the history; the listeners complete it
    stop: bool = False  # the user asked to stop after this round
    error: BaseException | None = None  # what ended the run before its last round

    def __post_init__(self) -> None:
        self.model = self.arrays  # the model for use outside the federation

    @property
    def run(self) -> Settings:
        return self.prepared.run


class Listener:
    """Is called during a run; a hook that is not overridden does nothing."""

    def on_start(self, state: RunState) -> None:
        """Before the first round of this session."""

    def on_round(self, state: RunState) -> None:
        """After a round, in the order of the listeners."""

    def on_end(self, state: RunState) -> None:
        """After the last round, or after `state.error`."""
