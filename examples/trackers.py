"""Trackers of your own, for `track: {name: 'trackers:MLflow', uri: 'http://localhost:5000'}`.

Copy this file to where you start `fedbn`, and install `wandb` (0.31 or later), `mlflow-skinny` or `trackio`. A tracker
is a function of the run and of its settings in the experiment; it returns a session, whose methods `log` and
`end` may wait for a network and may fail.
"""

import os
import re
import time
from collections.abc import Mapping
from typing import Any, Literal

from fedbn_flwr.experiment.listeners.track import TrackedRun


def _known_id(run: TrackedRun, tracker: str) -> str | None:
    """The id of the tracked run that a resumed run continues."""
    file = run.folder / f"{tracker}.id"
    return file.read_text(encoding="utf-8") if run.done and file.exists() else None


def _keep_id(run: TrackedRun, tracker: str, identifier: str) -> None:
    (run.folder / f"{tracker}.id").write_text(identifier, encoding="utf-8")


# --- Weights & Biases --------------------------------------------------------


class WandB:
    """Weights & Biases; `mode: offline` writes into the run folder, for `wandb sync`.

    By default `project` is WANDB_PROJECT or the name of the experiment, and `group` the name of the experiment.
    """

    def __init__(
        self,
        run: TrackedRun,
        project: str | None = None,
        entity: str | None = None,  # user or team
        group: str | None = None,
        mode: Literal["online", "offline"] | None = None,  # None: WANDB_MODE, else online
    ) -> None:
        import wandb

        self.run = wandb.init(
            project=project or os.environ.get("WANDB_PROJECT") or run.experiment,
            entity=entity,
            group=group or run.experiment,
            mode=mode,
            name=run.name,
            id=_known_id(run, "wandb"),
            resume="allow",
            dir=str(run.folder),
            config=dict(run.settings),
            reinit="create_new",
            # It must not wait longer than the run waits for it, in particular not when Python exits.
            settings=wandb.Settings(console="off", silent=True, init_timeout=20, finish_timeout=20),
        )
        _keep_id(run, "wandb", self.run.id)

    def log(self, round: int, metrics: Mapping[str, float]) -> None:
        if round >= self.run.step:  # a resumed run may repeat rounds, with the same metrics
            self.run.log(dict(metrics), step=round)

    def end(self, status: str, summary: Mapping[str, Any]) -> None:
        self.run.summary.update({**summary, "status": status})
        self.run.finish(exit_code=0 if status == "finished" else 1)


# --- MLflow ------------------------------------------------------------------


class MLflow:
    """The MLflow server or folder `uri` (default: MLFLOW_TRACKING_URI), under the MLflow experiment `experiment`."""

    def __init__(self, run: TrackedRun, uri: str | None = None, experiment: str | None = None) -> None:
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # refused by default from MLflow 3.7 on
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")  # seconds
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param, RunTag

        self.metric, self.tag = Metric, RunTag
        self.client = MlflowClient(tracking_uri=uri)
        if known := _known_id(run, "mlflow"):
            self.id = known
            self.client.update_run(self.id, status="RUNNING")
            return
        name = experiment or run.experiment
        found = self.client.get_experiment_by_name(name)
        number = self.client.create_experiment(name) if found is None else found.experiment_id
        self.id = self.client.create_run(number, run_name=run.name).info.run_id
        _keep_id(run, "mlflow", self.id)
        parameters = [Param(key, str(value)) for key, value in run.settings.items()]
        for first in range(0, len(parameters), 100):  # a request takes 100 parameters
            self.client.log_batch(self.id, params=parameters[first : first + 100])

    def log(self, round: int, metrics: Mapping[str, float]) -> None:
        now = int(1000 * time.time())
        entries = [self.metric(_known(name), value, now, round) for name, value in metrics.items()]
        for first in range(0, len(entries), 1000):  # a request takes 1,000 metrics
            self.client.log_batch(self.id, metrics=entries[first : first + 1000])

    def end(self, status: str, summary: Mapping[str, Any]) -> None:
        tags = [self.tag(_known(f"summary.{key}"), str(value)) for key, value in summary.items()]
        self.client.log_batch(self.id, tags=tags[:100])
        self.client.set_terminated(
            self.id, status={"finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}[status]
        )


def _known(name: str) -> str:
    """A name that MLflow takes."""
    return re.sub(r"[^A-Za-z0-9_./ :-]", "_", name)


# --- Trackio -----------------------------------------------------------------


class Trackio:
    """A database on this machine (TRACKIO_DIR), or the Hugging Face Space `space` (OWNER/NAME)."""

    def __init__(self, run: TrackedRun, project: str | None = None, space: str | None = None) -> None:
        import trackio

        # Trackio continues a run by its name; runs of several folders may have the same one.
        name = _known_id(run, "trackio") or f"{run.name}-{time.strftime('%Y%m%d-%H%M%S')}"
        _keep_id(run, "trackio", name)
        self.run = trackio.init(
            project=project or run.experiment,
            name=name,
            space_id=space,
            config=dict(run.settings),
            resume="allow",
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )

    def log(self, round: int, metrics: Mapping[str, float]) -> None:
        self.run.log(dict(metrics), step=round)

    def end(self, status: str, summary: Mapping[str, Any]) -> None:
        self.run.log({"status": status, **{f"summary/{key}": value for key, value in summary.items()}})
        self.run.finish()
