"""The trackers that `track` names: their settings, and how each of them is written to.

A tracker's package is imported only where it is used. Addresses and keys of servers come from the tracker's own
environment variables and login; an experiment file has no secrets, because nodes receive its content.
"""

from __future__ import annotations

import importlib.util
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, SerializeAsAny, ValidationError

from fedbn_flwr import named
from fedbn_flwr.errors import SettingsError, did_you_mean

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


class Session(ABC):
    """An open tracked run. Its methods may wait for a network and may raise anything."""

    address: str | None = None  # to look at it
    id: str | None = None  # by which a later session continues the tracked run

    @abstractmethod
    def log(self, round: int, figures: Mapping[str, float]) -> None:
        """Record figures of a round."""

    @abstractmethod
    def end(self, status: Status, summary: Mapping[str, Any]) -> None:
        """Record the summary and the status, and close the tracked run."""


class Tracker(BaseModel):
    """An entry of `track`; the fields of a subclass are its settings."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: str
    package: ClassVar[str]

    def check(self) -> None:
        """Raise SettingsError if the tracker cannot be used here."""
        if importlib.util.find_spec(self.package) is None:
            raise SettingsError(
                f"track is {self.name!r}, but the package {self.package!r} is not installed; "
                f"pip install 'fedbn-flwr[{self.name}]'"
            )

    def open(self, run: TrackedRun) -> Session:
        """Begin a tracked run, or continue `run.id`."""
        raise NotImplementedError


# --- TensorBoard -------------------------------------------------------------


class TensorBoard(Tracker):
    """Event files in the run folder; `tensorboard --logdir DIR` shows all runs in DIR."""

    name: Literal["tensorboard"]
    package = "tensorboard"

    def open(self, run: TrackedRun) -> Session:
        return _TensorBoardSession(run)


class _TensorBoardSession(Session):
    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        # Rounds after the checkpoint are repeated; TensorBoard then hides their first figures.
        self.writer = SummaryWriter(str(run.folder), purge_step=run.done + 1 if run.done else None)
        experiment, start, self.success = hparams(dict(run.settings), {"accuracy": 0.0, "loss": 0.0})
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


# --- Weights & Biases --------------------------------------------------------


class WandB(Tracker):
    """Weights & Biases.

    `project` and `group` are the name of the experiment by default; `mode: offline` writes into the run folder, for
    `wandb sync`.
    """

    name: Literal["wandb"]
    package = "wandb"
    project: str | None = None  # None: WANDB_PROJECT, else the name of the experiment
    entity: str | None = None  # user or team
    group: str | None = None  # None: the name of the experiment
    mode: Literal["online", "offline"] | None = None  # None: WANDB_MODE, else online

    def check(self) -> None:
        super().check()
        if (self.mode or os.environ.get("WANDB_MODE", "online")) == "online":
            import wandb

            if not wandb.login(prompt=False, verify=False):
                raise SettingsError(
                    "track is 'wandb', but no user is logged in; run `wandb login`, set WANDB_API_KEY, or give "
                    "{name: wandb, mode: offline} and upload later by `wandb sync`"
                )

    def open(self, run: TrackedRun) -> Session:
        return _WandBSession(self, run)


class _WandBSession(Session):
    def __init__(self, options: WandB, run: TrackedRun) -> None:
        import wandb

        self.run = wandb.init(
            project=options.project or os.environ.get("WANDB_PROJECT") or run.experiment,
            entity=options.entity,
            group=options.group or run.experiment,
            mode=options.mode,
            name=run.name,
            id=run.id,
            resume="allow",
            dir=str(run.folder),
            config=dict(run.settings),
            reinit="create_new",
            # It shall not wait longer than the run waits for it, in particular not when Python exits.
            settings=wandb.Settings(console="off", silent=True, init_timeout=_PATIENCE, finish_timeout=_PATIENCE),
        )
        self.id, self.address = self.run.id, None if self.run.offline else self.run.url

    def log(self, round: int, figures: Mapping[str, float]) -> None:
        if round >= self.run.step:  # a resumed run may repeat rounds, with the same figures
            self.run.log(dict(figures), step=round)

    def end(self, status: Status, summary: Mapping[str, Any]) -> None:
        self.run.summary.update({**summary, "status": status})
        self.run.finish(exit_code=0 if status == "finished" else 1)


# --- of the user -------------------------------------------------------------


class Own(Tracker):
    """A `module:callable` of your own: a function of the run and of its settings that returns a `Session`."""

    model_config = ConfigDict(extra="allow")

    def check(self) -> None:
        named.load("track", self.name)

    def open(self, run: TrackedRun) -> Session:
        session: Session = named.call("track", self.name, run, **(self.model_extra or {}))
        return session


_PATIENCE = 20  # seconds that a tracker may wait for its server


TRACKERS: dict[str, type[Tracker]] = {"tensorboard": TensorBoard, "wandb": WandB}


def _listed(value: Any) -> Any:
    """`tensorboard`, `{name: wandb, project: x}` or a list of these, as a tuple."""
    entries = value if isinstance(value, list | tuple) else [] if value is None else [value]
    trackers = tuple(map(_tracker, entries))
    names = [tracker.name for tracker in trackers]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"{twice} is listed twice; a tracker records a run once")
    return trackers


def _tracker(entry: Any) -> Tracker:
    settings = {"name": entry} if isinstance(entry, str) else entry
    if isinstance(settings, Tracker):
        return settings
    if not isinstance(settings, Mapping) or not isinstance(name := settings.get("name"), str):
        raise ValueError(
            f"found {entry!r}; expected one of {', '.join(TRACKERS)}, module:callable, or a mapping with a name, for "
            "instance {name: wandb, project: fedbn}"
        )
    if name not in TRACKERS and not named.is_name(name):
        raise ValueError(f"there is no tracker {name!r}; {did_you_mean(name, TRACKERS)}, or module:callable")
    tracker = TRACKERS.get(name, Own)
    for key in settings:
        if tracker is not Own and key not in tracker.model_fields:
            raise ValueError(f"{name} has no setting {key!r}; {did_you_mean(str(key), tracker.model_fields)}")
    try:
        return tracker.model_validate(settings)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{name}: {first['loc'][0]} is {first['input']!r}: {first['msg']}") from None


Track = Annotated[tuple[SerializeAsAny[Tracker], ...], BeforeValidator(_listed)]
