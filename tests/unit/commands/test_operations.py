"""`fedbn status` on run folders as a deployment leaves them, and logs."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedbn_flwr.commands import cli
from fedbn_flwr.results.folder.writer import RunFolder
from fedbn_flwr.results.read.runs import STATES
from tests.support.command import ROOT, commands_of
from tests.support.refusals import refusal
from tests.support.runs import write_run

DAY = 86400
PAGE = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")


def make_run(folder: Path, status: Any, *, days: float, rounds: int = 10) -> Path:
    """A run with three rounds of 0.5 s that last wrote some days ago."""
    write_run(folder, folder.name, status=status, config={"rounds": rounds, "clients": 4}, clients=3)
    (folder / "checkpoint").write_bytes(bytes(5000))
    (folder / "model.safetensors").write_bytes(bytes(100))
    for file in folder.iterdir():
        os.utime(file, (time.time() - days * DAY,) * 2)
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Path]:
    make_run(tmp_path / "old", "finished", days=40, rounds=3)
    make_run(tmp_path / "new", "finished", days=1, rounds=3)
    make_run(tmp_path / "stopped", "interrupted", days=40)
    make_run(tmp_path / "now", "running", days=0, rounds=1000)
    make_run(tmp_path / "waits", "running", days=50)
    make_run(tmp_path / "killed", "running", days=0)
    with RunFolder(tmp_path / "now").locked(), RunFolder(tmp_path / "waits").locked():
        yield tmp_path


def test_status_says_which_runs_still_write(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status", str(runs), "--json"]) == 0
    found = {run["label"]: run for run in json.loads(capsys.readouterr().out)}
    assert {label: run["status"] for label, run in found.items()} == {
        "old": "finished", "new": "finished", "stopped": "interrupted", "now": "running", "waits": "silent",
        "killed": "interrupted",
    }  # fmt: skip
    assert json.loads((runs / "killed" / "summary.json").read_text())["status"] == "running"
    now = found["now"]
    assert (now["round"], now["rounds"], now["clients"], now["clients_expected"]) == (3, 1000, 3, 4)
    assert 0 <= now["seconds_left"] <= 997 * 0.5
    assert found["waits"]["seconds_left"] is None


def test_status_lists_the_last_changed_first(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status", str(runs)]) == 0
    head, _, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["run", "status", "round", "accuracy", "changed", "left"]
    assert [Path(line.split()[0]).name for line in lines][1:3] == ["now", "new"]
    assert lines[2].split()[1:4] == ["finished", "3/3", "0.6000"]


@pytest.mark.parametrize(
    ("minutes", "status", "says"),
    [(1, "running", ""), (4, "silent", "nothing written for 4.0 min, and its longest round took 0.5 s: it waits")],
)
def test_a_run_that_does_not_write_looks_stopped(
    minutes: float,
    status: str,
    says: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its rounds took half a second, and nobody can know whether it is locked."""
    make_run(tmp_path / "run", "running", days=minutes / 60 / 24)
    (tmp_path / "run" / ".lock").mkdir()
    assert cli.main(["status", str(tmp_path)]) == 0
    _, _, line, *more = capsys.readouterr().out.splitlines()
    assert line.split()[1] == status
    assert line.endswith("ago"), "no time left: the round is late"
    assert [text.strip()[: len(says)] for text in more] == ([says] if says else [])
    assert cli.main(["status", str(tmp_path), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["seconds_left"] is None
    assert (found["silence"] is None) == (not says)


def test_status_names_the_folders_that_it_cannot_read(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (runs / "old" / "summary.json").write_text("{")
    assert cli.main(["status", str(runs), "--json"]) == 0
    printed = capsys.readouterr()
    assert {run["label"] for run in json.loads(printed.out)} == {"new", "stopped", "now", "waits", "killed"}
    assert printed.err == f"not shown, because the files are damaged or not of a run: {runs / 'old'}\n"


def left(runs: Path) -> set[str]:
    return {path.name for path in runs.iterdir()}


def test_a_folder_that_is_missing_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "is not a folder" in refusal(capsys, "status", tmp_path / "missing")
    assert not left(tmp_path)


def test_the_commands_of_the_page_succeed(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They change nothing."""
    folder = runs.rename(runs.with_name("runs"))
    monkeypatch.chdir(folder.parent)
    before = left(folder)
    words = commands_of(PAGE)
    assert words
    for _, *arguments in words:
        assert cli.main(arguments) == 0
    assert left(folder) == before
    table = PAGE.split("| status | meaning |")[1].split("\n\n")[0]
    assert tuple(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) == STATES


@pytest.mark.parametrize("key", ["engine", "evaluate"])
def test_a_section_without_settings_is_damage(key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "run", "run", config={"rounds": 10, key: None})
    error = refusal(capsys, "report", tmp_path, "--out", tmp_path / "report")
    assert f"config.yaml': {key} is None; expected a valid dictionary" in error
    assert cli.main(["status", str(tmp_path)]) == 0
    assert "the files are damaged" in capsys.readouterr().err
