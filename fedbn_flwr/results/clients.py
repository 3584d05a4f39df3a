"""Clients as individuals: the values of each client, their spread, a table and a box plot.

`clients.jsonl` has a line per round, {"round": 3, "clients": {"0": {"images": 96, "train_loss": 0.4, ...}, ...}}. All
figures here give each client the same weight. They describe the clients that took part, so the deviation is that of
the whole group (divisor n), not an estimate from a sample.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .text import in_plot, shorten

Values = Mapping[str, float]  # by client, of one metric

_FIRST = ("accuracy", "own_accuracy")
_MAIN = (*_FIRST, "mean_iou", "own_mean_iou", "unseen_accuracy", "unseen_accuracy_tuned")
_IMAGES = re.compile(r"(own_|test_|validation_|unseen_)?images(_|$)")
_PANELS = 3  # of a box plot beside each other


@dataclass(frozen=True)
class Spread:
    mean: float
    deviation: float
    worst_tenth: float  # the mean of the worst tenth of the clients, rounded up to whole clients


def spread(values: Sequence[float], metric: str) -> Spread:
    """The spread of a metric over clients. The worst losses are the highest, other metrics are worst if low."""
    if not all(map(math.isfinite, values)):  # a client diverged
        return Spread(math.nan, math.nan, math.nan)
    mean = statistics.fmean(values)
    worst = sorted(values, reverse=is_loss(metric))[: math.ceil(len(values) / 10)]
    return Spread(mean, math.sqrt(statistics.fmean((value - mean) ** 2 for value in values)), statistics.fmean(worst))


def is_loss(metric: str) -> bool:
    return "loss" in metric.split("_")


def is_count(metric: str) -> bool:
    """Whether it is a number of images, for instance of a client's own test images of one domain."""
    return _IMAGES.match(metric) is not None


def last_values(lines: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Each metric's values by client, from the last round in which it was measured; some clients may lack one."""
    found: dict[str, dict[str, float]] = {}
    for line in lines:
        latest: dict[str, dict[str, float]] = {}
        for client, metrics in line["clients"].items():
            for metric, value in metrics.items():
                latest.setdefault(metric, {})[client] = value
        found |= latest
    return found


def evaluated(values: Mapping[str, Values]) -> dict[str, Values]:
    """The metrics without losses and numbers of images; those on the clients' own test images come first."""
    shown = {key: each for key, each in values.items() if not (is_count(key) or is_loss(key))}
    return dict(sorted(shown.items(), key=lambda item: (not item[0].startswith("own_"), item[0] not in _FIRST)))


def main(values: Mapping[str, Values]) -> dict[str, Values]:
    """The metrics that a terminal and a picture have room for: not those of domains, validation and of the user."""
    return {key: each for key, each in evaluated(values).items() if key in _MAIN}


def heading(metric: str) -> str:
    """The words for a metric in tables and plots: "accuracy on own test images"."""
    if metric.startswith("unseen_"):
        tuned = ", fine-tuned" if metric.endswith("_tuned") else ""
        return (
            f"{heading(metric.removeprefix('unseen_').removesuffix('_tuned')).split(' on ')[0]} of new clients{tuned}"
        )
    if metric.startswith("validation_"):
        return metric.replace("_", " ")
    owned = metric.startswith("own_")
    name = metric.removeprefix("own_").replace("_", " ").replace(" iou", " IoU")
    return f"{name} on {'own' if owned else 'all'} test images"


def plot_boxes(runs: Mapping[str, Sequence[Mapping[str, Values]]], colours: Sequence[str], file: Path) -> bool:
    """Write a plot with a panel for each main metric of each seed by label (`runs`). False: nothing to show."""
    from .figure import Plot

    shown = {label: [main(values) for values in seeds] for label, seeds in runs.items()}
    metrics = list(dict.fromkeys(metric for seeds in shown.values() for values in seeds for metric in values))
    if not metrics:
        return False
    columns, lines = min(len(metrics), _PANELS), math.ceil(len(metrics) / _PANELS)
    figure = Plot(figsize=(max(5.0, 2.5 + 0.7 * len(shown)) * columns, 4.2 * lines), layout="constrained")
    for number, metric in enumerate(metrics):
        panel = figure.add_subplot(lines, columns, number + 1)
        pooled = {
            label: [v for values in seeds for v in values.get(metric, {}).values()] for label, seeds in shown.items()
        }
        box_plot(panel, pooled, colours)
        panel.set_title(in_plot(heading(metric)), fontsize="medium", loc="left")
    figure.write(file)
    return True


def box_plot(panel: Any, groups: Mapping[str, Sequence[float]], colours: Sequence[str]) -> None:
    """A box for each group of clients (a run) with a point for each client; values are fractions, shown in percent.

    The box is the middle half of the clients, its line the median, the diamond the mean; whiskers reach to the
    extremes.
    """
    for number, values in enumerate(groups.values()):
        shown = [100 * value for value in values if math.isfinite(value)]
        if not shown:
            continue
        colour = colours[number % len(colours)]
        panel.boxplot(
            [shown],
            positions=[number],
            widths=0.5,
            whis=(0, 100),
            showmeans=True,
            medianprops={"color": colour, "lw": 1.5},
            boxprops={"color": colour},
            whiskerprops={"color": colour},
            capprops={"color": colour},
            meanprops={"marker": "D", "markerfacecolor": colour, "markeredgecolor": colour, "markersize": 4},
        )
        # Side by side, so that equal clients can be distinguished.
        step = 0.4 / max(len(shown) - 1, 1)
        places = [number + step * (i - (len(shown) - 1) / 2) for i in range(len(shown))]
        panel.plot(places, shown, ".", color=colour, alpha=0.5, markersize=4)
    panel.set_xticks(range(len(groups)), [in_plot(shorten(name, 24)) for name in groups], rotation=20, ha="right")
    panel.set_xlim(-0.6, len(groups) - 0.4)
    panel.set_ylabel("%")
    panel.grid(axis="y", alpha=0.3)


def plot_matrix(matrix: Mapping[str, Any], file: Path) -> None:
    """Write a heat map: row = client whose personal model, column = client whose test images."""
    from .figure import Plot

    side = min(12.0, 2.5 + 0.45 * len(matrix["clients"]))
    figure = Plot(figsize=(side + 1, side), layout="constrained")
    panel = figure.add_subplot()
    image = heat_map(panel, matrix)
    figure.colorbar(image, ax=panel, label="accuracy, %")
    figure.savefig(file, dpi=130)


def heat_map(panel: Any, matrix: Mapping[str, Any]) -> Any:
    clients = matrix["clients"]
    shown = [[math.nan if value is None else 100 * value for value in row] for row in matrix["accuracy"]]
    image = panel.imshow(shown, cmap="viridis", vmin=0, vmax=100)
    places = range(0, len(clients), math.ceil(len(clients) / 20))
    panel.set_xticks(places, [clients[place] for place in places])
    panel.set_yticks(places, [clients[place] for place in places])
    panel.set_xlabel("test images of client")
    panel.set_ylabel("model of client")
    if len(clients) <= 12:
        for row, values in enumerate(shown):
            for column, value in enumerate(values):
                text = "-" if math.isnan(value) else f"{value:.0f}"
                panel.text(column, row, text, ha="center", va="center", color="black" if value > 60 else "white")
    return image
