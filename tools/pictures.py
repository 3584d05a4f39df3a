"""Draws the pictures of results that no longer show the numbers of the raw files, and those of docs/batch-norm.md.

docs/results/pictures.yaml lists the former. Each contains a digest of what it shows, by which `tools/tables.py --check`
finds those that aren't current. bias.svg and rounds.svg are computed by examples/bias.py. All
have a white background, so that they can be read on dark pages.
"""

from __future__ import annotations

import hashlib
import importlib
import io
import json
import logging
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from matplotlib.figure import Figure
from outputs import by_network
from PIL import Image
from results import by_seed, runs_of, specification

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
IMAGES = DOCS / "images"

FAINT = "#6b7280"


# --- results ------------------------------------------------------------------------


class Line(NamedTuple):
    title: str
    places: list[float]
    means: list[float]
    deviations: list[float]


def lines(spec: Mapping[str, Any]) -> list[Line]:
    """What a picture shows."""
    if "cells" in spec:
        return [
            Line(network, [each["excess"] for each in some], [each[spec["cells"]] for each in some], [])
            for network, some in by_network().items()
        ]
    found = []
    for title, row in spec["rows"].items():
        points: dict[float, list[float]] = {}
        if "end" in spec:
            points[0] = [*by_seed(runs_of(row, spec["set"]), spec["end"]).values()]
        elif "at" in spec:
            for place, label in spec["at"].items():
                points[place] = [*by_seed(runs_of(label.format(row=row), spec["set"])).values()]
        else:
            for run in runs_of(row, spec["set"]):
                for each in run.curve:
                    points.setdefault(each["round"], []).append(100 * each["accuracy"])
        off = [statistics.stdev(values) if len(values) > 1 else 0.0 for values in points.values()]
        found.append(Line(title, [*points], [*map(statistics.mean, points.values())], off))
    return found


def digest(spec: Mapping[str, Any]) -> str:
    """Of what a picture shows, to four digits after the point."""
    numbers = [[title, *([round(each, 4) for each in values] for values in line)] for title, *line in lines(spec)]
    return hashlib.sha256(json.dumps([spec, numbers], sort_keys=True).encode()).hexdigest()


def stale() -> list[Path]:
    """The pictures that show something else than the raw files have."""
    found = []
    for name, spec in specification("results/pictures.yaml").items():
        shown = Image.open(DOCS / name).info.get("Digest") if (DOCS / name).is_file() else None
        found += [] if shown == digest(spec) else [DOCS / name]
    return found


COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#111827")
MARKERS = "os^DvPX"


def draw(file: Path) -> None:
    """A picture of results."""
    spec = specification("results/pictures.yaml")[file.relative_to(DOCS).as_posix()]
    figure = Figure((8, 4.2 if "end" not in spec else 5), layout="constrained")
    panel = figure.subplots()
    if "cells" in spec:
        for line, colour, marker in zip(lines(spec), COLOURS, MARKERS, strict=False):
            panel.plot(line.places, line.means, marker, color=colour, label=line.title)
        panel.axhline(0, color=FAINT, lw=1)
        panel.set(xlabel="error at the start, less dealt", ylabel=spec["axis"])
        panel.legend(title="network")
    elif "end" in spec:
        rows = sorted(lines(spec), key=lambda line: line.means)
        panel.errorbar(
            [line.means[0] for line in rows], [line.title for line in rows],
            xerr=[line.deviations[0] for line in rows], fmt="o", color=COLOURS[0], capsize=3,
        )  # fmt: skip
        panel.set_xlabel("accuracy, %")
    else:
        for number, (line, colour, marker) in enumerate(zip(lines(spec), COLOURS, MARKERS, strict=False)):
            every = 1 if "at" in spec else max(1, len(line.places) // 8)
            panel.plot(
                line.places,
                line.means,
                color=colour,
                marker=marker,
                markevery=every,
                lw=3.4 - number / 3,
                label=line.title,
            )
            low, high = (
                [mean + sign * off for mean, off in zip(line.means, line.deviations, strict=True)] for sign in (-1, 1)
            )
            panel.fill_between(line.places, low, high, color=colour, alpha=0.15, lw=0)
        panel.set(xlabel=spec.get("axis", "rounds"), ylabel="accuracy, %")
        if "at" in spec:
            panel.set_xscale("log")
            panel.set_xticks([*spec["at"]], [str(place) for place in spec["at"]], minor=False)
            panel.minorticks_off()
        figure.legend(loc="outside right upper", fontsize=9)
    for place, words in spec.get("mark", {}).items():
        panel.axvline(place, color=FAINT, ls=":")
        panel.annotate(words, (place, 0.04), (6, 0), ("data", "axes fraction"), "offset points", color=FAINT)
    panel.grid(alpha=0.3)
    figure.savefig(file, dpi=120, metadata={"Digest": digest(spec), "Software": None})


# --- docs/batch-norm.md -------------------------------------------------------------


def plots() -> None:
    """bias.svg and rounds.svg, with the same bytes in each run; text stays text."""
    sys.path.insert(0, str(ROOT / "examples"))
    bias = importlib.import_module("bias")
    logging.getLogger("flwr").setLevel(logging.ERROR)
    style: Any = {"svg.hashsalt": "bias", "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 11}
    for name, plot in (("bias", bias.plot_errors), ("rounds", bias.plot_gammas)):
        drawn = io.StringIO()
        with matplotlib.rc_context(style):
            plot().savefig(drawn, format="svg", metadata={"Date": None, "Creator": None})
        lines = [line.rstrip() for line in drawn.getvalue().splitlines()]
        (IMAGES / f"{name}.svg").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    for file in stale():
        draw(file)
    plots()
