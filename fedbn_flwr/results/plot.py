"""The plot of a report, as PNG and SVG: curves by rounds, communication rounds and bytes, and dots by domain."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from fedbn_flwr.errors import UserError, did_you_mean

from .curves import AXES, Curves, Measure, curves, measures
from .report import Domains, by_domain
from .rows import COLOURS, MARKERS, Row, headline, repetitions
from .text import in_plot, shorten

if TYPE_CHECKING:
    from .figure import Plot  # imports matplotlib

# Curves that are equal hide each other unless line style, marker and place of the markers differ.
_DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (7, 2, 1.5, 2)), (0, (3, 1, 1, 1, 1, 1)))
_MOST_BANDS = 8  # with more rows the bands of deviation cover each other
_LARGEST = 100  # inches
_PANELS = ("round", "communication_rounds", "mib")


class Look(TypedDict, total=False):
    """What a plot shows, if not the default."""

    measure: str | None  # a key of history.jsonl, instead of what runs are compared by
    axis: str | None  # a key of AXES: a single panel, for a paper
    size: Sequence[float] | None  # width and height in inches
    band: bool | None  # the deviation over runs; by default of at most _MOST_BANDS rows


def plot(rows: Sequence[Row], **look: Unpack[Look]) -> Plot:
    """Plot the measure that runs are compared by, and that of the personal models if there are some."""
    from .figure import Plot  # isort: skip  # names the extra that is missing without matplotlib
    from matplotlib.ticker import MaxNLocator

    _check(rows, look)
    single, band = look.get("axis"), look.get("band")
    if band is None:
        band = len(rows) <= _MOST_BANDS
    kinds = [] if single else by_domain(rows)
    measure = look.get("measure") or headline(run for row in rows for run in row.runs)
    own = f"clients_own_{measure}"
    keys = [measure, *([own] if not single and any(row.figures(own) for row in rows) else [])]
    heights = [4.2] * len(keys) + [2.8] * len(kinds)
    drawn = [curves([run.history for run in row.counted], keys) for row in rows]
    axes = [axis for axis in _PANELS if axis != "communication_rounds" or any(map(_exchanges_within_rounds, drawn))]
    axes = [single] if single else axes
    size = look.get("size") or ((6, 4.2) if single else (15, 0.5 + sum(heights)))
    figure = Plot(figsize=tuple(size), layout="constrained")
    grid = figure.add_gridspec(len(heights), len(axes), height_ratios=heights)
    if not single:
        figure.suptitle(in_plot(shorten(_title(rows, band), 150)), fontsize="medium")
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
                    values = [[Measure.of(key).scale * value for value in column] for column in values]
                    handles[number] = _draw(panel, number, len(rows), places, values, band)
            panel.set_xlabel(AXES[axis])
            panel.grid(alpha=0.3)
            panel.set_xlim(left=0)
            if axis not in ("mib", "seconds"):
                panel.xaxis.set_major_locator(MaxNLocator(integer=True))
            panel.tick_params(labelleft=panel is panels[0])
        panels[0].set_ylabel(Measure.of(key).full_title + Measure.of(key).unit)
    for number, kind in enumerate(kinds, start=len(keys)):
        _plot_domains(figure.add_subplot(grid[number, :]), rows, kind)
    if handles:
        handles = dict(sorted(handles.items()))
        labels = [in_plot(shorten(rows[number].title, 60)) for number in handles]
        if single:
            figure.axes[0].legend(handles.values(), labels, fontsize="x-small", handlelength=3)
        else:
            figure.legend(handles.values(), labels, loc="outside right upper", fontsize="small", handlelength=4)
    return figure


def _check(rows: Sequence[Row], look: Look) -> None:
    known = [measure.key for measure in measures(run.history for row in rows for run in row.runs)]
    for name, found, names in (("measure", look.get("measure"), known), ("axis", look.get("axis"), AXES)):
        if found is not None and found not in names:
            raise UserError(f"the plot has no {name} {found!r}; {did_you_mean(found, names)}")
    if (size := look.get("size")) is not None and (len(size) != 2 or not all(0 < each <= _LARGEST for each in size)):
        raise UserError(f"the size of the plot is {size}; expected width and height, up to {_LARGEST} inches")


def _exchanges_within_rounds(drawn: Curves) -> bool:
    return drawn.axes["communication_rounds"] != drawn.axes["round"]


def _title(rows: Sequence[Row], band: bool) -> str:
    names = list(dict.fromkeys(run.summary.name for row in rows for run in row.runs))
    text = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    if all(len(row.runs) == 1 for row in rows):
        return f"{text}: one run per curve"
    words = list(dict.fromkeys(repetitions(row) for row in rows))
    note = "; band: ± one standard deviation" if band else ""
    return f"{text}: mean over {' or '.join(words)}{note}"


def _draw(panel: Any, number: int, rows: int, places: list[float], values: list[list[float]], band: bool) -> Any:
    means = [statistics.fmean(column) for column in values]
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
    if band and len(values[0]) > 1:
        spread = [statistics.stdev(column) for column in values]
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
