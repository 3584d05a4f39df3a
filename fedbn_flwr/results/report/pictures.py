"""The pictures of a report. Each is declared here once; `Plot` makes files and the pictures of the page of it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import numpy as np

from fedbn_flwr.errors import UserError, did_you_mean

from ..folder.clients import PartitionCounts
from ..text import in_plot
from .curves import AXES, Measure, curve, measures, thinned
from .rows import Row, Sweep, deviation, headline, mean, runs_of
from .tables import as_measured, by_domain, in_domains, measures_of_clients, set_up

if TYPE_CHECKING:
    from .figure import Plot  # imports matplotlib

# Okabe and Ito's palette, whose colours colour-blind readers can distinguish, with a darker yellow; and markers.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#A69B00")
MARKERS = ("o", "s", "^", "D", "v", "P", "<", ">", "p")

# Curves that are equal hide each other unless line style, marker and place of the markers differ.
_DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (7, 2, 1.5, 2)), (0, (3, 1, 1, 1, 1, 1)))
_MOST_BANDS = 8  # with more rows the bands of deviation cover each other
_LARGEST = 100  # inches
_PANELS = ("round", "communication_rounds", "mib")
_TIPS = 100  # points of a curve that have a tip, and squared the cells of a heat map
_SHOWN_CLASSES = 24  # in a legend
_LABELLED = 40  # more names of clients or layers do not fit
_BOX: dict[str, Any] = {
    "widths": 0.5,
    "whis": (0, 100),
    "showmeans": True,
    "medianprops": {"color": "black"},
    "meanprops": {"marker": "D", "markersize": 4, "markerfacecolor": "black", "markeredgecolor": "black"},
}


class Look(TypedDict, total=False):
    """What a plot shows, if not the default."""

    measure: str | None  # a key of history.jsonl, instead of what runs are compared by
    axis: str | None  # a key of AXES: a single panel, for a paper
    size: Sequence[float] | None  # width and height in inches
    band: bool | None  # the deviation over runs; by default of at most _MOST_BANDS rows


def _panels(count: int, columns: int, width: float, height: float, **options: Any) -> tuple[Plot, list[Any]]:
    """A figure with so many panels, each of a size in inches."""
    from .figure import Plot

    columns = min(columns, count)
    lines = -(-count // columns)
    figure = Plot(figsize=(width * columns, height * lines))
    panels = figure.subplots(lines, columns, squeeze=False, **options).flatten().tolist()
    for panel in panels[count:]:
        panel.set_visible(False)
    return figure, panels[:count]


def _finish(panel: Any, title: str, *, grid: Any = "both", **values: Any) -> None:
    panel.set(**values)
    panel.set_title(in_plot(title, 100), fontsize="medium", loc="left")
    panel.grid(axis=grid, alpha=0.3)
    panel.set_axisbelow(True)


def _style(number: int) -> dict[str, str]:
    """Of a row, the same in all pictures."""
    return {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)]}


# --- curves and domains ---


def plot(rows: Sequence[Row], **look: Unpack[Look]) -> Plot:
    """Plot the measure that runs are compared by, and that of the personal models if there are some."""
    from .figure import Plot

    _check(rows, look)
    band = len(rows) <= _MOST_BANDS if look.get("band") is None else bool(look.get("band"))
    measure = look.get("measure") or headline(runs_of(rows))
    if single := look.get("axis"):
        return curve_panel(rows, measure, single, size=look.get("size") or (6, 4.2), band=band)
    domains, own = by_domain(rows), f"clients_own_{measure}"
    keys = [measure, *([own] if any(row.figures(own) for row in rows) else [])]
    lines = [line for row in rows for run in row.counted for line in run.lines]
    within = any(line["communication_rounds"] != 1 for line in lines)  # a round exchanges more than a model
    axes = [axis for axis in _PANELS if axis != "communication_rounds" or within]
    places: list[Any] = [[f"{key} {axis}" for axis in axes] for key in keys]
    places += [[prefix] * len(axes) for prefix in domains]
    heights = [4.2] * len(keys) + [2.8] * len(domains)
    figure = Plot(figsize=tuple(look.get("size") or (15, 0.5 + sum(heights))))
    note = " Band: ± one standard deviation over seeds." if band and len(rows) < len(runs_of(rows)) else ""
    figure.suptitle(in_plot(set_up(rows) + note, 150), fontsize="medium")
    panels = figure.subplot_mosaic(places, height_ratios=heights)
    handles: dict[int, Any] = {}
    for key in keys:
        # A row without a global model has its clients in the panels of `own` only.
        shown = {i: row for i, row in enumerate(rows) if not (key == measure and own in keys and row.accuracy_of)}
        for axis in axes:
            handles |= _curves(figure, panels[f"{key} {axis}"], shown, len(rows), key, axis, band)
    for prefix, names in domains.items():
        kind, found = Measure.of(prefix.removesuffix("_")), {row.title: in_domains(row, prefix, names) for row in rows}
        _side_by_side(figure, panels[prefix], kind, [*names, "average"], found)
        _finish(panels[prefix], f"{kind.title}, by domain", grid="y", ylabel=kind.unit)
    _legend(figure, figure, rows, handles, loc="outside right upper", fontsize="small", handlelength=4)
    return figure


def curve_panel(
    rows: Sequence[Row],
    measure: str,
    axis: str,
    *,
    size: Sequence[float] = (6, 4.2),
    band: bool = True,
    log: bool = False,
    layout: Any = "constrained",
) -> Plot:
    """A single panel with its legend inside."""
    from .figure import Plot

    figure = Plot(figsize=tuple(size), layout=layout)
    panel = figure.subplots()
    handles = _curves(figure, panel, dict(enumerate(rows)), len(rows), measure, axis, band)
    if log:
        panel.set_yscale("log")
        panel.set_ylabel(f"{panel.get_ylabel()}, logarithmic")
    _legend(figure, panel, rows, handles, fontsize="x-small", handlelength=3)
    return figure


def _check(rows: Sequence[Row], look: Look) -> None:
    known = [measure.key for measure in measures(run.lines for run in runs_of(rows))]
    for name, found, names in (("measure", look.get("measure"), known), ("axis", look.get("axis"), AXES)):
        if found is not None and found not in names:
            raise UserError(f"the plot has no {name} {found!r}; {did_you_mean(found, names)}")
    if (size := look.get("size")) is not None and (len(size) != 2 or not all(0 < each <= _LARGEST for each in size)):
        raise UserError(f"the size of the plot is {size}; expected width and height, up to {_LARGEST} inches")


def _legend(figure: Plot, where: Any, rows: Sequence[Row], handles: Mapping[int, Any], **options: Any) -> None:
    if handles:
        names = [in_plot(rows[number].title) for number in sorted(handles)]
        where.legend([handles[number] for number in sorted(handles)], names, **options)


def _curves(
    figure: Plot, panel: Any, shown: Mapping[int, Row], rows: int, key: str, axis: str, band: bool
) -> dict[int, Any]:
    """Draw the rows into a panel; returns the lines of the legend by the rows' numbers."""
    from matplotlib.ticker import MaxNLocator

    measure, handles = Measure.of(key), {}
    for number, row in shown.items():
        places, found = curve([run.lines for run in row.counted], key, axis)
        if not places:
            continue
        means = [measure.scale * statistics.fmean(values) for values in found]
        step = max(1, len(places) // 8)
        (handles[number],) = panel.plot(
            places,
            means,
            linestyle=_DASHES[number % len(_DASHES)],
            # An earlier line is wider, so that it is visible below a later one.
            linewidth=1.2 + 1.8 * (rows - number) / rows,
            **_style(number),
            markersize=5,
            markevery=(number * step // rows % max(1, len(places)), step),
        )
        if band and len(found[0]) > 1:
            spread = [measure.scale * statistics.stdev(values) for values in found]
            low, high = ([a + sign * b for a, b in zip(means, spread, strict=True)] for sign in (-1, 1))
            panel.fill_between(places, low, high, color=_style(number)["color"], alpha=0.15, lw=0)
        tips = thinned(list(zip(places, means, found, strict=True)), _TIPS)
        words = [
            f"{row.title}: {measure.in_words(statistics.fmean(each))} at {x:.6g} {AXES[axis]}" for x, _, each in tips
        ]
        figure.tips(panel, [(x, y) for x, y, _ in tips], words)
    _finish(panel, "", xlabel=AXES[axis], ylabel=in_plot(measure.axis))
    panel.set_xlim(left=0)
    if axis not in ("mib", "seconds"):
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    return handles


def _side_by_side(
    figure: Plot, panel: Any, measure: Measure, names: Sequence[str], found: Mapping[str, Sequence[Sequence[float]]]
) -> dict[str, Any]:
    """Dots for each name: those of a run, with a line for the deviation over seeds; returns the lines of the legend."""
    handles: dict[str, Any] = {}
    for number, (title, columns) in enumerate(found.items()):
        places = [i for i, values in enumerate(columns) if values and math.isfinite(mean(values))]
        if not places:
            continue
        means = [measure.scale * mean(columns[i]) for i in places]
        spreads = [measure.scale * (deviation(columns[i]) or 0.0) for i in places]
        aside = (0.8 * number - 0.4 * (len(found) - 1)) / len(found)
        beside = [i + aside for i in places]
        style = {"linestyle": "none", "markersize": 7, **_style(number)}
        handles[title] = panel.errorbar(beside, means, spreads, **style)
        words = [f"{title}, {names[i]}: {as_measured(measure, columns[i])}" for i in places]
        figure.tips(panel, list(zip(beside, means, strict=True)), words)
    for place in range(len(names) - 1):
        panel.axvline(place + 0.5, color="grey", lw=0.8)
    panel.set_xticks(range(len(names)), [in_plot(name, 20) for name in names])
    panel.set_xlim(-0.5, len(names) - 0.5)
    return handles


# --- sweeps ---


def sweeps_plot(sweeps: Sequence[Sweep]) -> Plot | None:
    """A panel for each sweep, with its values side by side."""
    if not sweeps:
        return None
    figure, panels = _panels(len(sweeps), 3, 5.3, 4.2)
    labels = list(dict.fromkeys(label for sweep in sweeps for label in sweep.lines))
    handles: dict[str, Any] = {}
    for panel, sweep in zip(panels, sweeps, strict=True):
        measure, lines = sweep.measure, {label: sweep.lines.get(label, {}) for label in labels}
        found = {
            label: [line[word].figures(measure.key) if word in line else [] for word in sweep.values]
            for label, line in lines.items()
        }
        handles |= _side_by_side(figure, panel, measure, sweep.values, found)
        _finish(panel, sweep.title, grid="y", xlabel=in_plot(sweep.key), ylabel=in_plot(measure.axis))
    names = [in_plot(label) for label in handles]
    figure.legend(handles.values(), names, loc="outside upper center", ncols=4, fontsize="small")
    return figure


# --- clients ---


def clients_plot(rows: Sequence[Row]) -> Plot | None:
    """A panel for each main metric of single clients, with a box for each row; None if there are no values.

    The box is the middle half of the clients, its line the median, the diamond the mean; whiskers reach to the
    extremes.
    """
    runs = [run for row in rows for run in row.counted]
    metrics = {key: each for run in runs for key, each in measures_of_clients(run).items()}
    if not metrics:
        return None
    figure, panels = _panels(len(metrics), 3, max(5.0, 2.5 + 0.7 * len(rows)), 4.2)
    for panel, (key, measure) in zip(panels, metrics.items(), strict=True):
        found = [_of_clients(row, key, measure) for row in rows]
        values = [[value for value, _ in each] for each in found]
        panel.boxplot(values, positions=range(len(rows)), **_BOX)
        for number, each in enumerate(found):
            # Side by side, so that equal clients can be distinguished.
            step = 0.4 / max(len(each) - 1, 1)
            places = [number + step * (i - (len(each) - 1) / 2) for i in range(len(each))]
            panel.plot(places, values[number], ".", alpha=0.5, color=_style(number)["color"])
            shown = thinned(list(zip(places, each, strict=True)), _TIPS)
            figure.tips(panel, [(place, value) for place, (value, _) in shown], [words for _, (_, words) in shown])
        panel.set_xticks(range(len(rows)), [in_plot(row.label, 24) for row in rows], rotation=20, ha="right")
        _finish(panel, measure.title, grid="y", xlim=(-0.6, len(rows) - 0.4), ylabel=measure.unit)
    return figure


def _of_clients(row: Row, key: str, measure: Measure) -> list[tuple[float, str]]:
    """The finite values of all clients in all runs of a row, as they are shown, and in words."""
    return [
        (measure.scale * value, f"{row.label}, seed {run.summary.seed}, client {client}: {measure.in_words(value)}")
        for run in row.counted
        for client, value in run.clients.get(key, {}).items()
        if math.isfinite(value)
    ]


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
            named = [i for i, height in enumerate(heights) if height]
            words = [f"client {i}, {classes[label]}: {heights[i]} examples" for i in named]
            figure.tips(panel, [(i, bottom[i] + heights[i] / 2) for i in named], words)
            bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
        _finish(panel, partition.title, grid="y", xlabel="client", ylabel="examples", xlim=(-0.6, len(places) - 0.4))
        shown = places[:: -(-len(places) // _LABELLED)]
        names = [in_plot(clients[i] if clients else str(i), 30) for i in shown]
        slanted = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"}
        panel.set_xticks(shown, names, **(slanted if clients else {}))
        if 1 < len(classes) <= _SHOWN_CLASSES:
            # In the order of the bars, the first class at the bottom; matplotlib omits names such as _other by itself.
            names = [in_plot(name, 30) for name in classes[::-1]]
            panel.legend(panel.containers[::-1], names, loc="center left", bbox_to_anchor=(1, 0.5), fontsize="small")
    return figure


def class_colours(count: int) -> list[Any]:
    from matplotlib import colormaps

    return [colormaps["turbo"]((i + 0.5) / count)[:3] for i in range(count)]


# --- batch norm by layer ---

# The panels: a figure of norms.jsonl, whose clients are averaged, and a title.
_DYNAMICS = {
    "mean_drift": "global mean, change from the round before",
    "variance_drift": "global variance, change from the round before",
    "mean_deviation": "clients' means, distance from the global one",
    "variance_deviation": "clients' variances, distance from the global one",
}


def dynamics_plot(lines: Sequence[Mapping[str, Any]]) -> Plot:
    """Plot layers against rounds, a panel for each quantity; `lines` are those of norms.jsonl."""
    from matplotlib.colors import LogNorm

    layers, rounds = list(lines[0]["layers"]), [int(line["round"]) for line in lines]
    height = (2.5 + 0.36 * min(len(layers), _LABELLED)) / 2
    figure, panels = _panels(4, 2, 7, height, sharex=True, sharey=True)
    # A round that is not recorded has the colour of the recorded one before it.
    edges = [number - 0.5 for number in (*rounds, 2 * rounds[-1] - rounds[-2] if len(rounds) > 1 else rounds[-1] + 1)]
    cells = [(i, j) for i in range(len(layers)) for j in range(len(rounds))]
    shown = range(0, len(layers), -(-len(layers) // _LABELLED))
    for panel, (name, title) in zip(panels, _DYNAMICS.items(), strict=True):
        values = np.nan_to_num([[_value(line, layer, name) for line in lines] for layer in layers])
        norm = LogNorm(values.min(where=values > 0, initial=1.0), values.max() or 1.0)
        panel.set_facecolor("lightgrey")  # a logarithm has no colour for 0
        image = panel.pcolormesh(edges, range(len(layers) + 1), values, norm=norm, rasterized=True)
        figure.colorbar(image, ax=panel)
        panel.set_title(title, fontsize="medium", loc="left")
        panel.set_yticks([i + 0.5 for i in shown], [in_plot(layers[i], 40) for i in shown], fontsize="small")
        if len(cells) <= _TIPS**2:
            words = [f"{layers[i]}, round {rounds[j]}: {values[i, j]:.3g}" for i, j in cells]
            figure.tips(panel, [(rounds[j], i + 0.5) for i, j in cells], words)
    for panel in panels[2:]:
        panel.set_xlabel("round")
    panels[0].invert_yaxis()  # shared by all: the first layer is on top
    figure.suptitle("grey: no distance (frozen statistics)", fontsize="medium", x=0.01, ha="left")
    return figure


def _value(line: Mapping[str, Any], layer: str, name: str) -> float:
    """Of the layer, or the mean over the clients; 0 if it was not recorded."""
    found = [of[layer][name] for of in (line["layers"], *line["clients"].values()) if name in of.get(layer, {})]
    return statistics.fmean(found or [0.0])
