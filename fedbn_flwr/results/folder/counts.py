"""The examples of each client by class: the content of partition.json."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PartitionCounts:
    """How many examples of each class the clients of a partition have."""

    title: str
    classes: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]  # [clients][classes]
    clients: tuple[str, ...] = ()  # names, if clients have any (a domain, a city)

    @property
    def sizes(self) -> list[int]:
        return [sum(row) for row in self.counts]
