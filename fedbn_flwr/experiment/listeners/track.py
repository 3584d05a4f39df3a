"""Records a run in a tracker (`track`): settings, metrics of every round, summary and status.

A tracker is a function of a `TrackedRun` and of its own settings that returns a session, an object with
`log(round, metrics)` and `end(status, summary)`. Addresses and keys of servers come from the tracker's own environment
variables and login: an experiment file has no secrets, because nodes receive its content.

Trackers wait for networks and fail. So each has a thread, to which the run passes metrics without waiting; an error
ends the tracking with one warning, never the run; and at its end the run waits a limited time for the last metrics.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedbn_flwr import named
from fedbn_flwr.errors import LOG
from fedbn_flwr.results.folder.writer import RunFolder
from fedbn_flwr.trees import Tree, flat_settings

from ..settings import name_in, options_in, tracker_of
from .listener import FinishedRound, Listener, Running
from .recording import History, Saving

LAST_METRICS = 30  # seconds that a run waits for its tracker at the end


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker learns about a run."""

    folder: Path
    experiment: str
    name: str  # of the run
    settings: Mapping[str, bool | int | float | str]  # flat
    done: int  # rounds of earlier sessions
    measure: str = "accuracy"  # the metric by which runs of this task are compared


class Track(Listener):
    after = (History, Saving)  # the line and the summary of a round

    def __init__(self, part: str | Tree, folder: RunFolder) -> None:
        self.part, self.folder = part, folder
        self._calls: queue.SimpleQueue[Callable[[Any], None] | None] = queue.SimpleQueue()

    def on_start(self, running: Running, finished: FinishedRound) -> None:
        prepared, settings = running.prepared, running.run.model_dump(mode="json", exclude={"name", "track"})
        flat = {key: value for key, value in flat_settings(settings).items() if value is not None}
        run = TrackedRun(
            folder=self.folder.path,
            experiment=running.run.name,
            name=prepared.name,
            settings={k: v if isinstance(v, bool | int | float | str) else str(v) for k, v in flat.items()},
            done=finished.number,
            measure=prepared.task.main,
        )
        running.grid.start()  # a process must not be forked while the thread imports modules
        self._thread = threading.Thread(target=self._work, args=(run,), daemon=True, name="track")
        self._thread.start()

    def on_round(self, running: Running, finished: FinishedRound) -> FinishedRound:
        metrics = {
            key: float(value)
            for key, value in finished.line.items()
            if isinstance(value, int | float) and not isinstance(value, bool) and key != "round"
        }
        self._calls.put(lambda session: session.log(finished.number, metrics))
        return finished

    def on_end(self, running: Running, error: BaseException | None) -> None:
        summary = self.folder.summary()
        assert summary is not None, "History has written it"
        status, content = summary.status, summary.to_json()
        if status != "running":
            self._calls.put(lambda session: session.end(status, content))
        self._calls.put(None)
        self._thread.join(LAST_METRICS)
        if self._thread.is_alive():
            self._warn(f"it did not take the last metrics within {LAST_METRICS} s")

    def _work(self, run: TrackedRun) -> None:
        """The thread: pass calls to the tracker until the run or the tracker ends."""
        try:
            session = named.call("track", tracker_of(self.part), run, **options_in(self.part))
            while (call := self._calls.get()) is not None:
                call(session)
        except Exception as error:
            self._warn(named.in_a_line(error))

    def _warn(self, reason: str) -> None:
        text = "%s: tracking by %s ended: %s; the run folder has all metrics"
        LOG.warning(text, self.folder.path.name, name_in(self.part), reason)
