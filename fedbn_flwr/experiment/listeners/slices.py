"""Work in slices (`--minutes`): a command's runs share its time, and each ends before the round that would exceed it.

How long a round takes is judged by the longest of the run's last ones, of earlier slices too.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from time import monotonic  # since the machine started, so the same in all of its processes

from fedbn_flwr.errors import FedbnError, OutOfTime, SettingsError
from fedbn_flwr.results.folder import RunFolder

from ..settings import Settings
from .listener import FinishedRound, Listener, Running
from .recording import checkpoint_every

_LAST = 10  # rounds that are looked at, and as many as it takes to see one with an evaluation and one with a checkpoint


def end_of(minutes: float | None, began: float) -> float:
    """When a slice ends that began at this time; never if its minutes are None."""
    if minutes is None:
        return math.inf
    if not (isinstance(minutes, int | float) and minutes > 0):
        raise SettingsError(f"minutes is {minutes!r}; expected a number above 0")
    return began + 60.0 * minutes


@dataclass
class Slice:
    """The time of a command, which its unfinished runs share; runs are named by their places in the experiment."""

    ends: float
    longest: Callable[[int], float]  # the seconds of a run's longest round; 0 if they are not known
    unfinished: list[int] = field(default_factory=list)  # runs for which there was not enough time
    _latest: int | None = None  # the run that began last

    def share(self, runs: int, jobs: int = 1) -> float:
        """When a run must end that begins now, if this many have yet to begin, `jobs` at the same time."""
        now = monotonic()
        return now + (self.ends - now) * min(jobs, runs) / runs

    def may_begin(self, place: int) -> bool:
        """Whether a round of this run ends in time. The first run begins in any case, so that each slice advances."""
        if self._latest is not None:
            seconds = self.longest(place) or self.longest(self._latest)  # of a new run, those of the one before it
            if monotonic() + seconds > self.ends:
                self.unfinished.append(place)
                return False
        self._latest = place
        return True


class InTime(Listener):
    """Stops a run before the round that would exceed its time, after at least one round."""

    def __init__(self, ends: float) -> None:
        self.ends = ends

    def on_start(self, running: Running, finished: FinishedRound) -> None:
        self.seconds = last_rounds(running.run, running.folder)

    def on_round(self, running: Running, finished: FinishedRound) -> FinishedRound:
        self.seconds.append(finished.line["seconds"])
        is_late = monotonic() + max(self.seconds) > self.ends
        return replace(finished, stop=finished.stop or (OutOfTime() if is_late else None))


def last_rounds(run: Settings, folder: RunFolder) -> deque[float]:
    """The seconds of the last rounds, each with its evaluation and the checkpoint of the round before it."""
    most = max(_LAST, run.evaluate.every, checkpoint_every(run)) + 1
    return deque((line["seconds"] for line in folder.history()), maxlen=most)


def longest_round(run: Settings, folder: RunFolder) -> float:
    with suppress(FedbnError):  # a damaged file is an error when the run begins
        return max(last_rounds(run, folder), default=0.0)
    return 0.0
