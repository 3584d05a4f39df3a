"""Writes the files of a report, for `fedbn run` and `fedbn report DIR...`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Unpack

from fedbn_flwr.errors import MissingPackage, StorageError, UserError
from fedbn_flwr.storage import to_json

from . import paper, swept
from .choice import TITLE as CANDIDATES
from .choice import Choice, choose
from .clients import plot_boxes
from .plot import Look, plot
from .published import TITLE, published
from .report import DEFAULT, Form, as_markdown, as_text, differing_settings, set_up, tables, tables_as_text
from .rows import COLOURS, Row, find_runs, group
from .text import in_markdown


def write_report(
    folders: Sequence[Path], out: Path, form: Form = DEFAULT, **look: Unpack[Look]
) -> tuple[str, Path, Path | None]:
    """Write a report on the runs in `folders` into the folder `out`.

    report.md has the tables, report.png and report.svg the plot, sweep.png and sweep.svg the values of sweeps,
    clients.png a box plot of the clients if they were evaluated, report.json settings, summary and curve of each run,
    and report.html everything in one page. Without matplotlib there are no plots; the text names the extra. Returns the
    tables as text, and the paths of the first two files.
    """
    from .page import write_page

    every = group(find_runs(folders))
    choice = choose(every)
    rows = choice.rows
    text = _as_text(choice, form)
    picture: Path | None = out / "report.png"
    pictures = {"report.png": "curves of the rows"}
    try:
        out.mkdir(parents=True, exist_ok=True)
        page = out / "report.md"
        try:
            plot(rows, **look).write(out / "report.png", out / "report.svg")
            if of_sweeps := swept.sweeps(rows):
                swept.plot(of_sweeps).write(out / "sweep.png", out / "sweep.svg")
                pictures["sweep.png"] = "accuracy against the swept values"
            clients = {row.label: [run.clients for run in row.counted] for row in rows}
            if plot_boxes(clients, COLOURS, out / "clients.png"):
                pictures["clients.png"] = "accuracy of single clients"
        except MissingPackage as error:  # a server's image may lack it; the run's results do not depend on it
            text, picture, pictures = f"{text}\n\nno plots: {error}", None, {}
        found = [*tables(rows, form, every=True), *_beside(choice)]
        if different := differing_settings(rows):
            found.append(("settings that differ", different))
        parts = [(f"{name}:\n\n" if name else "") + as_markdown(lines) for name, lines in found]
        images = [f"![{words}]({name})\n" for name, words in pictures.items()]
        notes = (f"{in_markdown(note)}\n" for note in (set_up(rows), *choice.notes))
        page.write_text("\n".join([*notes, *parts, *images]), encoding="utf-8")
        (out / "report.json").write_text(to_json(_figures(every, rows)) + "\n", encoding="utf-8")
        write_page(rows, out / "report.html", choice, form)
    except StorageError as error:
        raise UserError(f"the report cannot be written: {error}") from None
    except OSError as error:
        raise UserError(f"the report cannot be written into {str(out)!r}: {error.strerror}") from None
    return text, page, picture


@contextmanager
def _writing(file: Path) -> Iterator[None]:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise UserError(f"cannot write {str(file)!r}: {error.strerror}") from None


def write_html(folders: Sequence[Path], file: Path, form: Form = DEFAULT) -> str:
    """Write only the page of a report; returns the tables as text."""
    from .page import write_page

    choice = choose(group(find_runs(folders)))
    with _writing(file):
        write_page(choice.rows, file, choice, form)
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
    drawn = plot(choose(group(find_runs(folders))).rows, **look)
    if file.suffix[1:] not in (known := drawn.canvas.get_supported_filetypes()):
        raise UserError(f"the plot {str(file)!r} has no known format; expected a name that ends in {', '.join(known)}")
    with _writing(file):
        drawn.write(file)


def _beside(choice: Choice) -> list[tuple[str, list[tuple[str, ...]]]]:
    """The tables of sweeps, of candidates and of published figures."""
    others = [(CANDIDATES, choice.candidates), (TITLE, published(choice.rows))]
    return [*swept.tables(swept.sweeps(choice.rows)), *(each for each in others if each[1])]


def _as_text(choice: Choice, form: Form) -> str:
    parts = [tables_as_text(choice.rows, form), *(f"{title}\n{as_text(lines)}" for title, lines in _beside(choice))]
    return "\n\n".join([*choice.notes, *parts])


def _figures(rows: Sequence[Row], chosen: Sequence[Row]) -> list[dict[str, Any]]:
    """Each run's settings, summary and curve: the evaluated rounds, with the traffic up to each of them.

    Candidates of `tune` that are not in the other tables and plots have `"chosen": false`.
    """
    found = []
    for row in rows:
        more = {} if any(row is each for each in chosen) else {"chosen": False}
        for run in row.runs:
            curve = _curve(run.history)
            found.append(
                {"settings": run.config, "summary": run.figures, "curve": curve, "clients": run.clients, **more}
            )
    return found


def _curve(history: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    spent = {"communication_rounds": 0, "bytes_down": 0, "bytes_up": 0}
    points = []
    for line in history:
        spent = {key: total + int(line[key]) for key, total in spent.items()}
        if line.get("accuracy") is not None:
            more = {"mean_iou": line["mean_iou"]} if line.get("mean_iou") is not None else {}
            points.append({"round": line["round"], "accuracy": line["accuracy"], **more, "loss": line["loss"], **spent})
    return points
