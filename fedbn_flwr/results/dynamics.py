"""A plot of the training dynamics of batch norm, from the lines of norms.jsonl."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .text import in_plot

# The panels: a figure of norms.jsonl, whose clients are averaged, and a title.
_PANELS = {
    "mean_drift": "global mean, change from the round before",
    "variance_drift": "global variance, change from the round before",
    "mean_deviation": "clients' means, distance from the global one",
    "variance_deviation": "clients' variances, distance from the global one",
}
_LABELLED = 40  # more names of layers do not fit


def plot_dynamics(lines: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Plot layers against rounds, a panel for each quantity; `lines` are those of norms.jsonl."""
    from .figure import Plot  # isort: skip  # names the extra that is missing without matplotlib
    from matplotlib.colors import LogNorm
    from matplotlib.ticker import MaxNLocator

    layers = list(lines[0]["layers"])
    rounds = [int(line["round"]) for line in lines]
    figure = Plot(figsize=(14, 2.5 + 0.36 * min(len(layers), _LABELLED)), layout="constrained")
    step = -(-len(layers) // _LABELLED)
    for panel, (name, title) in zip(figure.subplots(2, 2, sharex=True, sharey=True).flat, _PANELS.items(), strict=True):
        values = _matrix(lines, layers, name)
        positive = values[values > 0].tolist()
        low, high = min([1.0, *positive]), max([0.0, *positive])
        panel.set_facecolor("lightgrey")  # a logarithm has no colour for 0
        # A round that is not recorded has the colour of the recorded one before it.
        last = rounds[-1] + (rounds[-1] - rounds[-2] if len(rounds) > 1 else 1)
        edges = [number - 0.5 for number in (*rounds, last)]
        image = panel.pcolormesh(
            edges, np.arange(len(layers) + 1), np.ma.masked_equal(values, 0), norm=LogNorm(low, max(high, 1.001 * low))
        )
        panel.set_title(title, fontsize="medium", loc="left")
        panel.set_yticks(
            np.arange(0, len(layers), step) + 0.5, [in_plot(layer) for layer in layers[::step]], fontsize="small"
        )
        figure.colorbar(image, ax=panel)
    for panel in figure.axes[2:4]:
        panel.set_xlabel("round")
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.axes[0].invert_yaxis()  # shared by all: the first layer is on top
    figure.suptitle("grey: no distance (frozen statistics)", fontsize="medium", x=0.01, ha="left")
    figure.savefig(file, dpi=110)


def _matrix(lines: Sequence[Mapping[str, Any]], layers: Sequence[str], name: str) -> NDArray[np.float64]:
    """Layers x rounds of one figure."""
    return np.array([[_value(line, layer, name) for line in lines] for layer in layers])


def _value(line: Mapping[str, Any], layer: str, name: str) -> float:
    if name in line["layers"][layer]:
        return float(line["layers"][layer][name])
    of_clients = [float(client[layer][name]) for client in line["clients"].values()]
    return statistics.fmean(of_clients) if of_clients else 0.0
