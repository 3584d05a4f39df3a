"""A table of the examples of each client by class, for `fedbn partition EXPERIMENT` and `fedbn explain EXPERIMENT`."""

from __future__ import annotations

import statistics

from ..folder.counts import PartitionCounts
from .tables import Lines, as_text

_SHOWN_CLASSES = 12  # more columns do not fit in a line
_SHOWN_CLIENTS = 40


def partition_table(partition: PartitionCounts) -> str:
    classes, sizes = partition.classes, partition.sizes
    few = len(classes) <= _SHOWN_CLASSES

    def cells(row: tuple[int, ...], *largest: str) -> tuple[str, ...]:
        if len(classes) == 1:  # segmentation data
            return (str(sum(row)),)
        shown = [str(count) if count else "." for count in row] if few else largest
        return (str(sum(row)), str(sum(count > 0 for count in row)), *shown)

    heads = ("examples", "classes", *(classes if few else ("largest",)))
    lines: Lines = [("client", *(heads[:1] if len(classes) == 1 else heads))]
    for client, row in enumerate(partition.counts[:_SHOWN_CLIENTS]):
        name = f"{client} {partition.clients[client]}" if partition.clients else str(client)
        largest = max(range(len(row)), key=row.__getitem__)
        lines.append((name, *cells(row, f"{classes[largest]}: {row[largest]}")))
    lines.append(("all", *cells(tuple(map(sum, zip(*partition.counts, strict=True))), "")))
    more = len(partition.counts) - _SHOWN_CLIENTS
    rest = f"... and {more} more clients\n" if more > 0 else ""
    spread = f"examples per client: {min(sizes)} to {max(sizes)}, median {statistics.median(sizes):g}"
    return f"{partition.title}\n\n{as_text(lines)}\n{rest}{spread}"
