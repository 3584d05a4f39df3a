"""`fedbn status`: the state of runs, from their folders."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from fedbn_flwr.errors import few
from fedbn_flwr.results.text import duration, printable, shorten
from fedbn_flwr.storage import to_json
from fedbn_flwr.tasks import title_of

from .common import Commands, add_command

if TYPE_CHECKING:
    from fedbn_flwr.results.read.runs import RunState


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "status",
        status,
        summary="the state of runs: round, accuracy, time left",
        description=(
            "Show the state of runs from their folders, the last changed first: running, silent (its process has not "
            "written for two minutes, nor for five times its longest round), finished, interrupted or failed."
        ),
        epilog="Example: fedbn status runs, or again and again: watch -n 5 fedbn status runs",
    )
    parser.add_argument(
        "folders", nargs="*", type=Path, metavar="DIR", help="run folders, or their parent folders ($FEDBN_OUT or runs)"
    )
    parser.add_argument("--json", action="store_true", help="as JSON")


def status(arguments: argparse.Namespace) -> None:
    from fedbn_flwr.results.folder.places import default_folder, find_folders
    from fedbn_flwr.results.read.runs import read_state

    folders = arguments.folders or [default_folder()]
    states = {path: read_state(path) for path in find_folders(folders)}
    if damaged := [printable(str(path)) for path, state in states.items() if state is None]:
        print(f"not shown, because the files are damaged or not of a run: {few(damaged, 5)}", file=sys.stderr)
    found = sorted((state for state in states.values() if state is not None), key=lambda state: -state.changed)
    if arguments.json:
        print(to_json([_as_json(state) for state in found], indent=2))
    else:
        print(_table(found) if found else f"no runs in {', '.join(map(str, folders))}")


def _as_json(state: RunState) -> dict[str, object]:
    """The main metric has its own name as key."""
    run, summary = state.run, state.run.summary
    last: Mapping[str, object] = run.lines[-1] if run.lines else {}
    return {
        "folder": str(run.folder),
        "name": summary.name,  # of the experiment
        "label": summary.label,
        "strategy": summary.strategy,
        "seed": summary.seed,
        "status": state.status,
        "round": summary.rounds,
        "rounds": state.rounds,
        summary.of_task.main: summary.main,
        "loss": summary.loss,
        "clients": last.get("clients"),  # that trained in the last round
        "clients_expected": run.config.get("clients"),
        "round_seconds": last.get("seconds"),
        "seconds_left": state.seconds_left,
        "changed": state.changed,
        "silence": state.silence or None,
        "traffic": dataclasses.asdict(summary.traffic),
        "error": summary.error,
    }


def _table(states: list[RunState]) -> str:
    from fedbn_flwr.results.report.tables import as_text

    now = time.time()
    mains = {state.run.summary.of_task.main for state in states}
    rows = [("run", "status", "round", title_of(*mains) if len(mains) == 1 else "metric", "changed", "left")]
    for state in states:
        run, summary = state.run, state.run.summary
        named = f"{title_of(summary.of_task.main)} " if len(mains) > 1 else ""
        metric = "" if summary.main is None else f"{named}{summary.main:.4f}"
        left = "" if state.seconds_left is None else duration(state.seconds_left)
        rounds, ago = f"{summary.rounds}/{state.rounds}", f"{duration(max(1.0, now - state.changed))} ago"
        rows.append((str(run.folder), state.status, rounds, metric, ago, left))
    head, rule, *lines = as_text(rows).splitlines()
    about = [(state.silence, state.run.summary) for state in states]
    remarks = [silence or summary.error or summary.stopped or summary.missing for silence, summary in about]
    below = (f"\n  {shorten(printable(remark), 110)}" if remark else "" for remark in remarks)
    return "\n".join([head, rule, *map("".join, zip(lines, below, strict=True))])
