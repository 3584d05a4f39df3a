"""FedAvg with all clients of a round trained together in one process."""

from __future__ import annotations

from .ours import main
from .task import Task

main(Task(), clients_at_once=True)
