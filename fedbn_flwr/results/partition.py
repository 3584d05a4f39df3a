"""Who holds what: a table and a plot of clients against classes, `fedbn partition EXPERIMENT`."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedbn_flwr.errors import UserError

from .report import COLOURS, as_text

_SHOWN_CLASSES = 12  # more do not fit a line, nor a legend's colours an eye
_SHOWN_CLIENTS = 40


@dataclass(frozen=True)
class PartitionCounts:
    """A partition, counted."""

    title: str
    classes: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]  # [clients][classes]
    clients: tuple[str, ...] = ()  # names, where clients have some (a domain, a city)

    @property
    def sizes(self) -> list[int]:
        return [sum(row) for row in self.counts]

    def name(self, client: int) -> str:
        return f"{client} {self.clients[client]}" if self.clients else str(client)


def holdings_table(held: PartitionCounts) -> str:
    sizes = held.sizes
    spread = f"images per client: {min(sizes)} to {max(sizes)}, median {statistics.median(sizes):g}"
    if len(held.classes) == 1:  # images that have labels for their pixels alone
        rows = [(held.name(client), str(size)) for client, size in enumerate(sizes[:_SHOWN_CLIENTS])]
        text = as_text([("client", "images"), *rows, ("all", str(sum(sizes)))])
        return f"{held.title}\n\n{text}\n{_rest(held)}{spread}"
    few = len(held.classes) <= _SHOWN_CLASSES
    lines: list[Sequence[str]] = [("client", "images", "classes", *(held.classes if few else ("largest",)))]
    for client, row in enumerate(held.counts[:_SHOWN_CLIENTS]):
        present = sum(count > 0 for count in row)
        largest = max(range(len(row)), key=row.__getitem__)
        shown = [str(count) if count else "." for count in row] if few else [f"{held.classes[largest]}: {row[largest]}"]
        lines.append((held.name(client), str(sizes[client]), str(present), *shown))
    total = [sum(column) for column in zip(*held.counts, strict=True)]
    lines.append(("all", str(sum(sizes)), str(sum(n > 0 for n in total)), *(map(str, total) if few else ("",))))
    return f"{held.title}\n\n{as_text(lines)}\n{_rest(held)}{spread}"


def _rest(held: PartitionCounts) -> str:
    more = len(held.counts) - _SHOWN_CLIENTS
    return f"... and {more} more clients\n" if more > 0 else ""


def plot_holdings(all_held: Sequence[PartitionCounts], file: Path) -> None:
    """Stacked bars, a bar for each client and a colour for each class; a panel for each partition."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    widest = max(len(held.counts) for held in all_held)
    figure = Figure(figsize=(min(14, 4.5 + 0.35 * widest), 3.6 * len(all_held)), layout="constrained")
    FigureCanvasAgg(figure)
    for panel, held in zip(figure.subplots(len(all_held), 1, squeeze=False)[:, 0], all_held, strict=True):
        places = range(len(held.counts))
        colours = _colours(len(held.classes))
        bottom = [0] * len(held.counts)
        many = len(held.counts) > _SHOWN_CLIENTS
        for label, name in enumerate(held.classes):
            heights = [row[label] for row in held.counts]
            # A thin white line keeps neighbours apart where bars are wide enough for it.
            panel.bar(
                places,
                heights,
                1.0 if many else 0.8,
                bottom,
                color=colours[label],
                label=name,
                edgecolor="white",
                linewidth=0 if many or len(held.classes) > 2 * _SHOWN_CLASSES else 0.4,
            )
            bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
        panel.set_title(held.title, fontsize="medium", loc="left")
        panel.set_ylabel("images")
        panel.set_xlabel("client")
        panel.set_xlim(-0.6, len(held.counts) - 0.4)
        panel.set_ylim(0, 1.05 * max(held.sizes))
        panel.grid(axis="y", alpha=0.3)
        panel.set_axisbelow(True)
        if not many:
            slanted = bool(held.clients) and len(held.counts) > 8
            panel.set_xticks(places, [held.clients[i] if held.clients else str(i) for i in places])
            for tick in panel.get_xticklabels() if slanted else ():
                tick.set(rotation=45, ha="right", rotation_mode="anchor")  # each ends below its own bar
        _explain_colours(figure, panel, held, colours)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file, dpi=130)
    except (OSError, ValueError) as error:  # ValueError: a format that matplotlib does not know
        raise UserError(f"cannot write the plot {str(file)!r}: {error}") from None


def _explain_colours(figure: Any, panel: Any, held: PartitionCounts, colours: Sequence[Any]) -> None:
    if len(held.classes) == 1:
        return
    if len(held.classes) <= 2 * _SHOWN_CLASSES:
        handles, names = panel.get_legend_handles_labels()
        # In the order of the bars, the first class at the bottom.
        panel.legend(handles[::-1], names[::-1], loc="center left", bbox_to_anchor=(1, 0.5), fontsize="small")
        return
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, Normalize

    scale = ScalarMappable(Normalize(0, len(colours)), ListedColormap(list(colours)))
    figure.colorbar(scale, ax=panel, label="class (number)")


def _colours(count: int) -> list[Any]:
    """The report's palette, then turns of it; a continuous scale where classes are too many to tell apart."""
    if count > 2 * _SHOWN_CLASSES:
        from matplotlib import colormaps

        return [colormaps["viridis"](i / (count - 1)) for i in range(count)]
    return [_turned(COLOURS[i % len(COLOURS)], i // len(COLOURS)) for i in range(count)]


def _turned(colour: str, turn: int) -> tuple[float, float, float]:
    """As it is, then darker, then lighter; lighter first would make the blue that the palette already has."""
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    if turn == 0:
        return red, green, blue
    if turn == 1:  # black becomes grey
        return (0.5, 0.5, 0.5) if colour == "#000000" else (red * 0.55, green * 0.55, blue * 0.55)
    return 0.4 * red + 0.6, 0.4 * green + 0.6, 0.4 * blue + 0.6
