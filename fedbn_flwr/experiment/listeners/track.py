"""Records a run in a tracker (`track`): settings, figures of every round, summary and status.

Trackers wait for networks and fail. So each has a thread, to which the run passes figures without waiting; an error
ends the tracking with one warning, never the run; and at its end the run waits a limited time for the last figures.
"""

from __future__ import annotations

import queue
import statistics
import threading
from collections.abc import Callable, Mapping
from logging import WARNING
from typing import Any

from flwr.common import log

from fedbn_flwr.messages.arrays import unpack
from fedbn_flwr.results.folder import RunFolder, flat_settings
from fedbn_flwr.results.text import file_name
from fedbn_flwr.storage import replacing

from ..norm_layers import NormLayers
from ..trackers import Session, TrackedRun, begin
from .listener import Listener, Round, Running

LAST_FIGURES = 30  # seconds that a run waits for its tracker at the end


class Track(Listener):
    def __init__(self, entry: Mapping[str, Any], folder: RunFolder) -> None:
        self.entry, self.tracker = entry, str(entry["name"])
        self.folder = folder
        self._id_file = f"{file_name(self.tracker)}.id"
        self._warned = False
        self._calls: queue.SimpleQueue[Callable[[Session], None] | None] = queue.SimpleQueue()

    def on_start(self, running: Running, at: Round) -> Round:
        id_file = self.folder.path / self._id_file
        run = TrackedRun(
            folder=self.folder.path,
            experiment=running.run.name,
            name=running.prepared.name,
            settings=_settings(running.run.model_dump(mode="json")),
            done=at.number,
            measure=running.prepared.task.main,
            id=id_file.read_text(encoding="utf-8").strip() if id_file.exists() else None,
        )
        running.grid.start()  # a process must not be forked while the thread imports modules
        self._thread = threading.Thread(target=self._work, args=(run,), daemon=True, name=f"track-{self.tracker}")
        self._thread.start()
        return at

    def on_round(self, running: Running, at: Round) -> Round:
        figures = {key: float(value) for key, value in at.line.items() if _is_number(value) and key != "round"}
        if at.is_evaluated:
            arrays = unpack(at.model)
            figures |= _flat("norms", NormLayers(arrays).lengths(arrays))
        if at.dynamics is not None:
            figures |= _flat("dynamics", at.dynamics["layers"]) | _means_of_clients(at.dynamics)
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
            session = begin(self.entry, run)
            if session.id is not None and session.id != run.id:
                with replacing(run.folder / self._id_file, durable=False) as file:
                    file.write_text(f"{session.id}\n", encoding="utf-8")
            if session.address is not None:
                print(f"{run.name}: {session.address}", flush=True)
            while (call := self._calls.get()) is not None:
                call(session)
        except Exception as error:
            self._warn(" ".join(f"{type(error).__name__}: {error}".split()))

    def _warn(self, reason: str) -> None:
        if self._warned:
            return
        self._warned = True
        log(
            WARNING,
            "%s: tracking by %s ended: %s; the run folder has all figures",
            self.folder.path.name,
            self.tracker,
            reason,
        )


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings as numbers, booleans and text, by dotted key; those that are not given are left out."""
    flat = flat_settings({key: value for key, value in config.items() if key not in ("name", "track")})
    return {
        key: value if isinstance(value, bool | int | float | str) else str(value)
        for key, value in flat.items()
        if value is not None
    }


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _flat(prefix: str, layers: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    return {f"{prefix}/{layer}/{name}": value for layer, row in layers.items() for name, value in row.items()}


def _means_of_clients(line: Mapping[str, Any]) -> dict[str, float]:
    """The means over clients of a line of norms.jsonl."""
    columns: dict[str, list[float]] = {}
    for layers in line["clients"].values():
        for name, value in _flat("dynamics", layers).items():
            columns.setdefault(name, []).append(value)
    return {name: statistics.fmean(values) for name, values in columns.items()}
