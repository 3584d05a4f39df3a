"""`fedbn report`: a table and a plot from run folders."""

from __future__ import annotations

import argparse
from pathlib import Path

from .common import Commands, add_command


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "report",
        report,
        summary="a table and a plot from run folders",
        description="Make a table and a plot of runs (accuracy against rounds, communication rounds and bytes).",
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="run folders, or their parent folders")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for the report (runs/report-TIME)")


def report(arguments: argparse.Namespace) -> None:
    from fedbn_flwr.results.folder import default_out
    from fedbn_flwr.results.report import write_report

    table, page, picture = write_report(arguments.folders, arguments.out or default_out("report"))
    print(f"{table}\n\ntable: {page}\nplot:  {picture}")
