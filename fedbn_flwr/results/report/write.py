"""Writes the files of a report, for `fedbn run` and `fedbn report DIR...`.

The page has no program, and its content security policy forbids all requests. Its template escapes all text.
Its template ends in .md because Flower packs no .html files into an app bundle.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from fedbn_flwr import __version__
from fedbn_flwr.errors import MissingPackage
from fedbn_flwr.results.folder.places import from_here
from fedbn_flwr.results.text import in_markdown
from fedbn_flwr.results.yaml_text import dump_yaml
from fedbn_flwr.storage import to_json, writing
from fedbn_flwr.trees import Tree

from ..folder.files import write_text
from ..metric_key import OWN, MetricKey
from ..read.runs import find_runs
from ..result import Result
from .curves import spent
from .pictures import Pictures, clients_plot, first_of, pictures_of_page, plot, sweeps_plot
from .rows import Row, choose, group, runs_of, sweeps
from .tables import (
    DEFAULT,
    ReportForm,
    Table,
    as_csv,
    as_markdown,
    differing_settings,
    notes,
    set_up,
    tables,
    tables_as_text,
    template,
)

if TYPE_CHECKING:
    from .figure import Plot  # imports matplotlib

_CURVE = ("round", "communication_rounds", "bytes_down", "bytes_up")  # in report.json, along with the metrics


def write_report(
    folders: Sequence[Path], out: Path, form: ReportForm = DEFAULT, *, only_page: bool = False, whole: bool = True
) -> str:
    """Write a report on the runs in `folders` into the folder `out`, see `report_on`."""
    return report_on(group(find_runs(folders)), out, form, only_page=only_page, whole=whole)


def report_on(
    every: Sequence[Row], out: Path, form: ReportForm = DEFAULT, *, only_page: bool = False, whole: bool = True
) -> str:
    """Write a report on the rows of all runs into the folder `out`.

    report.md has the tables, report.csv the first one without rounding, report.json the
    settings, summary and curve of each run, and report.html everything in one page. Pictures are PNG and SVG: `report`
    the curves, `sweep` the values of sweeps, `clients` a box plot of clients. Without matplotlib there are none; the
    text names the extra. Returns the tables as text, and the paths of report.md, report.png and report.html.

    With `only_page` only the page is written; `out` may then be its file, ending in .html. If it isn't `whole`, it has
    the pictures of the files only: to draw each measure takes longer than a short run.
    """
    rows, found, notices = choose(every), tables(every, form), notes(every)
    shown, missing = _pictures(rows, form)
    file = out if only_page and out.suffix == ".html" else out / "report.html"
    paths = {"page": file}
    if not only_page:
        for name, picture in shown.items():
            for ending in ("png", "svg"):
                picture.write(out / f"{name}.{ending}")
        lines = [*found, differing_settings(rows)]
        parts = [(f"{name}:\n\n" if name else "") + as_markdown(cells) for name, cells in lines if cells]
        sentences = (f"{in_markdown(note)}\n" for note in (set_up(rows), *notices))
        images = (f"![{name}]({name}.png)\n" for name in shown)
        _write(out / "report.md", "\n".join([*sentences, *parts, *images]))
        _write(out / "report.csv", as_csv(rows, form))
        _write(out / "report.json", to_json([_content(run, row in rows) for row in every for run in row.runs]) + "\n")
        paths = {"table": out / "report.md", **({"plot": out / "report.png"} if shown else {}), **paths}
    pictures = pictures_of_page(rows, form) if shown and whole else [("Pictures", "", shown.values())]
    _write(file, page(rows, found, notices, pictures))
    written = "\n".join(f"{what + ':':6} {from_here(path)}" for what, path in paths.items())
    return "\n\n".join([*notices, tables_as_text(found) + missing, written])


def _write(file: Path, text: str) -> None:
    with writing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, text)


def _pictures(rows: Sequence[Row], form: ReportForm) -> tuple[dict[str, Plot], str]:
    """The pictures by the names of their files; or none, and why."""
    try:
        found = {
            "report": plot(rows, first_of(rows, form)),
            "sweep": sweeps_plot(rows, form) if sweeps(rows) else None,
            "clients": clients_plot(rows),
        }
    except MissingPackage as error:  # a server's image may lack it; the run's results do not depend on it
        return {}, f"\n\nno plots: {error}"
    return {name: picture for name, picture in found.items() if picture is not None}, ""


def _content(run: Result, chosen: bool) -> Tree:
    """A run's settings, summary and curve: the evaluated rounds, with the traffic up to each of them.

    Candidates of `tune` that are not in the other tables and plots have `"chosen": false`.
    """
    task, curve = run.summary.of_task, []
    own = str(MetricKey(task.main, OWN))
    for line, until in zip(run.lines, spent(run.lines), strict=True):
        if line.get(task.main) is not None:
            metrics = {key: line[key] for key in (*task.reported, "loss", own) if line.get(key) is not None}
            curve.append(metrics | {key: until[key] for key in _CURVE})
    found = {"settings": run.config, "summary": run.values, "curve": curve, "clients": run.clients}
    return found if chosen else found | {"chosen": False}


# --- the page ---


def page(rows: Sequence[Row], found: Sequence[Table], notices: Sequence[str], drawn: Pictures = ()) -> str:
    """The page on the chosen rows, with these tables and sentences."""
    numbers, runs, sections = count(), runs_of(rows), dict[str, list[object]]()
    for heading, name, pictures in drawn:
        if shown := [(_svg(*numbered), numbered[1]) for numbered in zip(numbers, pictures, strict=False)]:
            sections.setdefault(heading, []).append((name, shown))
    words = f"{len(runs)} {'run' if len(runs) == 1 else 'runs'}"
    words += f" in {len(rows)} rows" if len(rows) < len(runs) else ""
    made = f"Made by fedbn-flwr {__version__} on {datetime.now(UTC):%Y-%m-%d %H:%M} UTC."
    return template("page").render(
        title=", ".join(dict.fromkeys(run.summary.name for run in runs)),
        about=" ".join([set_up(rows), f"{words}. {made}", *notices]),
        tables=found,
        sections=sections,
        settings=differing_settings(rows),
        runs=[(run, _details(run)) for run in runs],
    )


def _svg(number: int, picture: Plot) -> str:
    """The content of an svg element, in which ids are unique in the page."""
    svg = re.sub(r'( id="|href="#|url\(#)', rf"\g<1>{number}-", picture.svg)
    return svg[svg.index("<svg") + 4 :]


def _details(run: Result) -> dict[str, str]:
    parts = {"Settings": run.config, "Results": run.values, "Environment": run.files.read("environment.json")}
    return {name: dump_yaml(found) for name, found in parts.items() if found}
