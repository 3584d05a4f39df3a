"""What a stopped or failed run leaves: its round, the command that continues it, a report, and the sessions.

One that diverged is a result, which resuming does not repeat.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from fedbn_flwr import run
from fedbn_flwr.commands import cli
from fedbn_flwr.errors import Diverged
from fedbn_flwr.experiment.file.layers import load_experiment
from fedbn_flwr.experiment.listeners.listener import FinishedRound, Running
from fedbn_flwr.experiment.listeners.recording import History
from fedbn_flwr.experiment.prepare import prepare
from fedbn_flwr.results.folder.writer import RunFolder
from fedbn_flwr.results.naming import sources
from tests.support.command import FEDBN, python, signalled

TEXT = """
name: mine
rounds: 4
clients: 2
data: {examples: 40}
model: {name: "my_parts:net"}
train: {steps: 1, loss: "my_parts:loss", schedule: {kind: "my_parts:rate"}}
evaluate: {metrics: ["my_parts:share"]}
engine: {workers: 0, device: cpu, checkpoint_every: 1}
"""
PARTS = """
import torch
from torch import nn

def net(num_classes):
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(72, num_classes))

def loss(outputs, labels):
    return nn.functional.cross_entropy(outputs, labels)

def share(outputs, labels):
    return (outputs.argmax(1) == labels).float().mean()

def rate(server_round, rounds, lr):
    if server_round == LAST and rounds == 4:
        raise ValueError("no rate for this round")
    return lr
"""


def hint_of(error: str) -> list[str]:
    """The words of the command that continues."""
    (line,) = [line for line in error.splitlines() if "continue with: " in line]
    return shlex.split(line.partition("continue with: ")[2])


@pytest.mark.slow
def test_the_command_after_a_failure_continues_with_an_edited_module(tmp_path: Path) -> None:
    (tmp_path / "mine file.yaml").write_text(TEXT)
    parts = tmp_path / "my_parts.py"
    parts.write_text(PARTS.replace("LAST", "3"))
    failed = python(FEDBN, "run", "mine file.yaml", "seed=3", "--device", "cpu", cwd=tmp_path)
    assert failed.returncode == 1
    assert "FedAvg stopped after round 2 of 4; continue with: " in failed.stderr
    (folder,) = (path.parent for path in tmp_path.glob("runs/*/*/summary.json"))
    assert "| FedAvg" in (folder.parent / "report.md").read_text()
    assert json.loads((folder.parent / "report.json").read_text())[0]["summary"]["rounds"] == 2
    first = json.loads((folder / "environment.json").read_text())
    assert first["modules"] == {"my_parts.py": hashlib.sha256(parts.read_bytes()).hexdigest()}

    parts.write_text(PARTS.replace("LAST", "None"))
    command = hint_of(failed.stderr)
    assert command[0] == "fedbn"
    done = python(FEDBN, *command[1:], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    after = json.loads((folder / "environment.json").read_text())
    resumed = after.pop("resumed")
    assert after == first
    assert after["command"][1:] == ["run", "mine file.yaml", "seed=3", "--device", "cpu"]
    assert [(session["after_round"], session["command"][1:]) for session in resumed] == [(2, command[1:])]
    assert resumed[0]["modules"] == {"my_parts.py": hashlib.sha256(parts.read_bytes()).hexdigest()}
    assert RunFolder(folder).history()[-1]["round"] == 4


@pytest.mark.slow
def test_ctrl_c_prints_the_round_and_the_command(tmp_path: Path) -> None:
    text = "{name: long, rounds: 5000, clients: 2, data: {examples: 40}, train: {steps: 1}, engine: {workers: 0}}"
    words = ["run", text, "--out", "my runs"]
    done = signalled(signal.SIGINT, lambda: list(tmp_path.glob("my runs/*/history.jsonl")), FEDBN, *words, cwd=tmp_path)
    assert done.returncode == 130
    assert "stopping after this round" in done.stderr
    (folder,) = (path.parent for path in tmp_path.glob("my runs/*/summary.json"))
    last = RunFolder(folder).history()[-1]["round"]
    assert f"fedbn: stopped\n{folder.name} stopped after round {last} of 5000; continue with: " in done.stderr
    assert hint_of(done.stderr) == ["fedbn", "run", text, "--out", "my runs", "--resume"]
    assert (tmp_path / "my runs" / "report.html").exists()
    assert "changed since" not in done.stderr


def test_a_stop_before_the_first_round_has_no_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(self: History, running: Running, at: FinishedRound) -> FinishedRound:
        raise KeyboardInterrupt

    monkeypatch.setattr(History, "on_start", interrupt)
    assert cli.main(["run", "{clients: 2, data: {examples: 40}, engine: {workers: 0}}", "--out", str(tmp_path)]) == 130
    assert capsys.readouterr().err == "\nfedbn: stopped\n"
    assert not (tmp_path / "report.md").exists()


def test_every_own_module_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of all kinds of parts, also in a package, which the server has imported when the run begins."""
    package = tmp_path / "own_package"
    package.mkdir()
    (package / "__init__.py").write_text("def brighter(images, generator): return images\n")
    (package / "inside.py").write_text(PARTS.replace("LAST", "None"))
    (tmp_path / "own_rule.py").write_text("from fedbn_flwr.strategies import FedAvg\nclass Mine(FedAvg):\n    pass\n")
    (tmp_path / "not_named.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    text = TEXT.replace("my_parts", "own_package.inside").replace("40}", "40, augment: ['own_package:brighter']}")
    (prepared,) = prepare(load_experiment(text, ["strategy.name=own_rule:Mine"]))
    files = ["own_package/__init__.py", "own_package/inside.py", "own_rule.py"]
    found = sources(prepared.run.model_dump(mode="json"))
    assert found == {file: hashlib.sha256((tmp_path / file).read_bytes()).hexdigest() for file in files}
    assert str(tmp_path) not in json.dumps(found)
    for name in ("own_package", "own_package.inside", "own_rule"):
        del sys.modules[name]


def test_resumed_sessions_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunFolder(tmp_path / "run")
    config = {"label": "x"}
    for number in range(3):
        monkeypatch.setattr(sys, "argv", ["/bin/fedbn", "run", *["--resume"] * bool(number)])
        run.begin(config, {"runs_at_the_same_time": 1 + number // 2})
    found = json.loads((run.path / "environment.json").read_text())
    assert found["command"] == ["fedbn", "run"]
    assert found["runs_at_the_same_time"] == 1
    assert [session["runs_at_the_same_time"] for session in found["resumed"]] == [1, 2]
    for session in found["resumed"]:
        assert (session["after_round"], session["command"]) == (0, ["fedbn", "run", "--resume"])
        assert session["versions"] == found["versions"]
    assert os.stat(run.path / "environment.json").st_mode & 0o077 == 0


# --- a run that diverged ---


EXPERIMENT = """
name: mine
rounds: 10
clients: 2
data: {examples: 200}
model: {name: mlp}
train: {batch_size: 16, steps: 1}
engine: {workers: 0, device: cpu}
runs: {FedBN: {strategy: {name: FedBN}}}
"""


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_diverged_run_is_a_result_and_is_not_repeated(
    jobs: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the same exit code and the same reason as the first time."""
    text = EXPERIMENT + "sweep: {train.lr: [1.0e+38, 0.05]}\n"
    words = ["run", text, "rounds=2", "only=FedBN", "--jobs", jobs, "--out", str(tmp_path)]
    assert cli.main(words) == 1
    shown, first = capsys.readouterr()
    assert re.search(r"\[1/2\] FedBN-lr=1e\+38: failed: .* 0 of 2 clients .*client 0 .*the client diverged\?", shown)
    before = environments(tmp_path)
    assert "same run would diverge again; lower the learning rate, or clip gradients" in first
    assert "--resume" not in first
    assert json.loads((tmp_path / "FedBN-lr=1e+38" / "summary.json").read_text())["diverged_in"] == 1
    assert cli.main([*words, "--resume"]) == 1
    printed = capsys.readouterr()
    assert printed.err == first
    assert environments(tmp_path) == before, "a session began"
    before_and_again = "1 of 2 runs are finished already\n[1/2] FedBN-lr=1e+38: diverged before and would again; delete"
    assert before_and_again in printed.out
    assert cli.main([*words, "train.clip=1", "--resume"]) == 2
    assert "cannot be resumed with other settings: train.clip" in capsys.readouterr().err


def test_a_single_diverged_run_fails_again_at_once(tmp_path: Path) -> None:
    given: dict[str, Any] = {"only": "FedBN", "out": tmp_path, "progress": False, "train": {"lr": 1e38}}
    with pytest.raises(Diverged) as first:
        run(EXPERIMENT, **given)
    before = environments(tmp_path)
    with pytest.raises(Diverged) as second:
        run(EXPERIMENT, resume=True, **given)
    assert str(second.value) == str(first.value)
    assert environments(tmp_path) == before


def environments(out: Path) -> list[bytes]:
    """What changes when a session of a run begins."""
    return [file.read_bytes() for file in sorted(out.glob("*/environment.json"))]
