"""The plot of a report, as PNG and SVG: curves by rounds, communication rounds and bytes, and dots by domain."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .curves import AXES, Curves, Measure, curves
from .report import Domains, by_domain
from .rows import COLOURS, MARKERS, Row, headline, repetitions
from .text import in_plot, shorten

if TYPE_CHECKING:
    from .figure import Plot  # imports matplotlib

# Curves that are equal hide each other unless line style, marker and place of the markers differ.
_DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (7, 2, 1.5, 2)), (0, (3, 1, 1, 1, 1, 1)))
_MOST_BANDS = 8  # with more rows the bands of deviation cover each other
_PANELS = ("round", "communication_rounds", "mib")


def plot(rows: Sequence[Row]) -> Plot:
    """Plot the measure that runs are compared by, and that of the personal models if there are some."""
    from .figure import Plot  # isort: skip  # names the extra that is missing without matplotlib
    from matplotlib.ticker import MaxNLocator

    kinds = by_domain(rows)
    measure = headline(run for row in rows for run in row.runs)
    own = f"clients_own_{measure}"
    keys = [measure, *([own] if any(row.figures(own) for row in rows) else [])]
    heights = [4.2] * len(keys) + [2.8] * len(kinds)
    drawn = [curves([run.history for run in row.counted], keys) for row in rows]
    axes = [axis for axis in _PANELS if axis != "communication_rounds" or any(map(_exchanges_within_rounds, drawn))]
    figure = Plot(figsize=(15, 0.5 + sum(heights)), layout="constrained")
    grid = figure.add_gridspec(len(heights), len(axes), height_ratios=heights)
    figure.suptitle(in_plot(shorten(_title(rows), 150)), fontsize="medium")
    handles: dict[int, Any] = {}
    for line, key in enumerate(keys):
        panels = [figure.add_subplot(grid[line, 0])]
        panels += [figure.add_subplot(grid[line, i], sharey=panels[0]) for i in range(1, len(axes))]
        for panel, axis in zip(panels, axes, strict=True):
            for number, row_curves in enumerate(drawn):
                if key == measure and own in keys and rows[number].accuracy_of:
                    continue  # it has no global model, and its clients are in the other panels
                places, values = row_curves.points(key, axis)
                if places:
                    handles[number] = _draw(panel, number, len(rows), places, values)
            panel.set_xlabel(AXES[axis])
            panel.grid(alpha=0.3)
            panel.set_xlim(left=0)
            if axis != "mib":
                panel.xaxis.set_major_locator(MaxNLocator(integer=True))
            panel.tick_params(labelleft=panel is panels[0])
        panels[0].set_ylabel(f"{Measure.of(key).full_title}, %")
    for number, kind in enumerate(kinds, start=len(keys)):
        _plot_domains(figure.add_subplot(grid[number, :]), rows, kind)
    if handles:
        handles = dict(sorted(handles.items()))
        labels = [in_plot(shorten(rows[number].title, 60)) for number in handles]
        figure.legend(handles.values(), labels, loc="outside right upper", fontsize="small", handlelength=4)
    return figure


def _exchanges_within_rounds(drawn: Curves) -> bool:
    return drawn.axes["communication_rounds"] != drawn.axes["round"]


def _title(rows: Sequence[Row]) -> str:
    names = list(dict.fromkeys(run.summary.name for row in rows for run in row.runs))
    text = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    if all(len(row.runs) == 1 for row in rows):
        return f"{text}: one run per curve"
    words = list(dict.fromkeys(repetitions(row) for row in rows))
    band = "; band: ± one standard deviation" if len(rows) <= _MOST_BANDS else ""
    return f"{text}: mean over {' or '.join(words)}{band}"


def _draw(panel: Any, number: int, rows: int, places: list[float], values: list[list[float]]) -> Any:
    means = [100 * statistics.fmean(column) for column in values]
    step = max(1, len(places) // 8)
    (line,) = panel.plot(
        places,
        means,
        linestyle=_DASHES[number % len(_DASHES)],
        # An earlier line is wider, so that it is visible below a later one.
        linewidth=1.2 + 1.8 * (rows - number) / rows,
        color=COLOURS[number % len(COLOURS)],
        marker=MARKERS[number % len(MARKERS)],
        markersize=5,
        markevery=(number * step // rows % max(1, len(places)), step),
    )
    if rows <= _MOST_BANDS and len(values[0]) > 1:
        spread = [100 * statistics.stdev(column) for column in values]
        low = [mean - deviation for mean, deviation in zip(means, spread, strict=True)]
        high = [mean + deviation for mean, deviation in zip(means, spread, strict=True)]
        panel.fill_between(places, low, high, color=COLOURS[number % len(COLOURS)], alpha=0.15, lw=0)
    return line


def _plot_domains(panel: Any, rows: Sequence[Row], kind: Domains) -> None:
    """Dots per domain and for their average: one per row, with a line for the deviation over seeds."""
    width = 0.8 / len(rows)
    for number, row in enumerate(rows):
        columns = [*(row.figures(kind.prefix + name) for name in kind.names), kind.averages(row)]
        for place, values in enumerate(columns):
            if not values:
                continue
            x, mean = place + (number - (len(rows) - 1) / 2) * width, 100 * statistics.fmean(values)
            colour = COLOURS[number % len(COLOURS)]
            panel.plot([x], [mean], color=colour, marker=MARKERS[number % len(MARKERS)], markersize=7)
            if len(values) > 1:
                deviation = 100 * statistics.stdev(values)
                panel.plot([x, x], [mean - deviation, mean + deviation], color=colour, lw=1.5)
    for place in range(len(kind.names)):
        panel.axvline(place + 0.5, color="grey", lw=0.8)
    panel.set_xticks(range(len(kind.names) + 1), [*(in_plot(shorten(name, 20)) for name in kind.names), "average"])
    panel.set_xlim(-0.5, len(kind.names) + 0.5)
    panel.set_ylabel("%")
    panel.set_title(in_plot(kind.title), fontsize="medium", loc="left")
    panel.grid(axis="y", alpha=0.3)
    panel.set_axisbelow(True)
