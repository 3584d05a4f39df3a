"""The trackers that `track` names: their settings, and how each of them is written to.

A tracker's package is imported only where it is used. Addresses and keys of servers come from the tracker's own
environment variables and login; an experiment file has no secrets, because nodes receive its content.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

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


# --- MLflow ------------------------------------------------------------------


class MLflow(Tracker):
    """The MLflow server or folder `uri` (default: MLFLOW_TRACKING_URI), under the MLflow experiment `experiment`."""

    name: Literal["mlflow"]
    package = "mlflow"
    uri: str | None = None  # of the server, or file:/path; None: MLFLOW_TRACKING_URI
    experiment: str | None = None  # None: the name of the experiment

    def check(self) -> None:
        super().check()
        if not (self.uri or os.environ.get("MLFLOW_TRACKING_URI")):
            raise SettingsError(
                "track is 'mlflow', but there is no address to write to; set MLFLOW_TRACKING_URI, or give "
                "{name: mlflow, uri: 'http://localhost:5000'} or a folder, {name: mlflow, uri: 'file:/path/mlruns'}"
            )

    def open(self, run: TrackedRun) -> Session:
        return _MLflowSession(self, run)


class _MLflowSession(Session):
    def __init__(self, options: MLflow, run: TrackedRun) -> None:
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # refused by default from MLflow 3.7 on
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")  # seconds
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param, RunTag

        self.metric, self.tag = Metric, RunTag
        self.client = MlflowClient(tracking_uri=options.uri)
        if run.id is not None:
            self.id = run.id
            self.client.update_run(self.id, status="RUNNING")
            return
        name = options.experiment or run.experiment
        found = self.client.get_experiment_by_name(name)
        experiment = self.client.create_experiment(name) if found is None else found.experiment_id
        self.id = self.client.create_run(experiment, run_name=run.name).info.run_id
        parameters = [Param(key, str(value)) for key, value in run.settings.items()]
        for first in range(0, len(parameters), 100):  # a request takes 100 parameters
            self.client.log_batch(self.id, params=parameters[first : first + 100])

    def log(self, round: int, figures: Mapping[str, float]) -> None:
        now = int(1000 * time.time())
        metrics = [self.metric(_mlflow_name(name), value, now, round) for name, value in figures.items()]
        for first in range(0, len(metrics), 1000):  # a request takes 1,000 figures
            self.client.log_batch(self.id, metrics=metrics[first : first + 1000])

    def end(self, status: Status, summary: Mapping[str, Any]) -> None:
        tags = [self.tag(_mlflow_name(f"summary.{key}"), str(value)) for key, value in summary.items()]
        self.client.log_batch(self.id, tags=tags[:100])
        self.client.set_terminated(
            self.id, status={"finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}[status]
        )


def _mlflow_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_./ :-]", "_", name)


# --- Trackio -----------------------------------------------------------------


class Trackio(Tracker):
    """A database on this machine (TRACKIO_DIR), or the Hugging Face Space `space`."""

    name: Literal["trackio"]
    package = "trackio"
    project: str | None = None  # None: the name of the experiment
    space: str | None = None  # OWNER/NAME of a Space; None: this machine

    def open(self, run: TrackedRun) -> Session:
        return _TrackioSession(self, run)


class _TrackioSession(Session):
    def __init__(self, options: Trackio, run: TrackedRun) -> None:
        import trackio

        # Trackio continues a run by its name; runs of several folders may have the same one.
        self.id = run.id or f"{run.name}-{time.strftime('%Y%m%d-%H%M%S')}"
        self.run = trackio.init(
            project=options.project or run.experiment,
            name=self.id,
            space_id=options.space,
            config=dict(run.settings),
            resume="allow",
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )

    def log(self, round: int, figures: Mapping[str, float]) -> None:
        self.run.log(dict(figures), step=round)

    def end(self, status: Status, summary: Mapping[str, Any]) -> None:
        self.run.log({"status": status, **{f"summary/{key}": value for key, value in summary.items()}})
        self.run.finish()


_PATIENCE = 20  # seconds that a tracker may wait for its server


TRACKERS: dict[str, type[Tracker]] = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow, "trackio": Trackio}


def _listed(value: Any) -> Any:
    """`tensorboard`, `{name: wandb, project: x}` or a list of these, as a tuple of mappings."""
    entries = value if isinstance(value, list | tuple) else [] if value is None else [value]
    named = tuple(map(_named, entries))
    names = [entry.name if isinstance(entry, Tracker) else str(entry["name"]) for entry in named]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"{twice} is listed twice; a tracker records a run once")
    return named


def _named(entry: Any) -> Any:
    settings = {"name": entry} if isinstance(entry, str) else entry
    if isinstance(settings, Tracker):
        return settings
    if not isinstance(settings, Mapping) or "name" not in settings:
        raise ValueError(
            f"found {entry!r}; expected one of {', '.join(TRACKERS)}, or a mapping with a name, for instance "
            "{name: wandb, project: fedbn}"
        )
    name = str(settings["name"])
    if name not in TRACKERS:
        raise ValueError(f"there is no tracker {name!r}; {did_you_mean(name, TRACKERS)}")
    known = TRACKERS[name].model_fields
    for key in settings:
        if key not in known:
            raise ValueError(f"{name} has no setting {key!r}; {did_you_mean(str(key), known)}")
    return settings


AnyTracker = Annotated[TensorBoard | WandB | MLflow | Trackio, Field(discriminator="name")]
Track = Annotated[tuple[AnyTracker, ...], BeforeValidator(_listed)]
