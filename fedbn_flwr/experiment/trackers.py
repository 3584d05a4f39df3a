"""The trackers that `track` names: a session of each, whose arguments are the settings of the tracker.

A tracker's package is imported only where it is used. Addresses and keys of servers come from the tracker's own
environment variables and login; an experiment file has no secrets, because nodes receive its content.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator

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
    measure: str = "accuracy"  # that runs of its task are compared by


class Session(ABC):
    """An open tracked run. It and its methods may wait for a network and may raise anything."""

    package: ClassVar[str]  # that it needs, which has the name of its extra

    address: str | None = None  # to look at it
    id: str | None = None  # by which a later session continues the tracked run

    @abstractmethod
    def log(self, round: int, figures: Mapping[str, float]) -> None:
        """Record figures of a round."""

    @abstractmethod
    def end(self, status: Status, summary: Mapping[str, Any]) -> None:
        """Record the summary and the status, and close the tracked run."""

    @classmethod
    def check(cls, options: Mapping[str, Any]) -> None:
        """Raise SettingsError if the tracker cannot be used here with these settings."""
        if importlib.util.find_spec(cls.package) is None:
            raise SettingsError(
                f"track is {cls.package!r}, but the package {cls.package!r} is not installed; "
                f"pip install 'fedbn-flwr[{cls.package}]'"
            )


# --- TensorBoard -------------------------------------------------------------


class TensorBoard(Session):
    """Event files in the run folder; `tensorboard --logdir DIR` shows all runs in DIR."""

    package = "tensorboard"

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


# --- Weights & Biases --------------------------------------------------------


class WandB(Session):
    """Weights & Biases.

    `project` and `group` are the name of the experiment by default; `mode: offline` writes into the run folder, for
    `wandb sync`.
    """

    package = "wandb"

    def __init__(
        self,
        run: TrackedRun,
        project: str | None = None,  # None: WANDB_PROJECT, else the name of the experiment
        entity: str | None = None,  # user or team
        group: str | None = None,  # None: the name of the experiment
        mode: Literal["online", "offline"] | None = None,  # None: WANDB_MODE, else online
    ) -> None:
        import wandb

        self.run = wandb.init(
            project=project or os.environ.get("WANDB_PROJECT") or run.experiment,
            entity=entity,
            group=group or run.experiment,
            mode=mode,
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

    @classmethod
    def check(cls, options: Mapping[str, Any]) -> None:
        super().check(options)
        if (mode := options.get("mode") or os.environ.get("WANDB_MODE", "online")) not in ("online", "offline"):
            raise SettingsError(f"track: mode of wandb is {mode!r}; expected 'online' or 'offline'")
        if mode == "online":
            import wandb

            if not wandb.login(prompt=False, verify=False):
                raise SettingsError(
                    "track is 'wandb', but no user is logged in; run `wandb login`, set WANDB_API_KEY, or give "
                    "{name: wandb, mode: offline} and upload later by `wandb sync`"
                )


_PATIENCE = 20  # seconds that a tracker may wait for its server


TRACKERS: dict[str, type[TensorBoard] | type[WandB]] = {"tensorboard": TensorBoard, "wandb": WandB}


def check(entry: Mapping[str, Any]) -> None:
    """Raise SettingsError if the tracker of an entry cannot be used here."""
    name, options = _split(entry)
    if name in TRACKERS:
        TRACKERS[name].check(options)
    else:
        named.load("track", name)


def begin(entry: Mapping[str, Any], run: TrackedRun) -> Session:
    """Begin a tracked run, or continue `run.id`."""
    name, options = _split(entry)
    session: Session = TRACKERS[name](run, **options) if name in TRACKERS else named.call("track", name, run, **options)
    return session


def _split(entry: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    return entry["name"], {key: value for key, value in entry.items() if key != "name"}


def options_of(name: str) -> list[str]:
    """The settings of a tracker of this module."""
    return list(inspect.signature(TRACKERS[name]).parameters)[1:]


def _listed(value: Any) -> tuple[Mapping[str, Any], ...]:
    """`tensorboard`, `{name: wandb, project: x}` or a list of these, as a tuple of mappings."""
    entries = value if isinstance(value, list | tuple) else [] if value is None else [value]
    found = tuple(map(_entry, entries))
    names = [entry["name"] for entry in found]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"{twice} is listed twice; a tracker records a run once")
    return found


def _entry(value: Any) -> Mapping[str, Any]:
    entry = {"name": value} if isinstance(value, str) else value
    if not isinstance(entry, Mapping) or not isinstance(name := entry.get("name"), str):
        raise ValueError(
            f"found {value!r}; expected one of {', '.join(TRACKERS)}, module:callable, or a mapping with a name, for "
            "instance {name: wandb, project: fedbn}"
        )
    if name in TRACKERS:
        known = ["name", *options_of(name)]
        for key in entry:
            if key not in known:
                raise ValueError(f"{name} has no setting {key!r}; {did_you_mean(str(key), known)}")
    elif not named.is_name(name):
        raise ValueError(f"there is no tracker {name!r}; {did_you_mean(name, TRACKERS)}, or module:callable")
    return entry


Track = Annotated[tuple[Mapping[str, Any], ...], BeforeValidator(_listed)]
