"""A summary adds up a history as by hand, and is read back from its file."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shlex
import sys
import tracemalloc
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import RecordDict

from fedbn_flwr.commands import cli
from fedbn_flwr.errors import SettingsError, StorageError, UserError
from fedbn_flwr.messages.arrays import pack
from fedbn_flwr.messages.serialization import dump
from fedbn_flwr.results.folder.checkpoint import CheckpointFile, Snapshot
from fedbn_flwr.results.folder.reader import deciding
from fedbn_flwr.results.folder.summary import Summary
from fedbn_flwr.results.folder.traffic import Traffic
from fedbn_flwr.results.folder.writer import RunFolder
from fedbn_flwr.results.metric_key import MetricKey
from fedbn_flwr.storage import read_store
from tests.support.disks import files_of_at_most
from tests.support.marks import slow_except
from tests.support.records import content


def begun() -> Summary:
    return Summary("demo", "FixBN", "FixBN(FedProx)", "cnn", "bn", 3, 10, "cpu", "2026-01-01", "the global model")


def line(server_round: int, **more: Any) -> dict[str, Any]:
    traffic = Traffic(1, 2, 2, bytes_down=100, bytes_up=50, broadcast_bytes=150, elements_up_per_client=server_round)
    return {"round": server_round, "clients": 2, **vars(traffic), "seconds": 0.25, **more}


HISTORY = [
    line(1, accuracy=0.5, loss=2.0, accuracy_sea=0.25, evaluated_with="model", mean_iou=0.125),
    line(2, accuracy=0.75, loss=1.0, accuracy_sea=0.5, clients_own_accuracy_sea=0.875),
    line(3, train_loss=0.1),
    line(4, accuracy=0.25, loss=1.5, accuracy_sea=0.125, evaluated_with="reestimated", clients_accuracy=0.625),
    line(5, train_loss=0.05),
]


def accounted() -> Summary:
    return replace(begun(), metrics=["mean_iou"], notes={"freeze_round": 2}).of(HISTORY)


def test_rounds_add_up_and_the_last_evaluation_counts() -> None:
    found = accounted()
    assert (found.rounds, found.seconds) == (5, 1.25)
    assert (found.accuracy, found.values["best_test_accuracy"], found.loss) == (0.25, 0.75, 1.5)
    of = found.values
    assert (of["evaluated_with"], of["clients_accuracy"]) == ("reestimated", 0.625)
    assert "mean_iou" not in of, "of an earlier round"
    assert found.domains == {MetricKey("accuracy", domain="sea"): 0.125}
    assert found.traffic == Traffic(5, 10, 10, 500, 250, 750, elements_up_per_client=5)


def test_a_summary_has_its_metrics_by_name() -> None:
    found = begun().of([line(1, rmse=2.5, accuracy=0.5)])
    regression = replace(begun(), task="regression").of([line(1, rmse=2.5)])
    assert (regression["rmse"], regression["bytes_up"]) == (2.5, 50)
    with pytest.raises(KeyError, match="the summary has no 'rmse'"):
        found["rmse"]


def test_the_file_is_flat_and_has_no_figure_that_there_is_not(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.write_summary(accounted())
    found = json.loads((tmp_path / "summary.json").read_text())
    assert found["broadcast_mib_per_round"] == 150 / 2**20
    assert (found["bytes_down"], found["accuracy_sea"], found["freeze_round"]) == (500, 0.125, 2)
    assert not {"error", "clients_mean_iou", "traffic", "domains", "notes"} & found.keys()
    folder.write_summary(begun())
    assert "accuracy" not in json.loads((tmp_path / "summary.json").read_text())


OF_REGRESSION = [
    line(1, rmse=2.0, mae=1.0, r2=-0.5, loss=4.0, rmse_sea=3.0, clients_rmse=2.5),
    line(2, rmse=1.5, mae=0.5, r2=0.5, loss=2.25, validation_rmse=1.25, best_round=2),
    line(3, rmse=1.75, mae=0.75, r2=0.25, loss=3.0, validation_rmse=1.5),
]


def of_regression() -> Summary:
    return replace(begun(), task="regression").of(OF_REGRESSION)


def test_of_a_regression_the_lowest_error_is_the_best() -> None:
    found = of_regression()
    assert (found.main, found.accuracy) == (1.75, None)
    assert found.values == {
        "rmse": 1.75, "mae": 0.75, "r2": 0.25, "loss": 3.0,
        "best_test_rmse": 1.5, "best_round": 2, "best_round_rmse": 1.5,
        "best_validation_rmse": 1.25,
    }  # fmt: skip
    assert found.domains == {}


def test_the_best_round_has_its_accuracy_on_own_examples_if_clients_were_evaluated() -> None:
    own = {"clients_own_accuracy": 0.75}
    found = begun().of(
        [
            line(1, accuracy=0.5, validation_accuracy=0.25, best_round=1),
            line(2, accuracy=0.25, validation_accuracy=0.5, best_round=2, **own),
            line(3, accuracy=1.0, validation_accuracy=0.25, clients_own_accuracy=0.5),
        ]
    )
    keys = ("best_round", "best_round_accuracy", "best_round_clients_own_accuracy", "clients_own_accuracy")
    assert [found.to_json()[key] for key in keys] == [2, 0.25, 0.75, 0.5]


def test_a_figure_that_is_not_finite_is_not_the_best() -> None:
    summary = begun()
    summary.task = "several"
    for number, loss in enumerate((float("nan"), 3.0, 2.0, float("nan"), float("inf")), start=1):
        summary.account(line(number, loss=loss))
    assert summary.values["best_test_loss"] == 2.0


@pytest.mark.parametrize(
    ("summary", "history"), [(begun(), []), (accounted(), HISTORY), (of_regression(), OF_REGRESSION)]
)
def test_a_summary_comes_back_from_its_file(summary: Summary, history: list[dict[str, Any]], tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert folder.summary() is None
    folder.write_summary(summary)
    for each in [*history, line(len(history) + 1)]:  # a line that a killed process did not account for
        folder.add_line("history.jsonl", each)
    with folder.locked():
        assert folder.summary() == summary


@pytest.mark.parametrize(
    ("lacking", "more", "message"),
    [
        ((), {"task": "ranking"}, r"task is 'ranking'; expected one of classification, binary"),
        (("seed", "model"), {}, r"it lacks model, seed; restore"),
    ],
)
def test_a_file_without_a_required_key_or_with_an_unknown_task_is_refused_by_its_name(
    lacking: tuple[str, ...], more: dict[str, str], message: str, tmp_path: Path
) -> None:
    content = {key: value for key, value in begun().to_json().items() if key not in lacking}
    (tmp_path / "summary.json").write_text(json.dumps(content | more))
    with pytest.raises(ValueError, match=rf"summary\.json': {message}"):
        RunFolder(tmp_path).summary()


def test_no_secret_of_the_command_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower starts a ServerApp with the token of its task, which others must not have: folders are shared."""
    words = ["flwr-serverapp", "--insecure", "--token", "s3cret-1", "--run-id", "7", "--auth-token=s3cret-2"]
    words += ["--superexec-auth-secret-file", "s3cret-3", "track.api_key=s3cret-4", "https://me:s3cret-5@host:1/a"]
    monkeypatch.setattr(sys, "argv", [f"/opt/bin/{words[0]}", *words[1:]])
    folder = RunFolder(tmp_path)
    folder.begin({"rounds": 2})
    folder.begin({"rounds": 2})  # resumed
    text = (tmp_path / "environment.json").read_text()
    assert "s3cret" not in text
    shown = words[0], "--insecure", "--token", "***", "--run-id", "7", "--auth-token=***"
    assert json.loads(text)["command"][:7] == [*shown]
    assert "https://***@host:1/a" in text


def test_a_run_continued_by_other_code_warns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flower_log: pytest.LogCaptureFixture
) -> None:
    folder, snapshot = RunFolder(tmp_path), Snapshot(1, "", RecordDict(), b"", None, {}, {})
    folder.begin({"rounds": 2})
    folder.add_line("history.jsonl", line(1))
    settings = deciding({"rounds": 2})
    folder.write_checkpoint(replace(snapshot, token=folder.token(), settings=settings, history=folder.digest), ())
    assert folder.begin({"rounds": 2}) == 1
    assert not flower_log.messages
    module = sys.modules["fedbn_flwr.results.folder.environment"]  # the package has a function of this name
    monkeypatch.setattr(module, "__version__", "99.0")
    assert folder.begin({"rounds": 2}) == 1
    (said,) = flower_log.messages
    assert "continues with other code: fedbn-flwr was '" in said
    assert "and is '99.0'" in said
    flower_log.clear()
    assert folder.begin({"rounds": 2}) == 1
    assert not flower_log.messages, "the session before had this version"


def test_the_digest_of_a_checkpoint_is_that_of_the_file_without_reading_it_again(tmp_path: Path) -> None:
    def add(folder: RunFolder, number: int) -> None:
        folder.add_line("history.jsonl", line(number, loss=float("nan"), train_loss=1 / number, name="\u00e9"))
        folder.add_line("clients.jsonl", {"round": number, "clients": {}})
        assert folder.digest == hashlib.sha256((tmp_path / "history.jsonl").read_bytes()).hexdigest()

    folder, config = RunFolder(tmp_path), {"rounds": 4}
    folder.begin(config)
    for number in (1, 2):
        add(folder, number)
    saved = Snapshot(2, folder.token(), RecordDict(), b"", None, {}, deciding(config), folder.digest)
    folder.write_checkpoint(saved, ())
    add(folder, 3)  # after the checkpoint, so that it is repeated
    resumed = RunFolder(tmp_path)
    assert resumed.begin(config) == 2
    assert resumed.digest == saved.history
    add(resumed, 3)


# --- Checkpoints: written whole, read one client at a time, and refused where damaged.


def snapshot(server_round: int) -> Snapshot:
    value = np.full(3, server_round, np.float32)
    return Snapshot(
        server_round, "ab" * 16, RecordDict({"arrays": pack({"w": value})}), dump([value]),
        trained={0: server_round},
    )  # fmt: skip


def states(server_round: int) -> Iterator[tuple[int, RecordDict]]:
    for node in range(3):
        yield node, RecordDict({"own": pack({"n": np.array(10 * server_round + node)})})


def told(of: Snapshot, states: Iterable[tuple[int, RecordDict]]) -> tuple[Any, ...]:
    clients = [(node, content(records)) for node, records in states]
    return of.round, of.token, dict(of.trained), content(of.model), of.strategy, clients


def read_all(file: CheckpointFile) -> tuple[Any, ...]:
    return told(file.read(), file.clients())


def expected(server_round: int) -> tuple[Any, ...]:
    return told(snapshot(server_round), states(server_round))


def test_a_checkpoint_comes_back_and_replaces_the_one_before(tmp_path: Path) -> None:
    file = CheckpointFile(tmp_path / "checkpoint")
    for server_round in (2, 4):
        file.write(snapshot(server_round), states(server_round))
        assert read_all(file) == expected(server_round)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
    file.write(dataclasses.replace(snapshot(5), strategy=None, unsaved="why"))
    assert (file.read().strategy, file.read().unsaved, list(file.clients())) == (None, "why", [])


def test_a_client_that_cannot_be_read_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    def broken() -> Iterator[tuple[int, RecordDict]]:
        yield from states(4)
        raise RuntimeError("a worker died")

    file = CheckpointFile(tmp_path / "checkpoint")
    file.write(snapshot(2), states(2))
    with pytest.raises(RuntimeError, match="a worker died"):
        file.write(snapshot(4), broken())
    assert read_all(file) == expected(2)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_a_checkpoint_is_written_and_read_one_client_at_a_time(tmp_path: Path) -> None:
    size, file = 2**20, CheckpointFile(tmp_path / "checkpoint")
    tracemalloc.start()
    try:
        file.write(
            snapshot(1), ((node, RecordDict({"own": pack({"n": np.zeros(size, np.uint8)})})) for node in range(30))
        )
        assert file.read().round == 1
        assert file.nodes() == list(range(30))
        for _ in file.clients():
            pass
        ((node, _),) = file.clients([7])
        assert node == 7
        assert tracemalloc.get_traced_memory()[1] < 6 * size  # of a client: file, tensors, arrays
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("how", ["changed", "cut"])
def test_a_damaged_checkpoint_is_named(tmp_path: Path, how: str) -> None:
    file = CheckpointFile(tmp_path / "checkpoint")
    file.write(snapshot(4), states(4))
    parts = read_store(file.path).values()
    data = file.path.read_bytes()
    within = [place for part in parts for place in range(data.index(part), data.index(part) + len(part), 7)]
    for place in within if how == "changed" else range(0, len(data), 97):
        file.path.write_bytes(data[:place] + (bytes([data[place] ^ 1]) + data[place + 1 :]) * (how == "changed"))
        with pytest.raises(SettingsError, match=r"checkpoint' is damaged: .*; restore the run folder from a copy, or"):
            read_all(file)


def test_a_disk_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / ".checkpoint.tmp").mkdir()
    with pytest.raises(StorageError, match="checkpoint' cannot be written: Is a directory; the previous checkpoint is"):
        CheckpointFile(tmp_path / "checkpoint").write(snapshot(1))


def test_a_run_folder_is_written_by_one_process(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    with folder.locked(), pytest.raises(SettingsError, match=r"another process is writing .*run"), folder.locked():
        pass
    with folder.locked():
        pass


def test_another_store_in_place_of_the_promises_is_refused(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.write_promises({"total": 1.5})
    assert folder.promises() == {"total": 1.5}
    CheckpointFile(tmp_path / "promises").write(snapshot(3), [])
    with pytest.raises(UserError, match=r"promises': it has the entries state, model"):
        folder.promises()


# --- A disk that becomes full ends a run with one line, and the run continues when there is space again.


EXPERIMENT = (
    "{name: full, rounds: 3, clients: 2, train: {steps: 1}, strategy: {name: FedBN}, engine: {workers: 0, "
    "checkpoint_every: 1}}"
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "out"
    assert cli.main(["run", EXPERIMENT, "--out", str(out)]) == 0
    return out


@pytest.mark.parametrize("name", slow_except({"checkpoint"}, ["config.yaml", "history.jsonl", "checkpoint", "report"]))
def test_a_full_disk_is_one_line_and_the_run_continues(
    name: str, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    if name == "report":
        request.getfixturevalue("plots")
    sizes = {file.name: file.stat().st_size for file in (whole / "FedBN").iterdir() if file.is_file()}
    limit = {
        "config.yaml": 100,
        "history.jsonl": max(sizes["config.yaml"], sizes["environment.json"], sizes["history.jsonl"] // 2) + 1,
        # Between the two largest files, since the checkpoint has seconds and so not always the same size.
        "checkpoint": (sizes["checkpoint"] + sizes["model.safetensors"]) // 2,
        "report": 2 * sizes["checkpoint"],  # less than a picture
    }[name]
    words = ["run", EXPERIMENT, "--out", str(tmp_path / "out")]
    with files_of_at_most(limit):
        assert cli.main(words) == 1
    error, *more = capsys.readouterr().err.splitlines()
    assert "cannot be written" in error
    assert "File too large" in error
    assert str(tmp_path / "out") in error
    began = (tmp_path / "out" / "FedBN" / "config.yaml").exists()
    assert began == (name != "config.yaml")
    resumed = shlex.join(["fedbn", "run", EXPERIMENT, "--out", str(tmp_path / "out"), "--resume"])
    assert [line.partition(" continue with: ")[2] for line in more] == [resumed] * (
        name in ("history.jsonl", "checkpoint")
    )
    assert cli.main([*words, "--resume"] if began else words) == 0
    assert (tmp_path / "out/FedBN/model.safetensors").read_bytes() == (whole / "FedBN/model.safetensors").read_bytes()
    history = [json.loads(line) for line in (tmp_path / "out/FedBN/history.jsonl").read_text().splitlines()]
    assert [line["round"] for line in history] == [1, 2, 3]


def test_standard_output_may_be_full(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    full = open("/dev/full", "w")  # noqa: SIM115
    with monkeypatch.context() as patch:
        patch.setattr("sys.stdout", full)
        assert cli.main(["list", "norms"]) == 1
    with suppress(OSError):
        full.close()
    assert capsys.readouterr().err == "fedbn: error: the output cannot be written: No space left on device\n"
