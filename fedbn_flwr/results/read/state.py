"""The state of runs, from their folders only: for `fedbn status`."""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..folder import RunFolder, find_folders
from ..folder.ledger import Traffic
from ..text import printable

# A running run whose process has not written for long is silent: it was killed, or its round takes very long.
State = Literal["running", "silent", "finished", "interrupted", "failed"]
STATES: tuple[State, ...] = ("running", "silent", "finished", "interrupted", "failed")

_SILENT = 600.0  # seconds without a new round, at least
_ROUNDS = 5  # of the longest round's time
_RECENT = 10  # rounds, for the estimate of the time left


@dataclass(frozen=True)
class RunState:
    folder: str
    name: str  # of the experiment
    label: str
    strategy: str
    seed: int
    status: State
    round: int
    rounds: int
    measure: str  # the main figure of the task
    value: float | None  # of it
    loss: float | None
    clients: int | None  # that trained in the last round
    clients_expected: int
    round_seconds: float | None  # of the last round
    seconds_left: float | None  # estimated, of a running run
    changed: float  # when the run last wrote a line or its status, in seconds since 1970
    traffic: Traffic
    error: str | None
    size: int | None  # bytes of the folder; None if they were not counted


def read_state(path: Path, now: float | None = None, *, size: bool = True) -> RunState | None:
    """None if the folder has no summary and settings that this project has written."""
    folder, now = RunFolder(path), time.time() if now is None else now
    try:
        summary, config, history = folder.summary(), folder.config(), folder.history()
        changed = max(
            file.stat().st_mtime for name in ("summary.json", "history.jsonl") if (file := path / name).exists()
        )
        rounds, clients = int(config["rounds"]), int(config["clients"])
        seconds = [float(line["seconds"]) for line in history]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if summary is None:
        return None
    status: State = summary.status
    if status == "running":
        engine = config.get("engine", {})
        bound = max(_SILENT, _ROUNDS * max(seconds)) if seconds else float(engine.get("timeout", 3600))
        status = "silent" if now - changed > bound else "running"
    left = None
    if status == "running" and seconds:
        left = max(0.0, statistics.fmean(seconds[-_RECENT:]) * (rounds - summary.rounds) - (now - changed))
    return RunState(
        folder=str(path),
        name=summary.name,
        label=summary.label,
        strategy=summary.strategy,
        seed=summary.seed,
        status=status,
        round=summary.rounds,
        rounds=rounds,
        measure=summary.of_task.main,
        value=summary.main,
        loss=summary.loss,
        clients=history[-1].get("clients") if history else None,
        clients_expected=clients,
        round_seconds=seconds[-1] if seconds else None,
        seconds_left=left,
        changed=changed,
        traffic=summary.traffic,
        error=summary.error,
        size=size_of(path) if size else None,
    )


def stopped_runs(out: Path) -> str:
    """The unfinished runs below `out` and their rounds, in words; empty if there are none."""
    states = [read_state(path, size=False) for path in (find_folders([out]) if out.is_dir() else ())]
    stopped = [state for state in states if state is not None and state.status != "finished"]
    words = [f"{printable(Path(run.folder).name)} stopped after round {run.round} of {run.rounds}" for run in stopped]
    return ", ".join(words[:5]) + (f" and {len(words) - 5} more" if len(words) > 5 else "")


def size_of(folder: Path) -> int:
    """Bytes of all files below a folder; links are not followed."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(parent, name)).st_size
            except FileNotFoundError:  # replaced meanwhile
                continue
    return total
