"""The tables of a report for a paper, in LaTeX: mean ± deviation in a cell, shares in percent, the best mean bold."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

from fedbn_flwr.tasks import goodness
from fedbn_flwr.text import in_latex

from ..metric_key import MetricKey
from .rows import Row, runs_of, sweeps
from .tables import Lines, ReportForm, by_domain, columns, domain_table, measures_of_sweep, sweep_tables, table

_NUMBER = re.compile(r"([-+<]?\d[\d.,]*)%?(?: ± ([\d.,]+))?")
_COLUMNS = 7  # after the first
_ABOUT = (
    "% Mean and standard deviation over seeds. Bold: the best mean of the rows that have finished.\n"
    "% Needs \\usepackage{booktabs}.\n"
)


def as_latex(rows: Sequence[Row], form: ReportForm) -> str:
    """A `tabular` for the first table, and for those of domains and sweeps.

    Bold is the best mean, along with others that are printed like it. Deviations over a few seeds do not decide what is
    bold; for a test there is `ReportForm.baseline`.
    """
    head, *body = table(rows, form)
    first: Lines = [head, *((row.title, *line[1:]) for row, line in zip(rows, body, strict=True))]
    found = [_tabular("", first, columns(rows, form), rows)]
    for metric, keys in by_domain(rows).items():
        title, lines = domain_table(rows, metric, keys)
        found += [_tabular(title, lines, [metric] * (len(keys) + 1), rows)] if len(lines) > 1 else []
    for sweep in sweeps(rows):
        for measure, titled in zip(measures_of_sweep(sweep, form), sweep_tables(sweep, form), strict=True):
            found.append(_tabular(*titled, [measure] * len(sweep.values), rows))
    return "\n".join([_ABOUT, *found])


def _tabular(title: str, lines: Lines, shown: Sequence[MetricKey], rows: Sequence[Row]) -> str:
    """One `tabular` or several, each with as many columns as fit on a page.

    `shown` has the measures of the columns after the first; columns of a comparison may follow.
    """
    parts = (slice(place, place + _COLUMNS) for place in range(0, len(lines[0]) - 1, _COLUMNS))
    return "\n".join(_part(title, [(line[0], *line[1:][part]) for line in lines], shown[part], rows) for part in parts)


def _part(title: str, lines: Lines, shown: Sequence[MetricKey], rows: Sequence[Row]) -> str:
    unfinished, ((first, *heads), *body) = {row.title for row in rows if row.unfinished}, lines
    best = {}
    for at, measure in enumerate(shown):
        means = [_mean(line[1 + at]) for line in body if line[0] not in unfinished]
        best[at] = _best(measure, [mean for mean in means if mean is not None], rows)
        heads[at] += ", %" if measure.is_fraction and not title else ""
    unit = ", in percent" if shown and shown[0].is_fraction else ""
    text = [f"% {in_latex(title)}{unit}"] if title else []
    text += [rf"\begin{{tabular}}{{l{'r' * len(heads)}}}", r"\toprule"]
    text += [_line(map(in_latex, (first, *heads))), r"\midrule"]
    for name, *cells in body:
        is_best = [name not in unfinished and best.get(at, math.nan) == _mean(cell) for at, cell in enumerate(cells)]
        text.append(_line([in_latex(name), *map(_in_math, cells, is_best)]))
    return "\n".join([*text, r"\bottomrule", r"\end{tabular}", ""])


def _line(cells: Iterable[str]) -> str:
    return f"{' & '.join(cells)} \\\\"


def _mean(cell: str) -> float | None:
    """The mean in a cell; None if there is none, or if runs have not finished, which is marked after it."""
    found = _NUMBER.fullmatch(cell)
    return float(found[1].lstrip("<").replace(",", "")) if found else None


def _best(key: MetricKey, means: Sequence[float], rows: Sequence[Row]) -> float:
    """The best of several means of a metric; NaN for a deviation over clients, a cost or a setting."""
    is_metric = any(type(run.summary.values.get(str(key))) is float for run in runs_of(rows)) and key.statistic != "std"
    return max(means, key=lambda mean: goodness(str(key), mean)) if is_metric and len(means) > 1 else math.nan


def _in_math(cell: str, is_best: bool) -> str:
    def number(found: re.Match[str]) -> str:
        mean, off = (text.replace(",", "{,}") for text in found.groups(""))
        return "$" + (rf"\mathbf{{{mean}}}" if is_best else mean) + (rf" \pm {off}" if off else "") + "$"

    return "--" if cell == "-" else _NUMBER.sub(number, cell)
