"""The pictures of a report. Each is declared here once; `Plot` makes files and the pictures of the page of it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from fedbn_flwr.errors import UserError, did_you_mean

from ..folder.clients import PartitionCounts
from ..text import in_plot
from .curves import AXES, Measure, curve, measures, thinned
from .rows import Row, Sweep, deviation, headline, mean, runs_of
from .tables import DEFAULT, Form, as_measured, by_domain, in_domains, measures_of_clients, measures_of_sweep, set_up

if TYPE_CHECKING:
    from .figure import Plot  # imports matplotlib

# Okabe and Ito's palette, whose colours colour-blind readers can distinguish, with a darker yellow; and markers.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#A69B00")
MARKERS = ("o", "s", "^", "D", "v", "P", "<", ">", "p")

# Curves that are equal hide each other unless line style, marker and place of the markers differ.
_DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (7, 2, 1.5, 2)), (0, (3, 1, 1, 1, 1, 1)))
_MOST_BANDS = 8  # with more rows the bands of deviation cover each other
_PANELS = ("round", "communication_rounds", "mib")
_TIPS = 100  # points of a curve that have a tip
_SHOWN_CLASSES = 24  # in a legend
_LABELLED = 40  # more names of clients do not fit
_END: dict[str, Any] = {"marker": "x", "markersize": 11, "markeredgewidth": 2.5}  # of a curve that diverged
_BOX: dict[str, Any] = {
    "widths": 0.5,
    "whis": (0, 100),
    "showmeans": True,
    "medianprops": {"color": "black"},
    "meanprops": {"marker": "D", "markersize": 4, "markerfacecolor": "black", "markeredgecolor": "black"},
}


def _panels(count: int, columns: int, width: float, height: float) -> tuple[Plot, list[Any]]:
    """A figure with so many panels, each of a size in inches."""
    from .figure import Plot

    columns = min(columns, count)
    lines = -(-count // columns)
    figure = Plot(figsize=(width * columns, height * lines))
    return figure, [figure.add_subplot(lines, columns, number + 1) for number in range(count)]


def _finish(panel: Any, title: str, *, grid: Any = "both", **values: Any) -> None:
    panel.set(**values)
    panel.set_title(in_plot(title, 100), fontsize="medium", loc="left")
    panel.grid(axis=grid, alpha=0.3)
    panel.set_axisbelow(True)


def _style(number: int) -> dict[str, str]:
    """Of a row, the same in all pictures."""
    return {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)]}


def _legend(where: Any, handles: Mapping[str, Any], **options: Any) -> None:
    if handles:
        where.legend(handles.values(), list(map(in_plot, handles)), fontsize="small", **options)


# --- curves and domains ---


def plot(rows: Sequence[Row], measure: str | None = None, axis: str | None = None) -> Plot:
    """Plot the measure that runs are compared by, and that of the personal models if there are some.

    `measure` is another key of the history; `axis`, a key of AXES, leaves a single panel.
    """
    from .figure import Plot

    keys = [each.key for each in measures(line for run in runs_of(rows) for line in run.lines)]
    for kind, given, known in (("measure", measure, keys), ("axis", axis, AXES)):
        if given is not None and given not in known:
            raise UserError(f"the plot has no {kind} {given!r}; {did_you_mean(given, known)}")
    measure = measure or headline(runs_of(rows))
    if axis:
        return curve_panel(rows, measure, axis)
    domains, own = by_domain(rows), f"clients_own_{measure}"
    keys = [measure, *([own] if any(row.figures(own) for row in rows) else [])]
    lines = [line for row in rows for run in row.counted for line in run.lines]
    within = any(line["communication_rounds"] != 1 for line in lines)  # a round exchanges more than a model
    axes = [each for each in _PANELS if each != "communication_rounds" or within]
    places: list[Any] = [[f"{key} {each}" for each in axes] for key in keys]
    places += [[prefix] * len(axes) for prefix in domains]
    heights = [4.2] * len(keys) + [2.8] * len(domains)
    figure = Plot(figsize=(15, 0.5 + sum(heights)))
    note = " Band: ± one standard deviation over seeds." if any(_has_band(row, len(rows)) for row in rows) else ""
    figure.suptitle(in_plot(set_up(rows) + note, 150), fontsize="medium")
    panels = figure.subplot_mosaic(places, height_ratios=heights)
    handles: dict[str, Any] = {}
    for key in keys:
        # A row without a global model has its clients in the panels of `own` only.
        shown = {i: row for i, row in enumerate(rows) if not (key == measure and own in keys and row.accuracy_of)}
        for each in axes:
            handles |= _curves(panels[f"{key} {each}"], shown, len(rows), key, each)
    for prefix, names in domains.items():
        of, found = Measure.of(prefix.removesuffix("_")), {row.title: in_domains(row, prefix, names) for row in rows}
        _side_by_side(panels[prefix], of, [*names, "average"], found)
        _finish(panels[prefix], f"{of.title}, by domain", grid="y", ylabel=of.unit)
    _legend(figure, handles, loc="outside right upper", handlelength=4)
    return figure


def curve_panel(rows: Sequence[Row], measure: str, axis: str, *, scale: str = "linear") -> Plot:
    """A single panel with its legend inside."""
    figure, (panel,) = _panels(1, 1, 6, 4.2)
    _legend(panel, _curves(panel, dict(enumerate(rows)), len(rows), measure, axis), handlelength=3)
    panel.set_yscale(scale)
    return figure


def _curves(panel: Any, shown: Mapping[int, Row], rows: int, key: str, axis: str) -> dict[str, Any]:
    """Draw the rows into a panel; returns the lines of the legend."""
    from matplotlib.ticker import MaxNLocator

    measure, handles = Measure.of(key), {}
    for number, row in shown.items():
        places, found = curve([run.lines for run in row.counted], key, axis)
        if not places:
            continue
        means = [measure.scale * statistics.fmean(values) for values in found]
        step = max(1, len(places) // 8)
        (handles[row.title],) = panel.plot(
            places,
            means,
            linestyle=_DASHES[number % len(_DASHES)],
            # An earlier line is wider, so that it is visible below a later one.
            linewidth=1.2 + 1.8 * (rows - number) / rows,
            **_style(number),
            markersize=5,
            markevery=(number * step // rows % max(1, len(places)), step),
        )
        if _has_band(row, rows):
            spread = [measure.scale * statistics.stdev(values) for values in found]
            low, high = ([a + sign * b for a, b in zip(means, spread, strict=True)] for sign in (-1, 1))
            panel.fill_between(places, low, high, color=_style(number)["color"], alpha=0.15, lw=0)
        if row.diverged:
            panel.plot(places[-1], means[-1], **_END, color=_style(number)["color"])
        for x, y in thinned(list(zip(places, means, strict=True)), _TIPS):
            panel.figure.tip(panel, x, y, f"{row.title}: {y:.4g}{measure.unit} at {x:.6g} {AXES[axis]}")
    _finish(panel, "", xlabel=AXES[axis], ylabel=in_plot(measure.axis))
    panel.set_xlim(left=0)
    if axis not in ("mib", "seconds"):
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    return handles


def _has_band(row: Row, rows: int) -> bool:
    """Whether the deviation over its runs is drawn in a picture of so many rows."""
    return rows <= _MOST_BANDS and len(row.counted) > 1


def _side_by_side(
    panel: Any,
    measure: Measure,
    names: Sequence[str],
    found: Mapping[str, Sequence[Sequence[float]]],
    diverged: Mapping[tuple[str, int], str] = MappingProxyType({}),
) -> dict[str, Any]:
    """Dots for each name: those of a run, with a line for the deviation over seeds; returns the lines of the legend.

    `diverged` has words on the titles and places where runs diverged, which get a cross on the axis.
    """
    handles: dict[str, Any] = {}
    for number, (title, columns) in enumerate(found.items()):
        aside = (0.8 * number - 0.4 * (len(found) - 1)) / len(found)
        for place, values in enumerate(columns):
            if values and math.isfinite(mean(values)):
                x, y, spread = place + aside, measure.scale * mean(values), measure.scale * (deviation(values) or 0.0)
                handles[title] = panel.errorbar(x, y, spread, linestyle="none", markersize=7, **_style(number))
                panel.figure.tip(panel, x, y, f"{title}, {names[place]}: {as_measured(measure, values)}")
            if words := diverged.get((title, place)):
                x, on_axis, style = place + aside, panel.get_xaxis_transform(), _style(number)
                panel.plot(x, 0, **_END, color=style["color"], transform=on_axis, clip_on=False)
                panel.figure.tip(panel, x, 0, f"{title}, {names[place]}: {words}", on_axis)
                handles.setdefault(title, panel.plot([], [], linestyle="none", markersize=7, **style)[0])
    for place in range(len(names) - 1):
        panel.axvline(place + 0.5, color="grey", lw=0.8)
    panel.set_xticks(range(len(names)), [in_plot(name, 20) for name in names])
    panel.set_xlim(-0.5, len(names) - 0.5)
    return handles


# --- sweeps ---


def sweeps_plot(sweeps: Sequence[Sweep], form: Form = DEFAULT) -> Plot:
    """A panel for each sweep and measure, with the values of the sweep side by side."""
    shown = [(sweep, measure) for sweep in sweeps for measure in measures_of_sweep(sweep, form)]
    figure, panels = _panels(len(shown), 3, 5.3, 4.2)
    labels = list(dict.fromkeys(label for sweep in sweeps for label in sweep.lines))
    handles: dict[str, Any] = {}
    for panel, (sweep, measure) in zip(panels, shown, strict=True):
        lines = {label: [sweep.lines.get(label, {}).get(word) for word in sweep.values] for label in labels}
        found = {label: [row.figures(measure.key) if row else [] for row in line] for label, line in lines.items()}
        diverged = {
            (label, place): row.divergence + row.marks.removeprefix(f" [{row.unfinished}]")
            for label, line in lines.items()
            for place, row in enumerate(line)
            if row and row.divergence
        }
        handles |= _side_by_side(panel, measure, sweep.values, found, diverged)
        note = " (cross: diverged)" if diverged else ""
        _finish(panel, sweep.title, grid="y", xlabel=in_plot(sweep.key) + note, ylabel=in_plot(measure.axis))
    _legend(figure, handles, loc="outside upper center", ncols=4)
    return figure


# --- clients ---


def clients_plot(rows: Sequence[Row]) -> Plot | None:
    """A panel for each main metric of single clients, with a box for each row; None if there are no values.

    The box is the middle half of the clients, its line the median, the diamond the mean; whiskers reach to the
    extremes.
    """
    rows = [row for row in rows if not row.diverged]
    metrics = {key: each for row in rows for run in row.counted for key, each in measures_of_clients(run).items()}
    if not metrics:
        return None
    figure, panels = _panels(len(metrics), 3, max(5.0, 2.5 + 0.7 * len(rows)), 4.2)
    for panel, (key, measure) in zip(panels, metrics.items(), strict=True):
        values = [
            [measure.scale * each for run in row.counted for each in run.clients.get(key, {}).values()] for row in rows
        ]
        finite = [list(filter(math.isfinite, each)) for each in values]
        panel.boxplot(finite, positions=range(len(rows)), **_BOX)
        panel.set_xticks(range(len(rows)), [in_plot(row.label, 24) for row in rows], rotation=20, ha="right")
        _finish(panel, measure.title, grid="y", xlim=(-0.6, len(rows) - 0.4), ylabel=measure.unit)
    return figure


# --- data of the clients ---


def partitions_plot(partitions: Sequence[PartitionCounts]) -> Plot:
    """Stacked bars, a bar for each client and a colour for each class; a panel for each partition."""
    widest = max(len(partition.counts) for partition in partitions)
    figure, panels = _panels(len(partitions), 1, min(14, 4.5 + 0.35 * widest), 3.6)
    for panel, partition in zip(panels, partitions, strict=True):
        classes, counts, clients = partition.classes, partition.counts, partition.clients
        places, bottom = range(len(counts)), [0] * len(counts)
        for label, colour in enumerate(class_colours(len(classes))):
            heights = [row[label] for row in counts]
            panel.bar(places, heights, 0.9, bottom, color=colour)
            for client, height in enumerate(heights):
                if height:
                    words = f"client {client}, {classes[label]}: {height} examples"
                    panel.figure.tip(panel, client, bottom[client] + height / 2, words)
                bottom[client] += height
        _finish(panel, partition.title, grid="y", xlabel="client", ylabel="examples", xlim=(-0.6, len(places) - 0.4))
        if clients:
            shown = thinned(places, _LABELLED)
            panel.set_xticks(shown, [in_plot(clients[i], 30) for i in shown], rotation=45, ha="right")
        if 1 < len(classes) <= _SHOWN_CLASSES:
            # In the order of the bars, the first class at the bottom; matplotlib omits names such as _other by itself.
            handles = dict(zip(classes[::-1], panel.containers[::-1], strict=True))
            _legend(panel, handles, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def class_colours(count: int) -> list[Any]:
    from matplotlib import colormaps

    return [colormaps["turbo"]((i + 0.5) / count)[:3] for i in range(count)]
