"""The trackers that `track` names: TensorBoard, or a session of the user's.

A tracker's package is imported only where it is used. Addresses and keys of servers come from the tracker's own
environment variables and login; an experiment file has no secrets, because nodes receive its content.
"""

from __future__ import annotations

import importlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from fedbn_flwr import named
from fedbn_flwr.errors import needs

Status = Literal["finished", "interrupted", "failed"]


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker has to know about a run."""

    folder: Path
    experiment: str
    name: str  # of the run
    settings: Mapping[str, Any]  # flat: numbers, booleans and text
    done: int  # rounds of earlier sessions
    id: str | None  # of the tracked run that an earlier session began
    measure: str = "accuracy"  # that runs of its task are compared by


class Session(ABC):
    """An open tracked run. It and its methods may wait for a network and may raise anything."""

    address: str | None = None  # to look at it
    id: str | None = None  # by which a later session continues the tracked run

    @abstractmethod
    def log(self, round: int, figures: Mapping[str, float]) -> None:
        """Record figures of a round."""

    @abstractmethod
    def end(self, status: Status, summary: Mapping[str, Any]) -> None:
        """Record the summary and the status, and close the tracked run."""


class TensorBoard(Session):
    """Event files in the run folder; `tensorboard --logdir DIR` shows all runs in DIR."""

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        # Rounds after the checkpoint are repeated; TensorBoard then hides their first figures.
        self.writer = SummaryWriter(str(run.folder), purge_step=run.done + 1 if run.done else None)
        experiment, start, self.success = hparams(dict(run.settings), {run.measure: 0.0, "loss": 0.0})
        self.writer.file_writer.add_summary(experiment)
        self.writer.file_writer.add_summary(start)

    def log(self, round: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self.writer.add_scalar(name, value, round)
        self.writer.flush()

    def end(self, status: Status, summary: Mapping[str, Any]) -> None:
        self.writer.add_text("summary", f"```json\n{json.dumps(dict(summary), indent=2)}\n```")
        self.writer.add_text("status", status)
        if status == "finished":
            self.writer.file_writer.add_summary(self.success)
        self.writer.close()


_TENSORBOARD = {"name": "tensorboard"}  # it has no settings


def check(entry: Mapping[str, Any]) -> None:
    """Raise a UserError if the tracker of an entry cannot be used here."""
    if entry == _TENSORBOARD:
        with needs("tensorboard", "track=tensorboard"):
            importlib.import_module("tensorboard")
    else:
        named.load("track", entry["name"])


def begin(entry: Mapping[str, Any], run: TrackedRun) -> Session:
    """Begin a tracked run, or continue `run.id`."""
    if entry == _TENSORBOARD:
        return TensorBoard(run)
    options = {key: value for key, value in entry.items() if key != "name"}
    session: Session = named.call("track", entry["name"], run, **options)
    return session


def _listed(value: Any) -> tuple[Mapping[str, Any], ...]:
    """`tensorboard`, `{name: my_trackers:MLflow, uri: x}` or a list of these, as a tuple of mappings."""
    entries = value if isinstance(value, list | tuple) else [] if value is None else [value]
    found = tuple({"name": entry} if isinstance(entry, str) else entry for entry in entries)
    for entry in found:
        is_own = isinstance(entry, Mapping) and named.is_name(str(entry.get("name")))
        if not is_own and entry != _TENSORBOARD:
            raise ValueError(
                f"found {value!r}; expected tensorboard, module:callable, or a mapping with this name and its "
                "settings, for instance {name: 'trackers:WandB', project: fedbn}"
            )
    names = [entry["name"] for entry in found]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"{twice} is listed twice; a tracker records a run once")
    return found


Track = Annotated[tuple[Mapping[str, Any], ...], BeforeValidator(_listed)]
