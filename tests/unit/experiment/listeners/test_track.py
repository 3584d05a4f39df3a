"""Each tracker receives a run as its own program reads it; trackers that fail or wait do not stop a run."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fedbn_flwr.commands import cli
from fedbn_flwr.experiment.file.layers import load_experiment
from fedbn_flwr.experiment.listeners import track
from fedbn_flwr.experiment.listeners.track import TrackedRun
from fedbn_flwr.experiment.settings import name_in
from fedbn_flwr.results.folder.reader import deciding
from fedbn_flwr.results.folder.writer import RunFolder
from tests.support.command import PATIENCE, ROOT
from tests.support.experiments import read
from tests.support.network import wait_for
from tests.support.refusals import refusal
from tests.support.runs import change_summary, is_finished

EXPERIMENT = """
rounds: 3
clients: 2
train: {lr: 0.05, batch_size: 16, steps: 1}
engine: {workers: 0, device: cpu, checkpoint_every: 1}
"""


def run(folder: Path, *words: str) -> RunFolder:
    (folder / "tracked.yaml").write_text(EXPERIMENT)
    assert cli.main(["run", str(folder / "tracked.yaml"), *words, "--out", str(folder / "out")]) == 0
    return RunFolder(folder / "out" / "FedAvg")


def continued(folder: Path, *words: str) -> RunFolder:
    """The run, first stopped after two rounds and then resumed."""
    stopped = run(folder, *words)
    change_summary(stopped.path, status="interrupted")
    return run(folder, *words, "--resume")


# --- the trackers, each read by its own package ------------------------------


def test_tensorboard_has_scalars_settings_and_status(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import plugin_data_pb2

    folder = run(tmp_path, "track=tensorboard")
    events = EventAccumulator(str(folder.path))
    events.Reload()
    history = folder.history()
    for name in ("accuracy", "train_loss", "bytes_up"):
        assert [(point.step, point.value) for point in events.Scalars(name)] == [
            (line["round"], pytest.approx(line[name], rel=1e-6)) for line in history
        ]
    parts = events.summary_metadata
    start = plugin_data_pb2.HParamsPluginData.FromString(
        parts["_hparams_/session_start_info"].plugin_data.content
    ).session_start_info
    assert start.hparams["train.lr"].number_value == 0.05
    assert start.hparams["strategy.name"].string_value == "FedAvg"
    assert "_hparams_/session_end_info" in parts
    assert events.Tensors("status/text_summary")[0].tensor_proto.string_val == [b"finished"]


def test_tensorboard_hides_the_rounds_that_a_resumed_run_repeats(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from fedbn_flwr.experiment.tensorboard import TensorBoard

    folder = run(tmp_path, "track=tensorboard")
    settings: dict[str, Any] = {}
    again = TensorBoard(TrackedRun(folder.path, experiment="tracked", name="FedAvg", settings=settings, done=1))
    for number in (2, 3):
        again.log(number, {"accuracy": 1.0})
    again.end("finished", {})
    events = EventAccumulator(str(folder.path))
    events.Reload()
    assert [(point.step, point.value == 1.0) for point in events.Scalars("accuracy")] == [
        (1, False),
        (2, True),
        (3, True),
    ]


@pytest.mark.slow
def test_wandb_has_figures_under_the_id_in_the_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.setattr(track, "LAST_METRICS", PATIENCE)  # wandb starts a process, which takes long on a busy machine
    tracker = "track={name: 'trackers:WandB', project: norms, mode: offline}"
    folder = run(tmp_path, tracker)
    identifier = (folder.path / "wandb.id").read_text().strip()
    (first,) = (folder.path / "wandb").glob(f"offline-run-*-{identifier}/run-{identifier}.wandb")
    wait_for("the history of wandb, whose own process writes it", lambda: len(wandb_history(first)) >= 3)
    figures = wandb_history(first)
    assert [line["_step"] for line in figures] == [1, 2, 3]
    assert [line["accuracy"] for line in figures] == [line["accuracy"] for line in folder.history()]


def wandb_history(file: Path) -> list[dict[str, Any]]:
    """The lines of the history in the file of an offline run: LevelDB's log format, after a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    data, place, content, lines = file.read_bytes(), 7, b"", []
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:  # the rest of a block
            place += 32768 - place % 32768
        size, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        if place + 7 + size > len(data):  # it is being written
            break
        content, place = content + data[place + 7 : place + 7 + size], place + 7 + size
        if kind in (1, 4):  # a whole record, or its last part
            record, content = wandb_internal_pb2.Record.FromString(content), b""
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                lines.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    return lines


@pytest.mark.slow
def test_a_tracker_of_the_user_has_both_sessions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example's, of MLflow."""
    pytest.importorskip("mlflow", reason="mlflow-skinny is not installed")
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    store = f"file:{tmp_path / 'mlruns'}"
    folder = continued(tmp_path, f"track={{name: 'trackers:MLflow', uri: '{store}'}}")
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=store)
    experiment = client.get_experiment_by_name("tracked")
    (tracked,) = client.search_runs([experiment.experiment_id])
    assert tracked.info.run_id == (folder.path / "mlflow.id").read_text().strip()
    assert (tracked.info.status, tracked.info.run_name) == ("FINISHED", "FedAvg")
    assert (tracked.data.params["train.lr"], tracked.data.params["model.norm"]) == ("0.05", "bn")
    points = client.get_metric_history(tracked.info.run_id, "accuracy")
    assert [(point.step, point.value) for point in points] == [
        (line["round"], line["accuracy"]) for line in folder.history()
    ]
    assert tracked.data.tags["summary.status"] == "finished"


# --- trackers that fail ------------------------------------------------------


class Broken:
    def __init__(self, run: TrackedRun) -> None:
        assert (run.experiment, run.settings["train.lr"], run.done) == ("tracked", 0.05, 0)

    def log(self, round: int, figures: Mapping[str, float]) -> None:
        raise ConnectionError("the server is\ngone")

    def end(self, status: str, summary: Mapping[str, Any]) -> None:
        raise AssertionError("a tracker that has failed is not called again")


class Slow(Broken):
    def log(self, round: int, figures: Mapping[str, float]) -> None:
        time.sleep(60)


@pytest.mark.parametrize(
    ("session", "reason"),
    [(Broken, "ConnectionError: the server is gone"), (Slow, "it did not take the last metrics within 0.2 s")],
)
def test_a_tracker_that_fails_costs_one_warning(
    session: type[Broken],
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    flower_log: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(track, "LAST_METRICS", 0.2)
    folder = run(tmp_path, f"track={__name__}:{session.__name__}")
    assert [line["round"] for line in folder.history()] == [1, 2, 3]
    assert is_finished(folder.path)
    assert [record.getMessage() for record in flower_log.records if "tracking" in record.getMessage()] == [
        f"FedAvg: tracking by {__name__}:{session.__name__} ended: {reason}; the run folder has all metrics"
    ]


# --- settings ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("track: tensorboard", ["tensorboard"]),
        ("track: [tensorboard, {name: 'a:b', mode: offline}]", ["tensorboard", "a:b"]),
        ("track: {name: 'a:b', uri: 'file:/srv/mlruns'}", ["a:b"]),
        ("track: null", []),
    ],
)
def test_track_is_a_name_a_mapping_or_a_list(text: str, names: list[str]) -> None:
    assert [*map(name_in, read(text).track)] == names


def test_a_missing_package_is_refused_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    for module in [name for name in sys.modules if name.endswith(("utils.tensorboard", "experiment.tensorboard"))]:
        monkeypatch.delitem(sys.modules, module)
    (tmp_path / "tracked.yaml").write_text(EXPERIMENT)
    error = refusal(capsys, "run", tmp_path / "tracked.yaml", "track=tensorboard", "--out", tmp_path / "out")
    advice = "which is not installed: pip install 'PATH/TO/CLONE[tensorboard]', with the path of your clone"
    expected = f"fedbn: error: track=tensorboard needs the package 'tensorboard', {advice}"
    assert error.startswith(expected)
    assert not (tmp_path / "out").exists()


def test_a_tracker_does_not_make_another_run_of_it(tmp_path: Path) -> None:
    plain, tracked = load_experiment(EXPERIMENT).runs[0], load_experiment(EXPERIMENT, ["track=tensorboard"]).runs[0]
    assert deciding(plain.model_dump(mode="json")) == deciding(tracked.model_dump(mode="json"))
