"""Writes the files of a report, for `fedbn run` and `fedbn report DIR...`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedbn_flwr.errors import MissingPackage, StorageError, UserError
from fedbn_flwr.storage import to_json

from . import swept
from .choice import TITLE as CANDIDATES
from .choice import Choice, choose
from .clients import plot_boxes
from .published import TITLE, published
from .report import COLOURS, Row, as_markdown, as_text, find_runs, group, tables, tables_as_text


def write_report(folders: Sequence[Path], out: Path) -> tuple[str, Path, Path | None]:
    """Write a report on the runs in `folders` into the folder `out`.

    report.md has the tables, report.png and report.svg the plot, sweep.png and sweep.svg the values of sweeps,
    clients.png a box plot of the clients if they were evaluated, report.json settings, summary and curve of each run,
    and report.html everything in one page. Without matplotlib there are no plots; the text names the extra. Returns the
    tables as text, and the paths of the first two files.
    """
    from .page import write_page
    from .plot import plot

    every = group(find_runs(folders))
    choice = choose(every)
    rows = choice.rows
    text = _as_text(choice)
    picture: Path | None = out / "report.png"
    pictures = ["report.png"]
    try:
        out.mkdir(parents=True, exist_ok=True)
        page = out / "report.md"
        try:
            plot(rows).write(out / "report.png", out / "report.svg")
            if of_sweeps := swept.sweeps(rows):
                swept.plot(of_sweeps).write(out / "sweep.png", out / "sweep.svg")
                pictures.append("sweep.png")
            if plot_boxes({row.label: [run.clients for run in row.runs] for row in rows}, COLOURS, out / "clients.png"):
                pictures.append("clients.png")
        except MissingPackage as error:  # a server's image may lack it; the run's results do not depend on it
            text, picture, pictures = f"{text}\n\nno plots: {error}", None, []
        found = [*tables(rows, every=True), *_beside(choice)]
        parts = [(f"{name}:\n\n" if name else "") + as_markdown(lines) for name, lines in found]
        images = [f"![{Path(name).stem}]({name})\n" for name in pictures]
        page.write_text("\n".join([*(f"{note}\n" for note in choice.notes), *parts, *images]), encoding="utf-8")
        (out / "report.json").write_text(to_json(_figures(every, rows)) + "\n", encoding="utf-8")
        write_page(rows, out / "report.html", choice)
    except StorageError as error:
        raise UserError(f"the report cannot be written: {error}") from None
    except OSError as error:
        raise UserError(f"the report cannot be written into {str(out)!r}: {error.strerror}") from None
    return text, page, picture


def write_html(folders: Sequence[Path], file: Path) -> str:
    """Write only the page of a report; returns the tables as text."""
    from .page import write_page

    choice = choose(group(find_runs(folders)))
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_page(choice.rows, file, choice)
    except OSError as error:
        raise UserError(f"cannot write the page {str(file)!r}: {error.strerror}") from None
    return _as_text(choice)


def _beside(choice: Choice) -> list[tuple[str, list[tuple[str, ...]]]]:
    """The tables of sweeps, of candidates and of published figures."""
    others = [(CANDIDATES, choice.candidates), (TITLE, published(choice.rows))]
    return [*swept.tables(swept.sweeps(choice.rows)), *(each for each in others if each[1])]


def _as_text(choice: Choice) -> str:
    parts = [tables_as_text(choice.rows), *(f"{title}\n{as_text(lines)}" for title, lines in _beside(choice))]
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
