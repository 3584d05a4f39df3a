"""The runs in folders, and their states for `fedbn status`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

from fedbn_flwr.errors import UserError, few, log_once
from fedbn_flwr.results.text import duration, printable
from fedbn_flwr.storage import check_rights

from ..folder.places import find_folders
from ..folder.reader import RunReader
from ..result import Result


def find_runs(folders: Sequence[Path], allowed: Collection[str] = ()) -> list[Result]:
    """The runs in the folders and their subfolders, in the order of the folders, and in them of the experiment file."""
    found = find_folders(folders)
    read = [(number, run) for path, number in found.items() if (run := _read(path, allowed)) is not None]
    for folder in folders:
        if not any(run.folder.is_relative_to(folder) for _, run in read):
            check_rights(folder, *folder.glob("*"))
            raise UserError(f"{str(folder)!r} holds no run (there is no summary.json in it or its subfolders)")
    runs = [run for _, run in sorted(read, key=lambda numbered: (numbered[0], *numbered[1].place))]
    # A copied folder is not another repetition. The copy that was continued counts, or the first of equal ones.
    states = [(run.summary.rounds, run.summary.status == "finished", -place) for place, run in enumerate(runs)]
    longest = {run.origin: run for _, run in sorted(zip(states, runs, strict=True))}
    for copy in (run for run in runs if longest[run.origin] is not run):
        log_once(f"{copy.folder} is a copy of {longest[copy.origin].folder}, and is not counted")
    return [run for run in runs if longest[run.origin] is run]


def _read(folder: Path, allowed: Collection[str] = ()) -> Result | None:
    """None if there is no summary, for instance because the folder was deleted meanwhile."""
    found = RunReader(folder).progress()
    return found and Result(folder, *found, allowed)


# --- the state of runs, for `fedbn status` ---

# A running run whose process has not written for long is silent: it waits for a site, or its round takes very long.
State = Literal["running", "silent", "finished", "interrupted", "failed"]
STATES: tuple[State, ...] = get_args(State)

_SILENT = 120.0  # seconds without a new round, at least
_ROUNDS = 5  # of the longest round's time
_RECENT = 10  # rounds, for the estimate of the time left


@dataclass(frozen=True)
class RunState:
    run: Result
    status: State
    rounds: int  # of the whole run
    changed: float  # when the run last wrote a line or its status, in seconds since 1970
    seconds_left: float | None  # estimated, of a running run whose round is not late
    silence: str = ""  # of a silent run, in words


def read_state(path: Path) -> RunState | None:
    """None if the folder has no summary and settings that this project has written."""
    now = time.time()
    try:
        if (run := _read(path)) is None:
            return None
        files = (file for name in ("summary.json", "history.jsonl") if (file := path / name).exists())
        changed, rounds = max(file.stat().st_mtime for file in files), int(run.config["rounds"])
        seconds = [float(line["seconds"]) for line in run.lines]
        timeout = float(run.config.get("engine", {}).get("timeout", 3600))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    status, left, silence, since = cast(State, run.summary.status), None, "", now - changed
    if status == "running" and since > (max(_SILENT, _ROUNDS * max(seconds)) if seconds else timeout):
        status, usual = "silent", f", and its longest round took {duration(max(seconds))}" if seconds else ""
        silence = f"nothing written for {duration(since)}{usual}: it waits for a site, or hangs"
    elif status == "running" and seconds:
        estimate = statistics.fmean(seconds[-_RECENT:]) * (rounds - run.summary.rounds) - since
        left = estimate if estimate > 0 else None
    return RunState(run, status, rounds, changed, left, silence)


def stopped_runs(out: Path) -> str:
    """The runs below `out` that may continue, and their rounds, in words; empty if there are none.

    Those that diverged would diverge again.
    """
    states = filter(None, map(read_state, find_folders([out]) if out.is_dir() else ()))
    words = [
        f"{printable(state.run.folder.name)} stopped after round {state.run.summary.rounds} of {state.rounds}"
        for state in states
        if state.status != "finished" and state.run.summary.diverged_in is None
    ]
    return few(words, 5)
