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
            "Report on runs: tables (report.md), a plot (report.png, report.svg), their figures (report.json), and one "
            "page with all of this and more charts (report.html), which needs no network."
        ),
        epilog="Example: fedbn report --html runs/demo-* --out demo.html",
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="run folders, or their parent folders")
    parser.add_argument("--html", action="store_true", help="write only the page; --out may be a file ending in .html")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for the report (runs/report-TIME)")


def report(arguments: argparse.Namespace) -> None:
    from fedbn_flwr.results.folder import default_out
    from fedbn_flwr.results.write import write_html, write_report

    out = arguments.out or default_out("report")
    if arguments.html:
        file = out if out.suffix == ".html" else out / "report.html"
        print(f"{write_html(arguments.folders, file)}\n\npage:  {file}")
        return
    table, markdown, picture = write_report(arguments.folders, out)
    plot = f"plot:  {picture}\n" if picture else ""
    print(f"{table}\n\ntable: {markdown}\n{plot}page:  {out / 'report.html'}")
