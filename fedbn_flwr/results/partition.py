"""A table and a plot of the images of each client by class, for `fedbn partition EXPERIMENT`."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedbn_flwr.errors import UserError

from .report import as_text
from .rows import COLOURS
from .text import in_plot

_SHOWN_CLASSES = 12  # more columns do not fit in a line, and more colours are hard to distinguish
_SHOWN_CLIENTS = 40
_PICTURED_CLASSES = 24


@dataclass(frozen=True)
class PartitionCounts:
    """How many images of each class the clients of a partition have."""

    title: str
    classes: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]  # [clients][classes]
    clients: tuple[str, ...] = ()  # names, if clients have any (a domain, a city)

    @property
    def sizes(self) -> list[int]:
        return [sum(row) for row in self.counts]

    def name(self, client: int) -> str:
        return f"{client} {self.clients[client]}" if self.clients else str(client)


def partition_table(partition: PartitionCounts) -> str:
    sizes = partition.sizes
    spread = f"images per client: {min(sizes)} to {max(sizes)}, median {statistics.median(sizes):g}"
    if len(partition.classes) == 1:  # segmentation data
        rows = [(partition.name(client), str(size)) for client, size in enumerate(sizes[:_SHOWN_CLIENTS])]
        text = as_text([("client", "images"), *rows, ("all", str(sum(sizes)))])
        return f"{partition.title}\n\n{text}\n{_rest(partition)}{spread}"
    few = len(partition.classes) <= _SHOWN_CLASSES
    lines: list[Sequence[str]] = [("client", "images", "classes", *(partition.classes if few else ("largest",)))]
    for client, row in enumerate(partition.counts[:_SHOWN_CLIENTS]):
        present = sum(count > 0 for count in row)
        largest = max(range(len(row)), key=row.__getitem__)
        shown = (
            [str(count) if count else "." for count in row]
            if few
            else [f"{partition.classes[largest]}: {row[largest]}"]
        )
        lines.append((partition.name(client), str(sizes[client]), str(present), *shown))
    total = [sum(column) for column in zip(*partition.counts, strict=True)]
    lines.append(("all", str(sum(sizes)), str(sum(n > 0 for n in total)), *(map(str, total) if few else ("",))))
    return f"{partition.title}\n\n{as_text(lines)}\n{_rest(partition)}{spread}"


_SHADES = {True: " ░▒▓█", False: " .:+#"}  # from no images of a class to the most that a client has of it


def partition_picture(partition: PartitionCounts, *, unicode: bool) -> str:
    """A line for each class and a column for each client; darker where the client has more of the class."""
    shades = _SHADES[unicode]
    clients, classes = partition.counts[:_SHOWN_CLIENTS], partition.classes[:_PICTURED_CLASSES]
    width = min(16, max(len("client"), *map(len, classes)))
    column = max(2, len(str(len(clients) - 1)) + 1)
    lines = ["client".ljust(width) + " " + "".join(str(i).rjust(column) for i in range(len(clients)))]
    for label, name in enumerate(classes):
        counts = [row[label] for row in clients]
        most = max(1, *(row[label] for row in partition.counts))
        # The lightest shade stands for one image, the darkest for the most.
        marks = [shades[-(-4 * count // most)] if count else shades[0] for count in counts]
        lines.append(f"{name[:width].ljust(width)} " + "".join((mark * (column - 1)).rjust(column) for mark in marks))
    more = len(partition.classes) - len(classes)
    rest = f"... and {more} more classes\n" if more > 0 else ""
    sizes = partition.sizes
    spread = f"images per client: {min(sizes)} to {max(sizes)}, median {statistics.median(sizes):g}"
    return f"{partition.title}\n\n" + "\n".join(line.rstrip() for line in lines) + f"\n{rest}{_rest(partition)}{spread}"


def _rest(partition: PartitionCounts) -> str:
    more = len(partition.counts) - _SHOWN_CLIENTS
    return f"... and {more} more clients\n" if more > 0 else ""


def plot_partitions(partitions: Sequence[PartitionCounts], file: Path) -> None:
    """Stacked bars, a bar for each client and a colour for each class; a panel for each partition."""
    from .figure import Plot

    widest = max(len(partition.counts) for partition in partitions)
    figure = Plot(figsize=(min(14, 4.5 + 0.35 * widest), 3.6 * len(partitions)), layout="constrained")
    for panel, partition in zip(figure.subplots(len(partitions), 1, squeeze=False)[:, 0], partitions, strict=True):
        places = range(len(partition.counts))
        colours = class_colours(len(partition.classes))
        bottom = [0] * len(partition.counts)
        many = len(partition.counts) > _SHOWN_CLIENTS
        for label, colour in enumerate(colours):
            heights = [row[label] for row in partition.counts]
            # A thin white line separates classes if the bars are wide enough for it.
            panel.bar(
                places,
                heights,
                1.0 if many else 0.8,
                bottom,
                color=colour,
                edgecolor="white",
                linewidth=0 if many or len(partition.classes) > 2 * _SHOWN_CLASSES else 0.4,
            )
            bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
        panel.set_title(in_plot(partition.title), fontsize="medium", loc="left")
        panel.set_ylabel("images")
        panel.set_xlabel("client")
        panel.set_xlim(-0.6, len(partition.counts) - 0.4)
        panel.set_ylim(0, 1.05 * max(partition.sizes))
        panel.grid(axis="y", alpha=0.3)
        panel.set_axisbelow(True)
        if not many:
            slanted = bool(partition.clients) and len(partition.counts) > 8
            panel.set_xticks(places, [in_plot(partition.clients[i]) if partition.clients else str(i) for i in places])
            for tick in panel.get_xticklabels() if slanted else ():
                tick.set(rotation=45, ha="right", rotation_mode="anchor")  # each label ends below its bar
        _explain_colours(figure, panel, partition, colours)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file, dpi=130)
    except (OSError, ValueError) as error:  # ValueError: a format that matplotlib does not know, StorageError
        raise UserError(f"cannot write the plot {str(file)!r}: {error}") from None


def _explain_colours(figure: Any, panel: Any, partition: PartitionCounts, colours: Sequence[Any]) -> None:
    if len(partition.classes) == 1:
        return
    if len(partition.classes) <= 2 * _SHOWN_CLASSES:
        # In the order of the bars, the first class at the bottom. Without names, matplotlib omits those such as _other.
        names = [in_plot(name) for name in partition.classes[::-1]]
        panel.legend(panel.containers[::-1], names, loc="center left", bbox_to_anchor=(1, 0.5), fontsize="small")
        return
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, Normalize

    scale = ScalarMappable(Normalize(0, len(colours)), ListedColormap(list(colours)))
    figure.colorbar(scale, ax=panel, label="class (number)")


def class_colours(count: int) -> list[Any]:
    """The report's palette and variants of it; a continuous scale if there are too many classes to distinguish."""
    if count > 2 * _SHOWN_CLASSES:
        from matplotlib import colormaps

        return [colormaps["viridis"](i / (count - 1)) for i in range(count)]
    return [_variant(COLOURS[i % len(COLOURS)], i // len(COLOURS)) for i in range(count)]


def _variant(colour: str, number: int) -> tuple[float, float, float]:
    """0: the colour itself; 1: darker; 2: lighter. A lighter blue would resemble the palette's other blue."""
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    if number == 0:
        return red, green, blue
    if number == 1:  # black becomes grey
        return (0.5, 0.5, 0.5) if colour == "#000000" else (red * 0.55, green * 0.55, blue * 0.55)
    return 0.4 * red + 0.6, 0.4 * green + 0.6, 0.4 * blue + 0.6
