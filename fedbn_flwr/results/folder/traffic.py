"""What a round sends and receives, as counts."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass
class Traffic:
    """Counts of one round, or their sums over several."""

    communication_rounds: int = 0  # for training; see the glossary
    messages_down: int = 0
    messages_up: int = 0
    bytes_down: int = 0
    bytes_up: int = 0
    # The traffic in the papers' tables: one broadcast (a message to all clients, counted once), plus all uploads.
    broadcast_bytes: int = 0
    # Largest message to and from one client, in elements of its arrays.
    elements_down_per_client: int = 0
    elements_up_per_client: int = 0
    # Evaluation and queries, which no paper includes.
    other_messages: int = 0
    other_bytes: int = 0

    def add(self, more: Traffic) -> None:
        for field in fields(self):
            combine = max if field.name.startswith("elements") else int.__add__
            setattr(self, field.name, combine(getattr(self, field.name), getattr(more, field.name)))
