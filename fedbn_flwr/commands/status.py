"""`fedbn status`: the state of runs, from their folders."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from fedbn_flwr.results.text import duration, printable, shorten, size_text
from fedbn_flwr.tasks import title_of

from .common import Commands, add_command, default_folder

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
        epilog="Example: fedbn status runs, or again and again: watch -n 5 fedbn status runs",
    )
    parser.add_argument(
        "folders", nargs="*", type=Path, metavar="DIR", help="run folders, or their parent folders ($FEDBN_OUT or runs)"
    )
    parser.add_argument("--json", action="store_true", help="as JSON")


def status(arguments: argparse.Namespace) -> None:
    from fedbn_flwr.results.folder import find_folders
    from fedbn_flwr.results.read.state import read_state

    folders = arguments.folders or [default_folder()]
    states = {path: read_state(path) for path in find_folders(folders)}
    if damaged := [printable(str(path)) for path, state in states.items() if state is None]:
        named = ", ".join(damaged[:5]) + (f" and {len(damaged) - 5} more" if len(damaged) > 5 else "")
        print(f"not shown, because the files are damaged or not of a run: {named}", file=sys.stderr)
    runs = sorted((state for state in states.values() if state is not None), key=lambda run: -run.changed)
    if arguments.json:
        print(json.dumps([_as_json(run) for run in runs], indent=2))
    else:
        print(_table(runs) if runs else f"no runs in {', '.join(map(str, folders))}")


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
