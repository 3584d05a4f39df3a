"""The report as one HTML file, for `fedbn report --html DIR...`.

The page holds its data, style and program, and its content security policy forbids all requests. Text from run folders
enters it in two ways only: escaped, in tables, and as JSON, which page.js shows as text.

The files in html/ end in .md because Flower packs no .css, .html or .js files into an app bundle.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import html
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from fedbn_flwr import __version__
from fedbn_flwr.errors import MissingPackage

from . import sections, swept
from .choice import TITLE as CANDIDATES
from .choice import Choice
from .curves import AXES, POINTS, Curves, Measure, curves, is_number, measures, spent
from .folder import RunFolder
from .published import published
from .report import DEFAULT, Cell, Form, by_domain, differing_settings, set_up, table
from .rows import COLOURS, Row, headline, repetitions
from .text import in_csv, in_html, in_script, printable


def write_page(rows: Sequence[Row], file: Path, choice: Choice | None = None, form: Form = DEFAULT) -> None:
    assets = files("fedbn_flwr.results") / "html"
    style, program = ((assets / name).read_text(encoding="utf-8") for name in ("page.css.md", "page.js.md"))
    names = list(dict.fromkeys(run.summary.name for row in rows for run in row.runs))
    data = page_data(rows)
    parts = {
        "title": in_html(", ".join(names)),
        "about": in_html(" ".join([set_up(rows), _about(rows), *(choice.notes if choice is not None else ())])),
        "style": style,
        "policy": f"default-src 'none'; img-src data:; style-src {_hash(style)}; script-src {_hash(program)}; "
        "base-uri 'none'; form-action 'none'",
        "summary": as_html("Results", table(rows, form), "results"),
        "swept": _swept(rows),
        "candidates": as_html(CANDIDATES, choice.candidates if choice is not None else [], "candidates"),
        "published": as_html("Published and measured figures", published(rows), "published"),
        "differing": as_html("Settings that differ", differing_settings(rows), "differing"),
        "no_domains": "" if by_domain(rows) else " hidden",
        "domains": "".join(as_html(kind.title, kind.table(rows), f"domains-{kind.prefix}") for kind in by_domain(rows)),
        "runs": "".join(_run(row, place) for row in rows for place in range(len(row.runs))),
        "data": in_script(_short(data)),
        "program": program,
    }
    template = (assets / "page.html.md").read_text(encoding="utf-8")
    # One pass: a value that resembles a placeholder is not replaced again.
    page = re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)
    file.write_text(page, encoding="utf-8")


def _swept(rows: Sequence[Row]) -> str:
    """A table for each sweep, and a picture of all if matplotlib is installed."""
    found = swept.sweeps(rows)
    tables = enumerate(swept.tables(found))
    text = "".join(as_html(title, lines, f"sweep-{number}") for number, (title, lines) in tables)
    if found:
        with suppress(MissingPackage):
            data = base64.b64encode(swept.plot(found)._repr_png_()).decode()
            text += f'<img class="sweep" alt="these tables as a plot" src="data:image/png;base64,{data}">'
    return text


def _about(rows: Sequence[Row]) -> str:
    runs = [run for row in rows for run in row.runs]
    words = f"{len(runs)} {'run' if len(runs) == 1 else 'runs'}"
    if len(rows) < len(runs):
        words += f" in {len(rows)} {'row' if len(rows) == 1 else 'rows'}"
    return f"{words}. Made by fedbn-flwr {__version__} on {datetime.now(UTC):%Y-%m-%d %H:%M} UTC."


def page_data(rows: Sequence[Row]) -> dict[str, Any]:
    """The content of the charts."""
    histories = [[run.history for run in row.counted] for row in rows]
    flat = [history for row in histories for history in row]
    found = measures(flat)
    drawn = [curves(row, [measure.key for measure in found]) for row in histories]
    first = headline(run for row in rows for run in row.runs)
    shown = [key for key in (first, f"clients_own_{first}") if any(measure.key == key for measure in found)]
    return {
        "rows": [
            {"label": printable(row.title), "runs": repetitions(row) if 1 < len(row.runs) == len(row.counted) else ""}
            for row in rows
        ],
        "colours": len(COLOURS),
        "repeated": any(len(row.counted) > 1 for row in rows),
        "axes": [{"key": key, "title": title} for key, title in AXES.items()],
        "measures": [
            {"key": m.key, "title": m.title, "group": m.group, "fraction": m.is_fraction, "shown": m.key in shown}
            for m in found
        ],
        "curves": [{"rounds": row.rounds, "total": row.total, "axes": row.axes, "values": row.values} for row in drawn],
        "points": POINTS,
        "domains": sections.domains(rows),
        "clients": sections.clients(rows),
        "partitions": sections.partitions(rows),
        "matrices": sections.matrices(rows),
        "layers": sections.layers(rows),
        "files": {"runs.csv": runs_csv(rows), "curves.csv": curves_csv(rows, drawn, found)},
    }


def _short(data: Any) -> Any:
    """Figures with six digits; those that are not finite become None."""
    if isinstance(data, float):
        return float(f"{data:.6g}") if is_number(data) else None
    if isinstance(data, Mapping):
        return {key: _short(value) for key, value in data.items()}
    return [_short(value) for value in data] if isinstance(data, list | tuple) else data


def as_csv(lines: Iterable[Sequence[Any]]) -> str:
    stream = io.StringIO()
    csv.writer(stream, lineterminator="\n").writerows([map(in_csv, line) for line in lines])
    return stream.getvalue()


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"


# --- tables -------------------------------------------------------------------


def as_html(title: str, lines: Sequence[Sequence[str]], identity: str) -> str:
    """A table, to which page.js adds sorting; nothing without lines."""
    if not lines:
        return ""
    heads = "".join(f'<th scope="col">{in_html(head)}</th>' for head in lines[0])
    body = []
    for first, *rest in lines[1:]:
        cells = "".join(f"<td{_sorted_by(cell)}>{in_html(cell)}</td>" for cell in rest)
        body.append(f'<tr><th scope="row"><bdi class="label">{in_html(first)}</bdi></th>{cells}</tr>')
    caption = f"<caption>{in_html(title)}</caption>"
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{in_html(title)}"><table id="{in_html(identity)}">'
        f"{caption}<thead><tr>{heads}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
    )


def _sorted_by(cell: str) -> str:
    value = cell.value if isinstance(cell, Cell) else None
    number = ' class="number"' if isinstance(cell, Cell) else ""
    return number if not is_number(value) else f'{number} data-value="{value!r}"'


def _run(row: Row, place: int) -> str:
    run = row.runs[place]
    environment = RunFolder(run.path).environment()
    parts = [("Settings", run.config), ("Results", run.figures), ("Environment", environment)]
    blocks = "".join(
        f'<h4>{title}</h4><pre tabindex="0">{html.escape(_yaml(content))}</pre>' for title, content in parts if content
    )
    name = in_html(f"{row.label}, seed {run.summary.seed}")
    return (
        f"<details><summary><bdi>{name}</bdi> <small>{in_html(run.summary.status)}</small></summary>{blocks}</details>"
    )


def _yaml(content: Any) -> str:
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=100)


# --- files --------------------------------------------------------------------


def runs_csv(rows: Sequence[Row]) -> str:
    """A line for each run: its row, its folder's name, and all figures of its summary."""
    runs = [(row.label, run.path.name, run.figures) for row in rows for run in row.runs]
    keys = list(dict.fromkeys(key for *_, figures in runs for key in figures if key != "label"))
    return as_csv(
        [("row", "folder", *keys), *((*names, *(figures.get(key, "") for key in keys)) for *names, figures in runs)]
    )


def curves_csv(rows: Sequence[Row], drawn: Sequence[Curves], found: Sequence[Measure]) -> str:
    """A line for each run and each round that is drawn."""
    keys = [measure.key for measure in found]
    lines: list[Sequence[Any]] = [("row", "seed", *AXES, *keys)]
    for row, of in zip(rows, drawn, strict=True):
        for run in row.counted:
            drawn_rounds = set(of.rounds)
            for line, total in zip(run.history, spent(run.history), strict=True):
                if line["round"] in drawn_rounds:
                    values = (*(total[axis] for axis in AXES), *(line.get(key) for key in keys))
                    lines.append((row.label, run.summary.seed, *map(_short, values)))
    return as_csv(lines)
