"""The tables of a report on rows, for `fedbn report DIR...`, and tables as text of each format."""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fedbn_flwr.errors import UserError, did_you_mean
from fedbn_flwr.tasks import title_of

from ..folder.clients import is_count, spread
from ..folder.summary import domain_keys, keys_of
from ..read.runs import Run
from ..text import in_csv, in_html, in_markdown, printable
from .curves import MIB, Measure
from .paired import Paired, paired
from .rows import Row, deviation, differing, mean, repetitions

Lines = list[tuple[str, ...]]  # of a table: the headings, and the cells of each row
Table = tuple[str, Lines]  # with its title; the first one of a report has none


@dataclass(frozen=True)
class Column:
    """A figure of the summary in a table."""

    title: str
    scale: float = 1
    digits: int = 0
    unit: str = ""


_COSTS = {
    "rounds": Column("rounds"),
    "communication_rounds": Column("communication rounds"),
    "bytes_down": Column("MiB down", 1 / MIB, 2),
    "bytes_up": Column("MiB up", 1 / MIB, 2),
    "seconds": Column("seconds", 1, 1),
}


@dataclass(frozen=True)
class Form:
    """What the table of a report shows, if not the default."""

    columns: tuple[str, ...] = ()  # keys of summary.json
    baseline: str = ""  # the label of the row that the others are compared with, seed by seed


DEFAULT = Form()


def columns(rows: Sequence[Row], form: Form) -> dict[str, Column]:
    """The columns of a table, by the key of their figure."""
    known: dict[str, Column] = {}
    first: set[str] = set()
    for summary in (run.summary for row in rows for run in row.runs):
        main = summary.of_task.main
        first |= {main, f"best_test_{main}"}
        keys = [main, f"best_test_{main}", f"best_round_{main}", *keys_of(summary.of_task, summary.metrics)]
        # Of the task's other figures those of clients are in a table of their own.
        others = {*summary.of_task.figures[1:]} - {*summary.metrics}
        left_out = {f"clients_{place}{name}" for name in others for place in ("", "own_")}
        known |= {key: _column(key, rows, main) for key in keys if key not in known.keys() | left_out}
    known |= _COSTS
    if not form.columns:
        wanted = first | _COSTS.keys()
        return {key: each for key, each in known.items() if key in wanted or any(row.figures(key) for row in rows)}
    found = [(key, value) for row in rows for run in row.runs for key, value in run.figures.items()]
    figures = {key: type(value) for key, value in found if type(value) in (int, float)}
    if unknown := [key for key in form.columns if key not in figures]:
        raise UserError(f"no run has a figure {unknown[0]!r} in its summary.json; {did_you_mean(unknown[0], figures)}")
    whole = {key for key, kind in figures.items() if kind is int}
    shown = {key: known.get(key) or _column(key, rows) for key in form.columns}
    return {key: replace(each, digits=0) if key in whole - known.keys() else each for key, each in shown.items()}


def _column(key: str, rows: Sequence[Row], main: str = "") -> Column:
    """A figure of the summary; the main figure of the task has short titles."""
    titles = {
        f"best_test_{main}": "best on test",
        f"best_round_{main}": "best by validation",
        f"clients_own_{main}": "on own data",
        f"unseen_{main}": "new clients",
        f"unseen_{main}_tuned": "fine-tuned",
    }
    name = key.removeprefix("clients_")
    own = name.startswith("own_") and name != key
    words = title_of(name.removeprefix("own_") if own else name)
    title = words if name == key else f"clients' {words}" + (" on own data" if own else "")
    measure = Measure.of(key)
    digits = measure.digits(value for row in rows for value in row.figures(key))
    return Column(titles.get(key, title), measure.scale, digits, measure.unit)


def table(rows: Sequence[Row], form: Form = DEFAULT) -> Lines:
    """Headings and cells as text; several seeds are shown as mean ± standard deviation, with their number."""
    shown, compared = columns(rows, form), against(rows, form)
    headings = (f"difference to {form.baseline}", "95 % interval", "p", "pairs") if compared else ()
    lines: Lines = [("run", *(each.title for each in shown.values()), *headings)]
    for row in rows:
        cells = [figure(row.figures(key), each.scale, each.digits, each.unit) for key, each in shown.items()]
        if compared:
            cells += of_pairs(compared.get(row.label), next(iter(shown.values())))
        seeds = f" ({repetitions(row)})" if 1 < len(row.runs) == len(row.counted) else ""
        lines.append((row.title + seeds, *cells))
    return lines


def against(rows: Sequence[Row], form: Form) -> dict[str, Paired]:
    """The other rows by label, compared with the baseline in the first column; empty without a baseline."""
    if not form.baseline:
        return {}
    labels = {row.label: row for row in rows}
    if (base := labels.pop(form.baseline, None)) is None:
        raise UserError(f"no row is called {form.baseline!r}; {did_you_mean(form.baseline, labels)}")
    key = next(iter(columns(rows, form)))
    return {label: paired(row.by_seed(key), base.by_seed(key)) for label, row in labels.items()}


def of_pairs(found: Paired | None, column: Column) -> list[str]:
    """Cells of a comparison; the baseline's are empty."""
    if found is None:
        return ["-"] * 4
    difference, low, high = (
        f"{column.scale * value:+,.{column.digits}f}" if math.isfinite(value) else "-"
        for value in (found.difference, found.low, found.high)
    )
    p = "-" if math.isnan(found.p) else "<0.001" if found.p < 0.001 else f"{found.p:.3f}"
    return [difference, "-" if low == "-" else f"{low} to {high}", p, str(found.pairs)]


@dataclass(frozen=True)
class Domains:
    """One kind of the main figure by domain."""

    title: str
    prefix: str
    names: tuple[str, ...]

    @property
    def measure(self) -> Measure:
        return Measure.of(self.prefix.removesuffix("_"))

    def columns(self, row: Row) -> list[list[float]]:
        """The values of its runs in each domain, and their unweighted mean, if all runs have all domains."""
        figures = [row.figures(self.prefix + name) for name in self.names]
        return [*figures, list(map(statistics.fmean, zip(*figures, strict=True))) if all(figures) else []]

    def table(self, rows: Sequence[Row]) -> Lines:
        lines: Lines = [("run", *self.names, "average")]
        for row in rows:
            if any(columns := self.columns(row)):
                lines.append((row.title, *(as_measured(self.measure, values, 1) for values in columns)))
        return lines


def by_domain(rows: Sequence[Row]) -> list[Domains]:
    """The kinds of figures by domain that at least one run has."""
    summaries = [run.summary for row in rows for run in row.runs]
    keys = dict.fromkeys(key for summary in summaries for key in summary.domains)
    titles = {prefix: title for summary in summaries for prefix, title in domain_keys(summary.of_task).items()}
    kinds = (
        Domains(title, prefix, tuple(key.removeprefix(prefix) for key in keys if key.startswith(prefix)))
        for prefix, title in titles.items()
    )
    return [kind for kind in kinds if kind.names]


CLIENTS = "clients with equal weights, last evaluated round"


def measures_of_clients(run: Run, *, every: bool) -> dict[str, Measure]:
    """The figures without losses and numbers of examples; those on the clients' own test examples come first.

    Without `every` only those that a terminal and a picture have room for: not those of domains and of the user.
    """
    name = run.summary.of_task.main
    first = (name, f"own_{name}")
    few = {*first, f"unseen_{name}", f"unseen_{name}_tuned"}
    keys = [key for key in run.clients if key in few or (every and not is_count(key) and "loss" not in key.split("_"))]
    keys.sort(key=lambda key: (not key.startswith("own_"), key not in first))
    return {key: Measure.of_client(key, run.clients) for key in keys}


def client_table(rows: Sequence[Row], *, every: bool) -> Lines:
    """Mean, deviation and worst tenth over clients of each metric, or of the main ones; maybe only headings."""
    lines: Lines = [("run", "metric", "clients", "mean", "deviation", "worst tenth")]
    for row in rows:
        for metric, measure in measures_of_clients(row.counted[0], every=every).items():
            if not all(metric in run.clients for run in row.counted):
                continue
            seeds = [list(run.clients[metric].values()) for run in row.counted]
            measured = [spread(values, metric) for values in seeds]
            figures = [[getattr(each, name) for each in measured] for name in ("mean", "deviation", "worst_tenth")]
            digits = measure.digits([value for values in figures for value in values])
            shown = (figure(values, measure.scale, digits, measure.unit) for values in figures)
            lines.append((row.title, measure.of_clients, figure([len(values) for values in seeds], 1, 0), *shown))
    return lines


def differing_settings(rows: Sequence[Row]) -> Lines:
    """A table of the settings that differ between rows; empty if none do."""
    settings = [row.runs[0].settings for row in rows]
    different = differing(settings)
    cells = [[str(each.get(key, "-")) for key in different] for each in settings]
    lines = [(row.label, *line) for row, line in zip(rows, cells, strict=True)]
    return [("run", *different), *lines] if different else []


def set_up(rows: Sequence[Row]) -> str:
    """What the runs have in common, as a caption: "quick: digits, mlp, 4 clients, 6 rounds, seeds 0, 1, 2."."""
    names = ", ".join(dict.fromkeys(run.summary.name for row in rows for run in row.runs))
    settings = [run.settings for row in rows for run in row.runs]
    common = {key: value for key, value in settings[0].items() if all(each.get(key) == value for each in settings)}
    words = {"data.name": "{}", "model.name": "{}", "clients": "{} clients", "rounds": "{} rounds"}
    seeds = sorted({run.summary.seed for row in rows for run in row.runs})
    found = [text.format(common[key]) for key, text in words.items() if common.get(key) is not None]
    found.append(f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}")
    return f"{names}: {', '.join(found)}."


def figure(values: Sequence[float], scale: float, digits: int, unit: str = "", *, mark: str = "") -> str:
    """The mean, and the standard deviation if values differ; and a mark."""
    mark = f" [{mark}]" if mark else ""
    if not values:
        return "-" + mark
    scaled = [value * scale for value in values]
    spread = deviation(scaled)
    return f"{mean(scaled):,.{digits}f}{unit}" + (f" ± {spread:,.{digits}f}" if spread else "") + mark


def as_measured(measure: Measure, values: Sequence[float], of_share: int = 2, *, mark: str = "") -> str:
    """`figure` in the form of a measure."""
    return figure(values, measure.scale, measure.digits(values, of_share), measure.unit, mark=mark)


def as_markdown(lines: Sequence[Sequence[str]]) -> str:
    head, *body = [f"| {' | '.join(map(in_markdown, line))} |" for line in lines]
    rule = "|---" + "|---:" * (len(lines[0]) - 1) + "|"
    return "\n".join([head, rule, *body]) + "\n"


def as_text(lines: Sequence[Sequence[str]]) -> str:
    """Columns aligned with spaces."""
    lines = [[printable(cell) for cell in line] for line in lines]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    text = []
    for number, line in enumerate(lines):
        first = line[0].ljust(widths[0])
        text.append("  ".join([first, *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))]))
        if number == 0:
            text.append("  ".join("-" * width for width in widths))
    return "\n".join(line.rstrip() for line in text)


def as_html(title: str, lines: Sequence[Sequence[str]]) -> str:
    head, *body = [[in_html(cell) for cell in line] for line in lines]
    heads = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    rows = (
        f'<tr><th scope="row"><bdi>{first}</bdi></th><td>{"</td><td>".join(rest)}</td></tr>' for first, *rest in body
    )
    caption = f"<caption>{in_html(title)}</caption>" if title else ""
    return f"<table>{caption}<thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def as_csv(lines: Iterable[Iterable[Any]]) -> str:
    stream = io.StringIO()
    csv.writer(stream, lineterminator="\n").writerows([map(in_csv, line) for line in lines])
    return stream.getvalue()


def tables(rows: Sequence[Row], form: Form = DEFAULT, *, every: bool = False) -> list[Table]:
    """The tables of the rows. `every`: with all metrics of clients."""
    found = [("", table(rows, form)), *((kind.title, kind.table(rows)) for kind in by_domain(rows))]
    if len(individuals := client_table(rows, every=every)) > 1:
        found.append((CLIENTS, individuals))
    return found


def tables_as_text(found: Iterable[Table]) -> str:
    return "\n\n".join((f"{name}\n" if name else "") + as_text(lines) for name, lines in found)
