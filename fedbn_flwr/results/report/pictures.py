"""The pictures of a report: files with all panels, and in the page each panel as a picture of its own.

A panel is declared once, as a function that draws it and returns the lines of its legend.
"""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, cast

from fedbn_flwr.errors import UserError, did_you_mean
from fedbn_flwr.results.text import in_plot

from ..folder.clients import PartitionCounts
from ..metric_key import OWN, MetricKey
from .curves import AXES, curve, is_number, measures, thin
from .rows import Row, Sweep, both, deviation, headline, mean, runs_of, sweeps
from .tables import (
    DEFAULT,
    ReportForm,
    by_domain,
    in_domains,
    measures_of_clients,
    measures_of_sweep,
    set_up,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from .figure import Plot  # imports matplotlib

# Okabe and Ito's palette, whose colours colour-blind readers can distinguish, with a darker yellow; and markers.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#A69B00")
MARKERS = ("o", "s", "^", "D", "v", "P", "<", ">", "p")

Style = Mapping[str, Any]  # keywords of matplotlib
Handles = dict[str, Any]  # curves, or other artists, by their titles in the legend
# Curves that are equal hide each other unless line style, marker and place of the markers differ.
_DASHES: tuple[object, ...] = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (7, 2, 1.5, 2)), (0, (3, 1, 1, 1, 1, 1)))
_CLIENTS = 100  # bars of a picture of the page
_CURVES = 100  # of the page; each takes a quarter of a second
_ALONE = 4.6, 3.4  # inches of a picture of the page, whose text can be read on a phone
_MOST_BANDS = 8  # with more rows the bands of deviation cover each other
_PANELS = ("round", "communication_rounds", "mib")
_CLASSES = 100  # more colours cannot be distinguished
_SHOWN_CLASSES = 24  # in a legend
_LABELLED = 3  # more names of clients do not fit in an inch
_END: Style = {"marker": "x", "markersize": 11, "markeredgewidth": 2.5}  # of a curve that diverged
_BOX: Style = {
    "widths": 0.5,
    "whis": (0, 100),
    "showmeans": True,
    "medianprops": {"color": "black"},
    "meanprops": {"marker": "D", "markersize": 4, "markerfacecolor": "black", "markeredgecolor": "black"},
}

Draw = Callable[["Axes"], Handles]


def _panels(count: int, columns: int, width: float, height: float) -> tuple[Plot, list[Axes]]:
    """A figure with `count` panels, each of this size in inches."""
    from .figure import Plot

    columns = min(columns, count)
    lines = -(-count // columns)
    figure = Plot(figsize=(width * columns, height * lines))
    return figure, [figure.add_subplot(lines, columns, number + 1) for number in range(count)]


def _picture_of(panel: Axes) -> Plot:
    return cast("Plot", panel.figure)


def _finish(panel: Axes, title: str, *, grid: Literal["both", "y"] = "both", **values: Any) -> None:
    panel.set(**values)
    inches = panel.get_position().width * _picture_of(panel).get_figwidth()
    panel.set_title(textwrap.fill(in_plot(title, 100), int(12 * inches)), fontsize="medium", loc="left")
    panel.grid(axis=grid, alpha=0.3)
    panel.set_axisbelow(True)


def _style(colour: int, mark: int) -> Style:
    return {
        "color": COLOURS[colour % len(COLOURS)],
        "marker": MARKERS[mark % len(MARKERS)],
        "linestyle": _DASHES[mark % len(_DASHES)],
    }


def _styles(rows: Sequence[Row]) -> list[Style]:
    """The style of each row, the same in all pictures.

    In a sweep the colour stands for the strategy, and marker and dash stand for the value. Rows that look the same
    then, and rows outside of sweeps, differ in all three.
    """
    names = [row.strategy for row in rows]
    values = [str(list((row.first.cell.get("sweep") or {}).values())) for row in rows]
    known = list(dict.fromkeys(names)), list(dict.fromkeys(values))
    places = [(known[0].index(name), known[1].index(value)) for name, value in zip(names, values, strict=True)]
    told_apart = len({*places}) == len(rows) and len(known[0]) <= len(COLOURS) and 1 < len(known[1]) <= len(MARKERS)
    return [_style(*place) for place in (places if told_apart else [(n, n) for n in range(len(rows))])]


def _legend(where: Plot | Axes, handles: Handles, **options: Any) -> None:
    if handles:
        where.legend(handles.values(), list(map(in_plot, handles)), fontsize="small", **options)


def _grid(draws: Sequence[Draw], columns: int, width: float, **legend: Any) -> Plot:
    """Panels of this width in inches, with a common legend."""
    figure, panels = _panels(len(draws), columns, width, 4.2)
    handles = [draw(panel) for draw, panel in zip(draws, panels, strict=True)]
    _legend(figure, {title: line for panel in handles for title, line in panel.items()}, **legend)
    return figure


# --- the page ---

# Of a page: the section, the name of the pictures, which are folded in if they have one, and the pictures.
Pictures = Iterable[tuple[str, str, Iterable["Plot"]]]


def alone(draw: Draw, width: float = 0, scale: str = "linear") -> Plot:
    """A panel as a picture of the page, with the legend below it."""
    figure, (panel,) = _panels(1, 1, max(width, _ALONE[0]), _ALONE[1])
    handles = draw(panel)
    panel.set_yscale(scale)
    columns = max(1, 66 // (12 + min(60, max(map(len, handles), default=0))))
    figure.set_figheight(_ALONE[1] + 0.18 * -(-len(handles) // columns))
    _legend(figure, handles, loc="outside lower left", ncols=columns, handlelength=4)
    return figure


def pictures_of_page(rows: Sequence[Row], form: ReportForm) -> Pictures:
    """The panels of the main picture, of sweeps and of clients, and a picture of each measure and partition."""
    first = first_of(rows, form)
    boxes = (alone(draw, 1.5 + 0.22 * len(rows)) for draw in _of_clients(rows))
    yield "Pictures", "", chain(map(alone, chain(*_main(rows, first), _of_sweeps(rows, form))), boxes)
    main = both(first, rows)
    lines = [line for row in rows for run in row.counted for line in run.lines]
    for measure in sorted(measures(lines), key=lambda measure: measure != first)[:_CURVES]:
        draw = partial(
            _curves, rows, rows, measure, "seconds" if measure in main else "round"
        )  # others are in the plot
        values = [line[str(measure)] for line in lines if is_number(line.get(str(measure)))]
        scales = ("linear", "log") if not measure.is_fraction and min(values, default=0) > 0 else ("linear",)
        yield "Curves", measure.title, [alone(draw, scale=scale) for scale in scales]
    known = (row.first.files.partition() for row in rows)  # other seeds are alike
    for found in {repr(counts): counts for counts in known if counts}.values():
        shown = found.model_copy(update={key: getattr(found, key)[:_CLIENTS] for key in ("counts", "clients")})
        yield "Data of the clients", found.title, [alone(partial(_bars, shown))]


# --- curves and domains ---


def _measured(rows: Sequence[Row]) -> list[MetricKey]:
    """The metrics that have a curve."""
    return measures(line for run in runs_of(rows) for line in run.lines)


def first_of(rows: Sequence[Row], form: ReportForm) -> MetricKey:
    """The measure of the main picture: the first column that is asked for and has a curve, the usual one, or any."""
    known, usual = _measured(rows), headline(runs_of(rows))
    return next((key for key in (*map(MetricKey.parse, form.columns), usual, *known) if key in known), usual)


def plot(rows: Sequence[Row], measure: MetricKey | None = None, axis: str | None = None) -> Plot:
    """Plot the measure that runs are compared by, and the same measure of other models if there are some.

    `measure` is another key of the history; `axis`, a key of AXES, leaves a single panel.
    """
    from .figure import Plot

    keys = list(map(str, _measured(rows)))
    for kind, given, known in (("measure", str(measure), keys if measure else ()), ("axis", str(axis), axis and AXES)):
        if known and given not in known:  # without an evaluated round all plots are empty
            raise UserError(f"the plot has no {kind} {given!r}; {did_you_mean(given, known)}")
    measure = measure or headline(runs_of(rows))
    if axis:  # a single panel with its legend inside
        figure, (panel,) = _panels(1, 1, 6, 4.2)
        _legend(panel, _curves(rows, rows, measure, axis, panel), handlelength=3)
        return figure
    lines = _main(rows, measure)
    across, heights = max(map(len, lines)), [4.2 if len(line) > 1 else 2.8 for line in lines]
    figure = Plot(figsize=(15, 0.5 + sum(heights)))
    note = " Band: ± one standard deviation over seeds." if any(_has_band(row, rows) for row in rows) else ""
    figure.suptitle(in_plot(set_up(rows) + note, 150), fontsize="medium")
    mosaic: Any = [line * (across if len(line) == 1 else 1) for line in lines]
    handles: Handles = {}
    for draw, panel in figure.subplot_mosaic(mosaic, height_ratios=heights).items():
        handles = handles | draw(panel) | handles  # dots by domain look as the curves of their rows
    _legend(figure, handles, loc="outside right upper", handlelength=4)
    return figure


def _main(rows: Sequence[Row], measure: MetricKey) -> list[list[Draw]]:
    """A line of panels for each measure, with a panel for each axis, and a panel for each kind of domains."""
    keys = both(measure, rows)
    lines = [line for row in rows for run in row.counted for line in run.lines]
    within = any(line["communication_rounds"] != 1 for line in lines)  # a round exchanges more than a model
    axes = [axis for axis in _PANELS if axis != "communication_rounds" or within]
    # A row without a global model has its clients in the panels of their own examples only.
    of_model = [row for row in rows if not row.accuracy_of]
    shown = {key: of_model if len(keys) > 1 and key.whose != OWN else rows for key in keys}
    found: list[list[Draw]] = [[partial(_curves, rows, shown[key], key, axis) for axis in axes] for key in keys]
    return found + [[partial(_domains, rows, *domains)] for domains in by_domain(rows).items()]


def _curves(rows: Sequence[Row], shown: Sequence[Row], measure: MetricKey, axis: str, panel: Axes) -> Handles:
    """Draw the rows that are in `shown`, in the styles that they have among all rows."""
    from matplotlib.ticker import MaxNLocator

    handles, count = {}, len(rows)
    for number, (row, style) in enumerate(zip(rows, _styles(rows), strict=True)):
        places, found = curve([run.lines for run in row.counted], measure, axis)
        if row not in shown or not places:
            continue
        means = [measure.scale * statistics.fmean(values) for values in found]
        step = max(1, len(places) // 8)
        (handles[row.title],) = panel.plot(
            places,
            means,
            # An earlier line is wider, so that it is visible below a later one.
            linewidth=1.2 + 1.8 * (count - number) / count,
            **style,
            markersize=5,
            markevery=(number * step // count % max(1, len(places)), step),
        )
        if _has_band(row, rows):
            spread = [measure.scale * statistics.stdev(values) for values in found]
            low, high = ([a + sign * b for a, b in zip(means, spread, strict=True)] for sign in (-1, 1))
            panel.fill_between(places, low, high, color=style["color"], alpha=0.15, lw=0)
        if row.diverged:
            panel.plot(places[-1], means[-1], **_END, color=style["color"])
    _finish(panel, "", xlabel=AXES[axis], ylabel=in_plot(measure.axis))
    panel.set_xlim(left=0)
    if axis not in ("mib", "seconds"):
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    return handles


def _domains(rows: Sequence[Row], measure: MetricKey, keys: Sequence[MetricKey], panel: Axes) -> Handles:
    names, found = [*(key.domain for key in keys), "average"], {row.title: in_domains(row, keys) for row in rows}
    handles = _side_by_side(panel, measure, names, found, _styles(rows))
    _finish(panel, f"{measure.title}, by domain", grid="y", ylabel=measure.unit)
    return handles


def _has_band(row: Row, rows: Sequence[Row]) -> bool:
    """Whether the deviation over its runs is drawn in a picture of these rows."""
    return len(rows) <= _MOST_BANDS and len(row.counted) > 1


def _side_by_side(
    panel: Axes,
    measure: MetricKey,
    names: Sequence[str],
    found: Mapping[str, Sequence[Sequence[float]]],
    styles: Sequence[Style],
    diverged: Collection[tuple[str, int]] = (),
) -> Handles:
    """A dot for each name and title, with a line for the deviation over seeds.

    `diverged` has the titles and places of runs that diverged; they get a cross on the axis.
    """
    handles: dict[str, object] = {}
    for number, ((title, columns), look) in enumerate(zip(found.items(), styles, strict=True)):
        style = {**look, "linestyle": "none", "markersize": 7}
        aside = (0.8 * number - 0.4 * (len(found) - 1)) / len(found)
        for place, values in enumerate(columns):
            if values and math.isfinite(mean(values)):
                x, y, spread = place + aside, measure.scale * mean(values), measure.scale * (deviation(values) or 0.0)
                handles[title] = panel.errorbar(x, y, spread, **style)
            if (title, place) in diverged:
                on_axis = panel.get_xaxis_transform()
                panel.plot(place + aside, 0, **_END, color=style["color"], transform=on_axis, clip_on=False)
                handles.setdefault(title, panel.plot([], [], **style)[0])
    for place in range(len(names) - 1):
        panel.axvline(place + 0.5, color="grey", lw=0.8)
    panel.set_xticks(range(len(names)), [in_plot(name, 20) for name in names])
    panel.set_xlim(-0.5, len(names) - 0.5)
    return handles


# --- sweeps ---


def sweeps_plot(rows: Sequence[Row], form: ReportForm = DEFAULT) -> Plot:
    """A panel for each sweep and measure, with the values of the sweep side by side."""
    return _grid(_of_sweeps(rows, form), 3, 5.3, loc="outside upper center", ncols=4)


def _of_sweeps(rows: Sequence[Row], form: ReportForm) -> list[Draw]:
    found, others = sweeps(rows), [row for row in rows if not row.first.cell.get("sweep")]
    labels = list(dict.fromkeys(label for sweep in found for label in sweep.lines))
    panels = ((sweep, measure) for sweep in found for measure in measures_of_sweep(sweep, form))
    return [partial(_dots, sweep, measure, labels, others) for sweep, measure in panels]


def _dots(sweep: Sweep, measure: MetricKey, labels: Sequence[str], others: Sequence[Row], panel: Axes) -> Handles:
    """A row outside of the sweep, such as a baseline, is a line across all values."""
    lines = {label: [sweep.lines.get(label, {}).get(word) for word in sweep.values] for label in labels}
    found = {label: [row.values(measure) if row else [] for row in line] for label, line in lines.items()}
    places = ((label, place, row) for label, line in lines.items() for place, row in enumerate(line))
    diverged = [(label, place) for label, place, row in places if row is not None and row.divergence]
    styles = [_style(number, number) for number in range(len(labels))]
    handles = _side_by_side(panel, measure, sweep.values, found, styles, diverged)
    for number, row in enumerate(others, len(labels)):
        if (values := row.values(measure)) and math.isfinite(mean(values)):
            style = {**_style(number, number), "marker": "none"}
            handles[row.title] = panel.axhline(measure.scale * mean(values), **style, linewidth=1.2, zorder=1)
    note = " (cross: diverged)" if diverged else ""
    _finish(panel, sweep.title, grid="y", xlabel=in_plot(sweep.key) + note, ylabel=in_plot(measure.axis))
    return handles


# --- clients ---


def clients_plot(rows: Sequence[Row]) -> Plot | None:
    """A panel for each metric that clients report, with a box for each row; None without values."""
    draws = _of_clients(rows)
    return _grid(draws, 3, max(5.0, 2.5 + 0.7 * len(rows))) if draws else None


def _of_clients(rows: Sequence[Row]) -> list[Draw]:
    rows = [row for row in rows if not row.diverged]
    metrics = {key: measure for row in rows for run in row.counted for key, measure in measures_of_clients(run).items()}
    return [partial(_boxes, rows, key, measure) for key, measure in metrics.items()]


def _boxes(rows: Sequence[Row], key: str, measure: MetricKey, panel: Axes) -> Handles:
    """The box is the middle half of the clients, its line the median, the diamond the mean; whiskers reach to the
    extremes.
    """
    rows = [row for row in rows if any(key in run.clients for run in row.counted)]
    values = [[value for run in row.counted for value in run.clients.get(key, {}).values()] for row in rows]
    finite = [[measure.scale * value for value in own if math.isfinite(value)] for own in values]
    panel.boxplot(finite, positions=range(len(rows)), **_BOX)
    panel.set_xticks(range(len(rows)), [in_plot(row.label, 24) for row in rows], rotation=40, ha="right")
    _finish(panel, measure.title, grid="y", xlim=(-0.6, len(rows) - 0.4), ylabel=measure.unit)
    return {}


# --- data of the clients ---


def partitions_plot(partitions: Sequence[PartitionCounts]) -> Plot:
    """Stacked bars, a bar for each client and a colour for each class; a panel for each partition."""
    widest = max(len(partition.counts) for partition in partitions)
    figure, panels = _panels(len(partitions), 1, min(14, 4.5 + 0.35 * widest), 3.6)
    for panel, partition in zip(panels, partitions, strict=True):
        _legend(panel, _bars(partition, panel), loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def _bars(partition: PartitionCounts, panel: Axes) -> Handles:
    classes, counts, clients = partition.classes, partition.counts, partition.clients
    if (rest := len(classes) - _CLASSES) > 0:
        classes = (*classes[:_CLASSES], f"{rest} other classes")
        counts = tuple((*row[:_CLASSES], sum(row[_CLASSES:])) for row in counts)
    places, bottom = range(len(counts)), [0] * len(counts)
    for label, colour in enumerate(class_colours(len(classes))):
        heights = [row[label] for row in counts]
        panel.bar(places, heights, 0.9, bottom, color=colour)
        bottom = list(map(sum, zip(bottom, heights, strict=True)))
    _finish(panel, partition.title, grid="y", xlabel="client", ylabel="examples", xlim=(-0.6, len(places) - 0.4))
    if clients:
        shown = thin(places, int(_LABELLED * _picture_of(panel).get_figwidth()))
        panel.set_xticks(shown, [in_plot(clients[i], 30) for i in shown], rotation=45, ha="right")
    # In the order of the bars, the first class at the bottom; matplotlib omits names such as _other by itself.
    named = 1 < len(classes) <= _SHOWN_CLASSES
    return dict(zip(classes[::-1], panel.containers[::-1], strict=True)) if named else {}


def class_colours(count: int) -> list[tuple[float, ...]]:
    from matplotlib import colormaps

    return [colormaps["turbo"]((i + 0.5) / count)[:3] for i in range(count)]
