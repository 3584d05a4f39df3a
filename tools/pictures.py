"""Draws the pictures of results that no longer show the numbers of the raw files, and those of docs/batch-norm.md.

docs/results/pictures.yaml lists the former. Each contains a digest of what it shows, by which `tools/tables.py --check`
finds those that aren't current. bias.svg and rounds.svg are computed by examples/bias.py; cures.svg is drawn here. All
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
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from matplotlib.figure import Figure
from PIL import Image
from results import by_seed, runs_of, specification

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
IMAGES = DOCS / "images"

WIDTH, LEFT, RIGHT, OF_CLIENT = 760, 16, 488, 256  # cures.svg, and its clients
MIDDLE: dict[str, Any] = {"text_anchor": "middle"}
INK, FAINT, TINT = "#1f2937", "#6b7280", "#f3f4f6"
CURES = ("#047857", "#7c3aed", "#1d4ed8", "#b45309")  # frozen, exchanged, local, none


# --- results ------------------------------------------------------------------------


class Line(NamedTuple):
    title: str
    places: list[float]
    means: list[float]
    deviations: list[float]


def lines(spec: Mapping[str, Any]) -> list[Line]:
    """What a picture shows."""
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
    if "end" in spec:
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


def text(x: float, y: float, words: str, colour: str = INK, size: int = 14, **more: Any) -> str:
    attributes = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in more.items())
    return f'<text x="{x:g}" y="{y:g}" fill="{colour}" font-size="{size}"{attributes}>{words}</text>'


def box(x: float, y: float, width: float, height: float, fill: str = "white", colour: str = FAINT) -> str:
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="8" fill="{fill}" stroke="{colour}"'
        ' stroke-width="1.5"/>'
    )


def arrow(points: str, colour: str = FAINT, *, both: bool = False) -> str:
    start = f' marker-start="url(#{colour[1:]})"' if both else ""
    return (
        f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2" marker-end="url(#{colour[1:]})"'
        f"{start}/>"
    )


def badge(x: float, y: float, number: int, colour: str) -> str:
    return f'<circle cx="{x:g}" cy="{y:g}" r="12" fill="{colour}"/>' + (
        text(x, y + 5, str(number), "white", font_weight="bold", **MIDDLE)
    )


def client(x: float, name: str, data: str) -> Iterator[str]:
    """The way of a batch through one layer of a client, from the bottom to the top."""
    yield box(x, 170, OF_CLIENT, 330, TINT)
    yield text(x + 14, 195, name, size=16, font_weight="bold")
    yield text(x + OF_CLIENT - 14, 195, data, FAINT, text_anchor="end")
    half = x + OF_CLIENT / 2
    for y, height, words, below in (
        (444, 42, "convolution", "weights"),
        (340, 84, "normalise", "(x - mean) / sqrt(variance + eps)"),
        (276, 44, "scale and shift", "gamma, beta"),
        (212, 44, "next layers, loss", ""),
    ):
        yield box(x + 18, y, OF_CLIENT - 36, height)
        yield text(half, y + height / 2 + (-2 if below else 5), words, size=15, **MIDDLE)
        if below:
            yield text(half, y + height / 2 + 15, below, FAINT, 13, **MIDDLE)
            yield arrow(f"{half:g},{y:g} {half:g},{y - 19:g}")


def cures() -> None:
    """One batch norm layer on two clients and the server, and where each cure changes it."""
    frozen, exchange, local, none = CURES
    markers = "".join(
        f'<marker id="{colour[1:]}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7"'
        f' orient="auto-start-reverse"><path d="M0,0 L10,5 L0,10 z" fill="{colour}"/></marker>'
        for colour in (FAINT, exchange)
    )
    centre, first, second = WIDTH / 2, LEFT + OF_CLIENT / 2, RIGHT + OF_CLIENT / 2
    parts = [
        box(190, 16, 380, 96, TINT),
        text(centre, 42, "Server", size=16, font_weight="bold", **MIDDLE),
        text(centre, 66, "averages weights, gamma, beta, statistics", **MIDDLE),
        text(centre + 16, 95, "freezes the statistics after round T*", frozen, **MIDDLE),
        badge(centre - 118, 90, 1, frozen),
        *client(LEFT, "Client A", "digits 0 and 1"),
        *client(RIGHT, "Client B", "digits 2 and 3"),
        arrow(f"{first:g},168 {first:g},64 186,64", both=True),
        arrow(f"{second:g},168 {second:g},64 574,64", both=True),
        text(first - 8, 144, "each round", FAINT, text_anchor="end"),
        text(second + 8, 144, "each round", FAINT),
        # FedTAN's exchange within a round
        text(centre, 354, "forward: mean, variance", exchange, 14, **MIDDLE),
        arrow("266,366 494,366", exchange, both=True),
        badge(centre, 382, 2, exchange),
        arrow("266,398 494,398", exchange, both=True),
        text(centre, 418, "backward: gradients", exchange, 14, **MIDDLE),
    ]
    for x in (LEFT + 18, RIGHT + 18):
        right = x + OF_CLIENT - 36
        parts += [badge(x, 354, 1, frozen), badge(x, 298, 3, local), badge(x, 412, 3, local)]
        parts += [badge(right, 346, 4, none), badge(right, 465, 4, none)]
    rows = (
        ("FixBN", "normalises with frozen statistics, the same on every client"),
        ("FedTAN", "exchanges mean and variance, and their gradients, in a step"),
        ("FedBN, SiloBN", "keep the running statistics local (FedBN: gamma, beta too)"),
        ("group norm, FedWon", "normalises each example on its own, or the weights"),
    )
    for number, (colour, (name, words)) in enumerate(zip(CURES, rows, strict=True)):
        y = 530 + 30 * number
        parts += [badge(30, y, number + 1, colour), text(52, y + 5, name, colour, 15, font_weight="bold")]
        parts.append(text(216, y + 5, words, size=15))
    drawn = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} 642" width="{WIDTH}" height="642" role="img"'
        ' font-family="Helvetica, Arial, sans-serif">\n'
        "<title>One batch norm layer on two clients and the server, and where each cure changes it</title>\n"
        f'<defs>{markers}</defs>\n<rect width="{WIDTH}" height="642" rx="12" fill="white"/>\n'
    )
    (IMAGES / "cures.svg").write_text(drawn + "\n".join(parts) + "\n</svg>\n", encoding="utf-8")


if __name__ == "__main__":
    for file in stale():
        draw(file)
    plots()
    cures()
