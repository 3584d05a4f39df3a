"""What a person sees of a run: on a terminal and in a log."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.app import ArrayRecord

from fedbn_flwr.experiment.listeners import progress as module
from fedbn_flwr.experiment.listeners.listener import FinishedRound
from fedbn_flwr.experiment.listeners.progress import Progress, metrics_in_words
from fedbn_flwr.tasks import CLASSIFICATION
from tests.support.command import PATIENCE, PROGRAM, environment

EXPERIMENT = """
rounds: 2
clients: 3
train: {lr: 0.05, batch_size: 16, steps: 1}
strategy: {name: FedTAN, min_batch: 16}
engine: {workers: 0, device: cpu}
"""


def on_a_terminal(*command: str, cwd: Path) -> str:
    """What a command writes on a terminal of 100 columns, without colours."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=environment(TERM="xterm", COLUMNS="100", LINES="30"),
        stdin=slave,
        stdout=slave,
        stderr=slave,
    )
    os.close(slave)
    written = b""
    try:
        while part := os.read(master, 65536):
            written += part
    except OSError:  # the end of the output, on Linux
        pass
    finally:
        os.close(master)
    assert process.wait(PATIENCE) == 0, written.decode()
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written.decode())


@pytest.mark.slow
def test_a_terminal_shows_at_once_what_happens(tmp_path: Path) -> None:
    (tmp_path / "layers.yaml").write_text(EXPERIMENT)
    shown = on_a_terminal(*PROGRAM, "run", "layers.yaml", "--out", str(tmp_path / "out"), cwd=tmp_path)
    places = [
        shown.index(text)
        for text in (
            "loading PyTorch and Flower ...",
            "loading data",
            "1 run, in ",
            "[1/1] FedTAN: 2 rounds in ",
            "table: ",
            "Next: fedbn predict out/FedTAN --data PATH",
        )
    ]
    assert places == sorted(places)
    assert re.search(r"all runs +[━╸╺]+ \d:\d\d:\d\d \d+ %", shown)
    assert re.search(r"\[1/1\] FedTAN +[━╸╺]+ \d:\d\d:\d\d \d/2", shown)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The time that a Progress sees."""
    now = SimpleNamespace(seconds=1.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now.seconds))
    return now


RUNNING: Any = SimpleNamespace(
    prepared=SimpleNamespace(rule=SimpleNamespace(notes=dict), task=CLASSIFICATION), run=SimpleNamespace(rounds=4)
)


def at(number: int, rounds: int = 4) -> FinishedRound:
    arrays = ArrayRecord()
    line = {"round": number, "accuracy": 0.5, "loss": 2.0, "train_loss": 1.5}
    return FinishedRound(number, arrays, arrays, is_last=number == rounds, line=line)


def test_a_log_has_a_line_for_each_finished_run_and_after_a_minute_without_one(
    clock: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second run has three clients instead of one, so its rounds take three times as long."""
    with Progress(["Centralised", "FedTAN"], [4, 4], [1, 3], plain=True) as progress:
        run = progress.begin(0)
        run.on_start(RUNNING, at(0))
        for number in range(1, 5):
            clock.seconds += 10
            run.on_round(RUNNING, at(number))
        progress.end(0)
        run = progress.begin(1)
        run.on_start(RUNNING, at(2))  # resumed
        clock.seconds += 61
        run.on_round(RUNNING, at(3))
        clock.seconds += 20
        run.on_round(RUNNING, replace(at(4), line={"train_loss": 1.0}))  # it is not evaluated
        progress.end(1)
    assert capsys.readouterr().out.splitlines() == [
        "[1/2] Centralised: 4 rounds in 40 s  accuracy 0.5000  train loss 1.5000",
        "all runs: 70 %, about 43 s left",  # seven clients' rounds took 101 s, and three are left
        "[2/2] FedTAN: 4 rounds, the last 2 in 81 s  accuracy 0.5000  train loss 1.0000",
    ]


def test_the_metric_of_a_run_is_the_main_one_of_its_task() -> None:
    assert metrics_in_words({"loss": 4.0, "rmse": 2.0, "train_loss": 5.0}, "rmse") == "RMSE 2.0000  train loss 5.0000"
    assert metrics_in_words({"loss": 4.0, "train_loss": 5.0}, "loss") == "loss 4.0000  train loss 5.0000"


def test_ctrl_c_before_the_first_run_stops_at_once() -> None:
    with pytest.raises(KeyboardInterrupt), Progress(["FedAvg"], [4], quiet=True):
        os.kill(os.getpid(), 2)


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGHUP])
def test_a_stop_whose_exception_is_swallowed_ends_the_run_after_its_round(sent: int) -> None:
    """As pydantic-core swallows an exception that is raised while it looks up the kind of a union's member."""
    before = signal.signal(sent, signal.SIG_DFL)  # nohup ignores SIGHUP, and then a run does too
    try:
        with Progress(["FedAvg"], [4], quiet=True) as progress:
            run = progress.begin(0)
            assert not run.on_round(RUNNING, at(1)).stop
            with contextlib.suppress(KeyboardInterrupt):
                os.kill(os.getpid(), sent)
            assert run.on_round(RUNNING, at(2)).stop
    finally:
        signal.signal(sent, before)
