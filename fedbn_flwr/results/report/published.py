"""The published figures of the runs beside the measured ones, as a table of a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .curves import Measure, is_number
from .rows import Row, deviation, mean
from .tables import Lines, figure

TITLE = "published and measured figures"
_HEADINGS = ("run", "figure", "published", "measured", "seeds", "difference", "within both spreads", "source")


def published(rows: Sequence[Row]) -> Lines:
    """A line for each published figure; nothing if there are none.

    A difference is within both spreads if the intervals of one standard deviation around the two means overlap. Of a
    run with another set-up, such as a smaller size, and of one that has not finished, there is no difference, since it
    would say nothing about either.
    """
    lines: Lines = []
    for row in rows:
        found = row.runs[0].config.get("published") or {}
        source, differs = str(found.get("source", "-")), found.get("differs")
        for key, (value, spread) in published_figures(found).items():
            measure, measured = Measure.of(key), row.figures(key)
            scale, digits = measure.scale, measure.digits([value, *measured])
            known = figure([value], scale, digits, measure.unit)
            if differs:
                verdict = ("-", f"other set-up ({differs})")
            elif row.unfinished:
                verdict = ("-", "not finished")
            elif not measured:
                verdict = ("-", "-")
            else:
                difference = mean(measured) - value
                verdict = (f"{scale * difference:+.{digits}f}", _within(difference, deviation(measured), spread))
            lines.append(
                (
                    row.title,
                    measure.full_title,
                    known if spread is None else f"{known} ± {scale * spread:.{digits}f}",
                    figure(measured, scale, digits, measure.unit),
                    str(len(measured)),
                    *verdict,
                    source,
                )
            )
    return [_HEADINGS, *lines] if lines else []


def published_figures(found: Mapping[str, Any]) -> dict[str, tuple[float, float | None]]:
    """Mean and, if known, standard deviation of each figure."""
    figures: dict[str, tuple[float, float | None]] = {}
    for key, value in found.items():
        mean, *deviation = value if isinstance(value, list | tuple) and value else [value]
        if is_number(mean) and all(map(is_number, deviation)):
            figures[key] = (mean, deviation[0] if deviation else None)
    return figures


def _within(difference: float, measured: float | None, known: float | None) -> str:
    if measured is None or known is None:
        return "no spread"
    return "yes" if abs(difference) <= measured + known else "no"
