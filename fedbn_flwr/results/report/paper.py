"""Tables for a paper: the first table of a report with numbers as they are, for CSV and pandas, and as LaTeX."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ..text import in_latex, printable
from . import tables
from .paired import Paired
from .rows import Row, deviation, mean
from .tables import Form, against, columns, set_up, table


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
    """The table for booktabs; without a choice of columns the best figure on test examples is left out."""
    if not form.columns:
        form = Form(tuple(key for key in columns(rows, form) if not key.startswith("best_test_")), form.baseline)
    head, *body = [
        " & ".join(in_latex(cell).replace("±", r"$\pm$") for cell in line) + r" \\" for line in table(rows, form)
    ]
    note = f"% {printable(set_up(rows))} Mean ± standard deviation over seeds; needs \\usepackage{{booktabs}}.\n"
    begin = rf"\begin{{tabular}}{{l{'r' * head.count(' & ')}}}"
    return note + "\n".join([begin, r"\toprule", head, r"\midrule", *body, r"\bottomrule", r"\end{tabular}"]) + "\n"
