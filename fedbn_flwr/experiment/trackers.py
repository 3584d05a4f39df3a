"""The trackers that `track` names: TensorBoard, or a session of the user's.

Addresses and keys of servers come from the tracker's own
environment variables and login; an experiment file has no secrets, because nodes receive its content.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fedbn_flwr import named

Status = Literal["finished", "interrupted", "failed"]


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker has to know about a run."""

    folder: Path
    experiment: str
    name: str  # of the run
    settings: Mapping[str, Any]  # flat: numbers, booleans and text
    done: int  # rounds of earlier sessions
    id: str | None  # of the tracked run that an earlier session began
    measure: str = "accuracy"  # that runs of its task are compared by


class Session(ABC):
    """An open tracked run. It and its methods may wait for a network and may raise anything."""

    address: str | None = None  # to look at it
    id: str | None = None  # by which a later session continues the tracked run

    @abstractmethod
    def log(self, round: int, figures: Mapping[str, float]) -> None:
        """Record figures of a round."""

    @abstractmethod
    def end(self, status: Status, summary: Mapping[str, Any]) -> None:
        """Record the summary and the status, and close the tracked run."""


# The trackers of this package, by their names in `track`.
OWN = {"tensorboard": "fedbn_flwr.experiment.tensorboard:TensorBoard"}


def check(name: str) -> None:
    """Raise a UserError if a tracker cannot be used here."""
    named.load("track", OWN.get(name, name))


def begin(name: str, options: Mapping[str, Any], run: TrackedRun) -> Session:
    """Begin a tracked run, or continue `run.id`."""
    session: Session = named.call("track", OWN.get(name, name), run, **options)
    return session
