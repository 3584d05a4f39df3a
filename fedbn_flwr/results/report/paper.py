"""Tables for a paper: the first table of a report with numbers as they are, for CSV and pandas, and as LaTeX."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ..folder.summary import keys_of
from ..text import in_latex, printable
from . import tables
from .curves import Measure
from .paired import Paired
from .rows import Row, deviation, mean
from .tables import Column, Form, against, columns, of_pairs, set_up


def lines(rows: Sequence[Row], form: Form) -> list[dict[str, Any]]:
    """A line per row: mean and standard deviation of each figure, and of how many of the row's runs they are."""
    compared, found = against(rows, form), []
    for row in rows:
        seeds = len({run.summary.seed for run in row.counted})
        line: dict[str, Any] = {"run": row.label, "status": row.unfinished or "finished", "seeds": seeds}
        line |= {"runs": len(row.counted), "runs_left_out": len(row.runs) - len(row.counted)}
        for key in columns(rows, form):
            values = row.figures(key)
            value = mean(values) if values else math.nan
            if all(type(run.figures.get(key)) is int for run in row.counted) and value.is_integer():
                value = int(value)
            spread = deviation(values)
            line |= {key: value, f"{key}_std": math.nan if spread is None else spread}
        found.append(line | (asdict(compared.get(row.label) or Paired(0)) if compared else {}))
    return found


def as_csv(rows: Sequence[Row], form: Form) -> str:
    found = lines(rows, form)
    return tables.as_csv([list(found[0]), *(list(line.values()) for line in found)])


def latex(rows: Sequence[Row], form: Form) -> str:
    """A table for the package booktabs: mean ± standard deviation, the best mean of each measure in bold.

    Without a choice of columns the best figure on the test examples is left out. Rows with runs that have not finished
    are not the best.
    """
    if not form.columns:
        form = Form(tuple(key for key in columns(rows, form) if not key.startswith("best_test_")), form.baseline)
    shown, compared = columns(rows, form), against(rows, form)
    heads = ["run", "seeds", *(each.title + (f" ({each.unit})" if each.unit else "") for each in shown.values())]
    heads += [f"difference to {form.baseline}", "95 % interval", "p", "pairs"] if compared else []
    text = [_line(map(in_latex, heads)), r"\midrule"]
    best = {key: _best(rows, key, column) for key, column in shown.items()}
    for row in rows:
        mark = f" [{row.unfinished}]" if row.unfinished else ""
        count, of = (len({run.summary.seed for run in runs}) for runs in (row.counted, row.runs))
        cells = [in_latex(row.label + mark), str(count) if len(row.counted) == len(row.runs) else f"{count} of {of}"]
        for key, column in shown.items():
            is_best = not row.unfinished and _rounded(row, key, column) == best[key]
            cells.append(_cell(row.figures(key), column, is_best))
        if compared:
            found = of_pairs(compared.get(row.label), next(iter(shown.values())))
            cells += ["--" if cell == "-" else re.sub(r"[+-][\d.]+", r"$\g<0>$", in_latex(cell)) for cell in found]
        text.append(_line(cells))
    note = f"% {printable(set_up(rows))} Mean ± standard deviation over seeds; needs \\usepackage{{booktabs}}.\n"
    head = note + rf"\begin{{tabular}}{{l{'r' * (len(heads) - 1)}}}" + "\n" + r"\toprule"
    return "\n".join([head, *text, r"\bottomrule", r"\end{tabular}"]) + "\n"


def _line(cells: Any) -> str:
    return " & ".join(cells) + r" \\"


def _best(rows: Sequence[Row], key: str, column: Column) -> float | None:
    """The best mean, as rounded as it is shown; none of what is no measure, or if there is nothing to compare."""
    runs, measure = [run for row in rows for run in row.runs], Measure.of(key)
    metrics = {key for run in runs for key in keys_of(run.summary.of_task, run.summary.metrics)}
    found = [value for row in rows if not row.unfinished and (value := _rounded(row, key, column)) is not None]
    if len(found) < 2 or not (measure.is_fraction or measure.is_lower_better or key in metrics):
        return None
    return min(found) if measure.is_lower_better or key.endswith("_std") else max(found)


def _rounded(row: Row, key: str, column: Column) -> float | None:
    values = row.figures(key)
    value = column.scale * mean(values) if values else math.nan
    return round(value, column.digits) if math.isfinite(value) else None


def _cell(values: Sequence[float], column: Column, is_best: bool) -> str:
    scaled = [column.scale * value for value in values]
    if not scaled or not math.isfinite(mean(scaled)):
        return "--"
    number = f"{mean(scaled):.{column.digits}f}"
    spread = deviation(scaled)
    more = "" if not spread else rf" \pm {spread:.{column.digits}f}"
    return f"$\\mathbf{{{number}}}{more}$" if is_best else f"${number}{more}$"
