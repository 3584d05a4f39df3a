"""The report as one HTML file, for `fedbn report --html DIR...`.

The page has no program, and its content security policy forbids all requests. Text from run folders enters it escaped.
Its template ends in .md because Flower packs no .html files into an app bundle.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from fedbn_flwr import __version__

from ..folder.counts import PartitionCounts
from ..read.runs import Run
from ..text import in_html
from .curves import is_number, measures, thinned
from .pictures import curve_panel, dynamics_plot, partitions_plot
from .rows import Row, headline
from .tables import Table, as_html, differing_settings, set_up

if TYPE_CHECKING:
    from .figure import Plot  # imports matplotlib

_CLIENTS = 100  # bars of a picture
_LINES = 200  # rounds of a heat map
_NOTE = (
    '<p class="note">Figures are those of the last evaluated round; "best" is the best round on the test examples. '
    'With several seeds a cell is mean ± standard deviation over seeds; "1 of 3 seeds": of those that finished. A MiB '
    "is 2<sup>20</sup> bytes of arrays, summed over clients. Pictures show values under the pointer.</p>"
)


def write_page(
    rows: Sequence[Row], file: Path, tables: Sequence[Table], pictures: Mapping[str, Plot], notes: Sequence[str] = ()
) -> None:
    """Write the tables and pictures; and more pictures, if there are some, since then matplotlib is installed."""
    runs = [run for row in rows for run in row.runs]
    sections = {
        "Results": "".join(map(_table, tables)) + _NOTE,
        "Pictures": _shown(list(pictures.values()), "scroll wide"),
    }
    for heading, name, found in _more(rows) if pictures else ():
        text = f"<details><summary>{in_html(name)}</summary>{_shown(found)}</details>"
        sections[heading] = sections.get(heading, "") + text
    different = ("settings that differ", differing_settings(rows))
    sections["Settings"] = (_table(different) if different[1] else "") + "".join(map(_run, runs))
    made = f"Made by fedbn-flwr {__version__} on {datetime.now(UTC):%Y-%m-%d %H:%M} UTC."
    words = f"{len(runs)} {'run' if len(runs) == 1 else 'runs'}" + (
        f" in {len(rows)} rows" if len(rows) < len(runs) else ""
    )
    shown = {name: text for name, text in sections.items() if text}
    parts = {
        "title": in_html(", ".join(dict.fromkeys(run.summary.name for run in runs))),
        "about": in_html(" ".join([set_up(rows), f"{words}. {made}", *notes])),
        "contents": "".join(f'<a href="#{name.split()[0]}">{name}</a>' for name in shown),
        "sections": "".join(f'<section id="{n.split()[0]}"><h2>{n}</h2>{text}</section>' for n, text in shown.items()),
    }
    template = (files("fedbn_flwr.results.report") / "page.html.md").read_text(encoding="utf-8")
    # One pass: a value that resembles a placeholder is not replaced again.
    page = re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)
    file.write_text(page, encoding="utf-8")


def _table(table: Table) -> str:
    return f'<div class="scroll" tabindex="0">{as_html(*table)}</div>'


def _shown(pictures: Sequence[Plot], kind: str = "pictures") -> str:
    """Pictures in a page, whose elements have different identities."""
    found = []
    for picture in pictures:
        svg = picture.svg()
        found.append(re.sub(r'( id="|href="#|url\(#)', rf"\g<1>{id(picture)}-", svg[svg.index("<svg") :]))
    return f'<div class="{kind}">{"".join(found)}</div>' if found else ""


def _more(rows: Sequence[Row]) -> Iterator[tuple[str, str, list[Plot]]]:
    """The section, the name and the pictures of each measure, partition and norm state."""
    first = headline(run for row in rows for run in row.runs)
    lines = [line for row in rows for run in row.counted for line in run.history]
    for measure in measures([lines]):
        axis = "seconds" if measure.key in (first, f"clients_own_{first}") else "round"  # others are in the plot
        values = [line[measure.key] for line in lines if is_number(line.get(measure.key))]
        scales = (False, True) if not measure.is_fraction and min(values, default=0) > 0 else (False,)
        pictures = [curve_panel(rows, measure.key, axis, log=log, layout="none") for log in scales]
        yield "Curves", measure.full_title, pictures
    partitions: dict[str, list[str]] = {}
    for row in rows:
        run, name = row.runs[0], f"{row.label}, seed {row.runs[0].summary.seed}"  # other seeds are alike
        if (counts := run.folder.read("partition.json")) is not None:
            partitions.setdefault(json.dumps(counts), []).append(name)
        if norms := run.folder.lines("norms.jsonl"):
            yield "Batch norm by layer", name, [dynamics_plot(thinned(norms, _LINES))]
    for text, names in partitions.items():
        found = PartitionCounts(**json.loads(text))
        shown = replace(found, counts=found.counts[:_CLIENTS], clients=found.clients[:_CLIENTS])
        yield "Data of the clients", f"{found.title}: {', '.join(names)}", [partitions_plot([shown])]


def _run(run: Run) -> str:
    parts = {"Settings": run.config, "Results": run.figures, "Environment": run.folder.read("environment.json")}
    blocks = "".join(f"<h4>{name}</h4><pre>{html.escape(_yaml(found))}</pre>" for name, found in parts.items() if found)
    name = in_html(f"{run.label}, seed {run.summary.seed}")
    return f"<details><summary>{name} <small>{in_html(run.summary.status)}</small></summary>{blocks}</details>"


def _yaml(content: Any) -> str:
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=100)
