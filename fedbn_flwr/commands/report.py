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
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--html", action="store_true", help="write only the page; --out may be a file ending in .html")
    only.add_argument("--csv", action="store_true", help="write only the table, as CSV, to --out or the screen")
    only.add_argument("--latex", action="store_true", help="write only the table, as LaTeX, to --out or the screen")
    only.add_argument("--plot", type=Path, metavar="FILE", help="write only the plot, for instance to plot.pdf")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for the report (runs/report-TIME)")
    table = parser.add_argument_group("table")
    table.add_argument("--columns", default="", metavar="KEY,KEY", help="figures of summary.json to show")
    table.add_argument(
        "--baseline", default="", metavar="ROW", help="compare the first column with this row: paired t test over seeds"
    )
    plot = parser.add_argument_group("plot")
    plot.add_argument("--measure", metavar="KEY", help="what to plot, a key of history.jsonl (accuracy)")
    plot.add_argument("--axis", metavar="KEY", help="one panel: round, communication_rounds, mib or seconds")
    plot.add_argument("--size", type=float, nargs=2, metavar="INCHES", help="width and height")
    plot.add_argument("--no-band", action="store_false", default=None, dest="band", help="no deviation over seeds")


def report(arguments: argparse.Namespace) -> None:
    from fedbn_flwr.results.folder import default_out
    from fedbn_flwr.results.report.tables import Form
    from fedbn_flwr.results.report.write import write_html, write_plot, write_report, write_table

    form = Form(tuple(filter(None, arguments.columns.split(","))), arguments.baseline)
    look = {key: getattr(arguments, key) for key in ("measure", "axis", "size", "band")}
    if arguments.csv or arguments.latex:
        print(write_table(arguments.folders, arguments.out, form, latex=arguments.latex), end="")
        return
    if arguments.plot:
        write_plot(arguments.folders, arguments.plot, **look)
        print(f"plot:  {arguments.plot}")
        return
    out = arguments.out or default_out("report")
    if arguments.html:
        file = out if out.suffix == ".html" else out / "report.html"
        print(f"{write_html(arguments.folders, file, form)}\n\npage:  {file}")
        return
    text, markdown, picture = write_report(arguments.folders, out, form, **look)
    plot = f"plot:  {picture}\n" if picture else ""
    print(f"{text}\n\ntable: {markdown}\n{plot}page:  {out / 'report.html'}")
