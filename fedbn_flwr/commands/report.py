"""`fedbn report`: a table, a plot and a page from run folders."""

from __future__ import annotations

import argparse
from pathlib import Path

from .common import Commands, add_command


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "report",
        report,
        summary="a table, a plot and a page from run folders",
        description=(
            "Report on runs: tables (report.md, report.csv), a plot (report.png, report.svg), their values "
            "(report.json), and one page with all of this and more charts (report.html), which needs no network."
        ),
        epilog="Example: fedbn report --html runs/demo-* --out demo.html",
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="run folders, or their parent folders")
    parser.add_argument("--html", action="store_true", help="write only the page; --out may be a file ending in .html")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for the report (runs/report-TIME)")
    parser.add_argument(
        "--columns", default="", metavar="KEY,KEY", help="keys of summary.json to show; the first is plotted as curves"
    )
    parser.add_argument(
        "--baseline", default="", metavar="ROW", help="compare the first column with this row: paired t test over seeds"
    )


def report(arguments: argparse.Namespace) -> None:
    from fedbn_flwr.results.folder.places import default_out
    from fedbn_flwr.results.report.tables import ReportForm
    from fedbn_flwr.results.report.write import write_report

    form = ReportForm(tuple(filter(None, arguments.columns.split(","))), arguments.baseline)
    out = arguments.out or default_out("report")
    print(write_report(arguments.folders, out, form, only_page=arguments.html))
