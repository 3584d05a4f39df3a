"""`fedbn status`: the state of runs, from their folders."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from fedbn_flwr.results.text import duration, printable, shorten, size_text
from fedbn_flwr.tasks import title_of

from .common import Commands, add_command, check_seconds, default_folder

if TYPE_CHECKING:
    from fedbn_flwr.results.read.state import RunState


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "status",
        status,
        summary="the state of runs: round, accuracy, time left, size",
        description=(
            "Show the state of runs from their folders, the last changed first: running, silent (its process has not "
            "written for ten minutes and five times its longest round), finished, interrupted or failed."
        ),
        epilog="Example: fedbn status runs --watch",
    )
    parser.add_argument(
        "folders", nargs="*", type=Path, metavar="DIR", help="run folders, or their parent folders ($FEDBN_OUT or runs)"
    )
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.add_argument("--watch", action="store_true", help="show it again every few seconds while a run is running")
    parser.add_argument("--every", type=float, default=5, metavar="S", help="seconds between two views of --watch (5)")


def status(arguments: argparse.Namespace) -> int:
    from fedbn_flwr.results.folder import find_folders
    from fedbn_flwr.results.read.state import read_state

    check_seconds("--every", arguments.every)
    folders = arguments.folders or [default_folder()]
    try:
        while True:
            states = {path: read_state(path) for path in find_folders(folders)}
            if damaged := [printable(str(path)) for path, state in states.items() if state is None]:
                named = ", ".join(damaged[:5]) + (f" and {len(damaged) - 5} more" if len(damaged) > 5 else "")
                print(f"not shown, because the files are damaged or not of a run: {named}", file=sys.stderr)
            runs = [state for state in states.values() if state is not None]
            runs.sort(key=lambda run: -run.changed)
            if arguments.json:
                print(json.dumps([_as_json(run) for run in runs], indent=2), flush=True)
            else:
                print(_table(runs) if runs else f"no runs in {', '.join(map(str, folders))}", flush=True)
            if not arguments.watch or not any(run.status == "running" for run in runs):
                return 0
            time.sleep(arguments.every)
            if os.isatty(1) and not arguments.json:
                print("\033[H\033[2J", end="")
    except KeyboardInterrupt:  # the usual end of --watch
        return 0


def _as_json(run: RunState) -> dict[str, object]:
    """Its main figure is called by its name. Of a run that diverged, JSON has no number: null."""
    found = {run.measure if key == "value" else key: value for key, value in dataclasses.asdict(run).items()}
    del found["measure"]
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in found.items()
    }


def _table(runs: list[RunState]) -> str:
    from fedbn_flwr.results.report.tables import as_text

    now = time.time()
    mains = {run.measure for run in runs}
    rows = [("run", "status", "round", title_of(*mains) if len(mains) == 1 else "figure", "changed", "left", "size")]
    for run in runs:
        named = f"{title_of(run.measure)} " if len(mains) > 1 else ""
        figure = "" if run.value is None else f"{named}{run.value:.4f}"
        left = "" if run.seconds_left is None else duration(run.seconds_left)
        rounds, ago = f"{run.round}/{run.rounds}", f"{duration(max(1.0, now - run.changed))} ago"
        rows.append((run.folder, run.status, rounds, figure, ago, left, size_text(run.size or 0)))
    head, rule, *lines = as_text(rows).splitlines()
    errors = (f"\n  {shorten(printable(run.error), 110)}" if run.error else "" for run in runs)
    return "\n".join([head, rule, *map("".join, zip(lines, errors, strict=True))])
