"""Writes the files of a report, for `fedbn run` and `fedbn report DIR...`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from fedbn_flwr.errors import MissingPackage, StorageError, UserError
from fedbn_flwr.storage import to_json

from ..read.runs import Run, find_runs
from ..text import in_markdown
from . import paper, swept
from .choice import Choice, choose
from .page import write_page
from .pictures import Look, clients_plot, plot, save, sweeps_plot
from .published import TITLE, published
from .rows import Row, group
from .tables import DEFAULT, Form, Table, as_markdown, differing_settings, set_up, tables, tables_as_text

if TYPE_CHECKING:
    from .figure import Plot  # imports matplotlib


def write_report(
    folders: Sequence[Path], out: Path, form: Form = DEFAULT, **look: Unpack[Look]
) -> tuple[str, Path, Path | None]:
    """Write a report on the runs in `folders` into the folder `out`.

    report.md has the tables, report.json settings, summary and curve of each run, and report.html everything in one
    page. Pictures are PNG and SVG: `report` the curves, `sweep` the values of sweeps, `clients` a box plot of clients.
    Without matplotlib there are none; the text names the extra. Returns the tables as text, and the paths of report.md
    and report.png.
    """
    every = group(find_runs(folders))
    choice = choose(every)
    (shown, missing), found = _pictures(choice.rows, **look), _tables(choice, form, every=True)
    page, image = out / "report.md", out / "report.png"
    if different := differing_settings(choice.rows):
        found.append(("settings that differ", different))
    parts = [(f"{name}:\n\n" if name else "") + as_markdown(lines) for name, lines in found]
    images = [f"![{name}]({name}.png)\n" for name in shown]
    notes = (f"{in_markdown(note)}\n" for note in (set_up(choice.rows), *choice.notes))
    with _writing(page):
        for name, picture in shown.items():
            picture.write(out / f"{name}.png", out / f"{name}.svg")
        page.write_text("\n".join([*notes, *parts, *images]), encoding="utf-8")
        (out / "report.json").write_text(to_json(_figures(every, choice.rows)) + "\n", encoding="utf-8")
        write_page(choice.rows, out / "report.html", found[: len(found) - bool(different)], shown, choice.notes)
    return _as_text(choice, form) + missing, page, image if shown else None


def write_html(folders: Sequence[Path], file: Path, form: Form = DEFAULT) -> str:
    """Write only the page of a report; returns the tables as text."""
    choice = choose(group(find_runs(folders)))
    shown, _ = _pictures(choice.rows)
    with _writing(file):
        write_page(choice.rows, file, _tables(choice, form, every=True), shown, choice.notes)
    return _as_text(choice, form)


def write_table(folders: Sequence[Path], file: Path | None, form: Form, *, latex: bool) -> str:
    """The first table as CSV or LaTeX: returned, or written to a file, whose path is returned."""
    rows = choose(group(find_runs(folders))).rows
    text = paper.latex(rows, form) if latex else paper.as_csv(rows, form)
    if file is None:
        return text
    with _writing(file):
        file.write_text(text, encoding="utf-8")
    return f"table: {file}\n"


def write_plot(folders: Sequence[Path], file: Path, **look: Unpack[Look]) -> None:
    """Write only the plot, in the format that the file's name ends in."""
    save(plot(choose(group(find_runs(folders))).rows, **look), file)


@contextmanager
def _writing(file: Path) -> Iterator[None]:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        yield
    except StorageError as error:
        raise UserError(f"the report cannot be written: {error}") from None
    except OSError as error:
        raise UserError(f"{str(error.filename or file)!r} cannot be written: {error.strerror}") from None


def _pictures(rows: Sequence[Row], **look: Unpack[Look]) -> tuple[dict[str, Plot], str]:
    """The pictures by the names of their files; or none, and why."""
    try:
        found = {"report": plot(rows, **look)}
    except MissingPackage as error:  # a server's image may lack it; the run's results do not depend on it
        return {}, f"\n\nno plots: {error}"
    if of_sweeps := swept.sweeps(rows):
        found["sweep"] = sweeps_plot(of_sweeps)
    if (of_clients := clients_plot(rows)) is not None:
        found["clients"] = of_clients
    return found, ""


def _tables(choice: Choice, form: Form, *, every: bool) -> list[Table]:
    """The tables of rows, sweeps, candidates and published figures."""
    others = [choice.candidates, (TITLE, published(choice.rows))]
    found = tables(choice.rows, form, every=every)
    return [*found, *swept.tables(swept.sweeps(choice.rows)), *(each for each in others if each[1])]


def _as_text(choice: Choice, form: Form) -> str:
    return "\n\n".join([*choice.notes, tables_as_text(_tables(choice, form, every=False))])


def _figures(rows: Sequence[Row], chosen: Sequence[Row]) -> list[dict[str, Any]]:
    """Each run's settings, summary and curve: the evaluated rounds, with the traffic up to each of them.

    Candidates of `tune` that are not in the other tables and plots have `"chosen": false`.
    """
    found = []
    for row in rows:
        more = {} if any(row is each for each in chosen) else {"chosen": False}
        for run in row.runs:
            content = {"settings": run.config, "summary": run.figures, "curve": _curve(run)}
            found.append({**content, "clients": run.clients, **more})
    return found


def _curve(run: Run) -> list[dict[str, Any]]:
    task = run.summary.of_task
    spent = {"communication_rounds": 0, "bytes_down": 0, "bytes_up": 0}
    points = []
    for line in run.history:
        spent = {key: total + int(line[key]) for key, total in spent.items()}
        if line.get(task.main) is not None:
            figures = {key: line[key] for key in (*task.figures, "loss") if line.get(key) is not None}
            points.append({"round": line["round"], **figures, **spent})
    return points
