"""Read a run, finished or not, from its folder, and the state of runs for `fedbn status`."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, cast, get_args

from fedbn_flwr.errors import UserError, few, log_once
from fedbn_flwr.text import duration, printable
from fedbn_flwr.trees import Draft, Json, flat_settings

from ..folder.clients import last_values
from ..folder.places import find_folders
from ..folder.reader import RunReader, deciding
from ..folder.summary import Summary


@dataclass(frozen=True, eq=False)
class Run:
    """One run, as it was when it was read."""

    folder: Path
    summary: Summary  # the content of summary.json, for instance `summary.accuracy`; `summary.to_json()` is a dict
    lines: list[Json]  # of history.jsonl
    allowed: Collection[str] = ()  # the names `module:callable` that its model may call

    @property
    def label(self) -> str:
        """The run's name in tables and plots."""
        return self.summary.label

    @cached_property
    def config(self) -> Json:
        """All settings; `run(result.config, rounds=20)` repeats the run with a change."""
        return self.files.config()

    @property
    def files(self) -> RunReader:
        return RunReader(self.folder)

    @cached_property
    def origin(self) -> tuple[str, str]:
        """The same for all copies of a run's folder, but not for a run that continues another under a new label."""
        return str((self.files.read("environment.json") or {}).get("token", self.folder)), self.label

    @cached_property
    def values(self) -> Json:
        return self.summary.to_json()

    @cached_property
    def clients(self) -> dict[str, dict[str, float]]:
        """The values by metric and client, of the last evaluated round."""
        return last_values(self.files.lines("clients.jsonl"))

    @property
    def cell(self) -> Json:
        """The run's place in its experiment: its row, its condition (`sweep`), and the values to try (`tune`)."""
        return self.config.get("cell") or {}

    @property
    def place(self) -> tuple[str, list[int], int, str, str]:
        """The key by which runs are sorted: their experiment, and their place in its file."""
        found = self.cell.get("place")
        place = found if isinstance(found, list) and all(type(number) is int for number in found) else []
        return str(self.folder.parent), place, self.summary.seed, self.summary.began, str(self.folder)

    @cached_property
    def settings(self) -> Draft:
        """The settings that affect results, without the seed and names, by dotted key."""
        config = deciding(self.config)
        return flat_settings({key: value for key, value in config.items() if key not in ("name", "label", "seed")})

    @property
    def data(self) -> str:
        """What the run trained on, in words: the data set, or the sites' own data."""
        name, sites = str(self.settings.get("data.name")), self.summary.own_data_sites or 0
        own = f"own data of {sites} site{'s' if sites > 1 else ''}"
        return name if not sites else own if sites == self.config.get("clients") else f"{name} and {own}"

    @property
    def data_checksum(self) -> str | None:
        """The checksum of the examples, if the server had them."""
        return (self.files.read("environment.json") or {}).get("data_checksum")

    @property
    def fixed_settings(self) -> Json:
        """The settings without those that its experiment varies by `sweep` and `tune`."""
        lists = (found for kind in ("sweep", "tune") if isinstance(found := self.cell.get(kind), Mapping))
        # The value of a key can be a section, and the kind of a partition decides which other keys the section has.
        varied = tuple(f"{str(key).removesuffix('.kind')}." for found in lists for key in found)
        return {key: value for key, value in self.settings.items() if not f"{key}.".startswith(varied)}


def read_run(folder: Path) -> Run | None:
    """None if there is no summary, for instance because the folder was deleted meanwhile."""
    found = RunReader(folder).progress()
    return found and Run(folder, *found)


def is_number(value: object) -> bool:
    """Whether a value can be drawn: metrics of a run that diverged are not finite."""
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]


def find_runs(folders: Sequence[Path]) -> list[Run]:
    """The runs in the folders and their subfolders, in the order of the folders, and in them of the experiment file."""
    found = find_folders(folders)
    read = [(number, run) for path, number in found.items() if (run := read_run(path)) is not None]
    for folder in folders:
        if not any(run.folder.is_relative_to(folder) for _, run in read):
            raise UserError(f"{str(folder)!r} holds no run (there is no summary.json in it or its subfolders)")
    runs = [run for _, run in sorted(read, key=lambda numbered: (numbered[0], *numbered[1].place))]
    # A copied folder is not another repetition. The copy that was continued counts, or the first of equal ones.
    states = [(run.summary.rounds, run.summary.status == "finished", -place) for place, run in enumerate(runs)]
    longest = {run.origin: run for _, run in sorted(zip(states, runs, strict=True))}
    for copy in (run for run in runs if longest[run.origin] is not run):
        log_once(f"{copy.folder} is a copy of {longest[copy.origin].folder}, and is not counted")
    return [run for run in runs if longest[run.origin] is run]


# --- the state of runs, for `fedbn status` ---

# A running run whose process has not written for long is silent: it waits for a site, or its round takes very long.
State = Literal["running", "silent", "finished", "interrupted", "failed"]
STATES: tuple[State, ...] = get_args(State)

_SILENT = 120.0  # seconds without a new round, at least
_ROUNDS = 5  # of the longest round's time
_RECENT = 10  # rounds, for the estimate of the time left


@dataclass(frozen=True)
class RunState:
    run: Run
    status: State
    rounds: int  # of the whole run
    changed: float  # when the run last wrote a line or its status, in seconds since 1970
    seconds_left: float | None  # estimated, of a running run whose round is not late
    silence: str = ""  # of a silent run, in words


def read_state(path: Path) -> RunState | None:
    """None if the folder has no summary and settings that this project has written."""
    now = time.time()
    try:
        if (run := read_run(path)) is None:
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
