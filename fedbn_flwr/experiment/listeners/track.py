"""Records a run in a tracker (`track`): settings, figures of every round, summary and status.

Trackers wait for networks and fail. So each has a thread, to which the run passes figures without waiting; an error
ends the tracking with one warning, never the run; and at its end the run waits a limited time for the last figures.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from logging import WARNING
from typing import Any

from flwr.common import log

from fedbn_flwr.results.folder import RunFolder, flat_settings
from fedbn_flwr.results.text import file_name
from fedbn_flwr.storage import replacing

from ..settings import name_in, options_in
from ..trackers import Session, TrackedRun, begin
from .listener import Listener, Round, Running

LAST_FIGURES = 30  # seconds that a run waits for its tracker at the end


class Track(Listener):
    def __init__(self, part: str | Mapping[str, Any], folder: RunFolder) -> None:
        self.name, self.options, self.folder = name_in(part), options_in(part), folder
        self._id_file = folder.path / f"{file_name(self.name)}.id"
        self._calls: queue.SimpleQueue[Callable[[Session], None] | None] = queue.SimpleQueue()

    def on_start(self, running: Running, at: Round) -> None:
        run = TrackedRun(
            folder=self.folder.path,
            experiment=running.run.name,
            name=running.prepared.name,
            settings=_settings(running.run.model_dump(mode="json")),
            done=at.number,
            measure=running.prepared.task.main,
            id=self._id_file.read_text(encoding="utf-8").strip() if self._id_file.exists() else None,
        )
        running.grid.start()  # a process must not be forked while the thread imports modules
        self._thread = threading.Thread(target=self._work, args=(run,), daemon=True, name="track")
        self._thread.start()

    def on_round(self, running: Running, at: Round) -> Round:
        numbers = {key: value for key, value in at.line.items() if isinstance(value, int | float) and key != "round"}
        figures = {key: float(value) for key, value in numbers.items() if not isinstance(value, bool)}
        self._calls.put(lambda session: session.log(at.number, figures))
        return at

    def on_end(self, running: Running, error: BaseException | None) -> None:
        summary = self.folder.summary()
        assert summary is not None, "History has written it"
        status, figures = summary.status, summary.to_json()
        if status != "running":
            self._calls.put(lambda session: session.end(status, figures))
        self._calls.put(None)
        self._thread.join(LAST_FIGURES)
        if self._thread.is_alive():
            self._warn(f"it did not take the last figures within {LAST_FIGURES} s")

    def _work(self, run: TrackedRun) -> None:
        """The thread: pass calls to the tracker until the run or the tracker ends."""
        try:
            session = begin(self.name, self.options, run)
            if session.id is not None and session.id != run.id:
                with replacing(self._id_file, durable=False) as file:
                    file.write_text(f"{session.id}\n", encoding="utf-8")
            if session.address is not None:
                print(f"{run.name}: {session.address}", flush=True)
            while (call := self._calls.get()) is not None:
                call(session)
        except Exception as error:
            self._warn(" ".join(f"{type(error).__name__}: {error}".split()))

    def _warn(self, reason: str) -> None:
        text = "%s: tracking by %s ended: %s; the run folder has all figures"
        log(WARNING, text, self.folder.path.name, self.name, reason)


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings as numbers, booleans and text, by dotted key; those that are not given are left out."""
    flat = flat_settings({key: value for key, value in config.items() if key not in ("name", "track")})
    return {
        key: value if isinstance(value, bool | int | float | str) else str(value)
        for key, value in flat.items()
        if value is not None
    }
