"""Work in slices: runs that stop in time and continue are bit for bit those that were carried out in one go."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedbn_flwr import cli, run, run_all
from fedbn_flwr.errors import Diverged, OutOfTime, SettingsError
from fedbn_flwr.experiment.file.layers import load_experiment
from fedbn_flwr.experiment.listeners import recording, slices
from fedbn_flwr.experiment.run import loop
from fedbn_flwr.experiment.run.launch import Outcome, carry_out, is_begun
from fedbn_flwr.results.folder import RunFolder
from tests.support.command import FEDBN, python
from tests.support.runs import is_finished, saved_round
from tests.support.sessions import outcome

EXPERIMENT = """
name: mine
rounds: 10
clients: 2
data: {examples: 200}
model: {name: mlp}
train: {batch_size: 16, steps: 1}
engine: {workers: 0, device: cpu}
runs:
  FedBN: {strategy: {name: FedBN}}
  Scaffold: {strategy: {name: Scaffold}}
  FixBN: {strategy: {name: FixBN, freeze_round: 2}}
"""
NAMES = ("FedBN", "Scaffold", "FixBN")
MOMENT = 1e-6  # minutes


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("straight")
    run_all(EXPERIMENT, out=out, jobs=1, progress=False)
    return out


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock on which only training takes time: a minute a round."""
    found, train_round = SimpleNamespace(now=0.0), loop.train_round

    def minute(*given: Any) -> Any:
        found.now += 60.0
        return train_round(*given)

    monkeypatch.setattr(slices, "monotonic", lambda: found.now)
    monkeypatch.setattr(recording, "time", SimpleNamespace(monotonic=lambda: found.now))
    monkeypatch.setattr(loop, "train_round", minute)
    return found


def a_slice(out: Path, minutes: float, clock: SimpleNamespace, jobs: int = 1) -> Outcome:
    clock.now = 0.0
    experiment = load_experiment(EXPERIMENT)
    return carry_out(experiment, out, resume=is_begun(experiment, out), jobs=jobs, quiet=True, ends=minutes * 60)


def rounds(out: Path) -> list[int]:
    """The rounds of the runs, each with a checkpoint of the last one."""
    found = [len(RunFolder(out / name).history()) for name in NAMES]
    assert [saved_round(out / name) for name in NAMES] == found
    return found


def test_runs_in_slices_equal_runs_in_one_go(straight: Path, tmp_path: Path, clock: SimpleNamespace) -> None:
    """Twelve minutes are four rounds for each of three runs; what one leaves is for the others."""
    first = a_slice(tmp_path, 12, clock)
    assert (rounds(tmp_path), first.unfinished) == ([4, 4, 4], "unfinished runs: 3 of 3")
    assert first.failures == []
    assert "FixBN" in first.report
    assert (tmp_path / "report.html").exists()
    summary = RunFolder(tmp_path / "FedBN").summary()
    assert summary is not None
    assert summary.status == "interrupted"
    # Shares of 17/3, 12/2 and 6 minutes.
    assert a_slice(tmp_path, 17, clock).unfinished == "unfinished runs: 1 of 3"
    assert rounds(tmp_path) == [9, 10, 10]
    assert a_slice(tmp_path, 12, clock).unfinished == ""
    assert [outcome(tmp_path / name) for name in NAMES] == [outcome(straight / name) for name in NAMES]


@pytest.mark.slow
def test_runs_side_by_side_share_the_time_too(straight: Path, tmp_path: Path, clock: SimpleNamespace) -> None:
    """Each process has a copy of the clock: 4 * 2 / 3 minutes for the first two runs, and 4 for the third."""
    assert a_slice(tmp_path, 4, clock, jobs=2).unfinished == "unfinished runs: 3 of 3"
    assert rounds(tmp_path) == [2, 2, 4]
    assert a_slice(tmp_path, 60, clock, jobs=2).unfinished == ""
    assert [outcome(tmp_path / name) for name in NAMES] == [outcome(straight / name) for name in NAMES]


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_run_without_time_for_a_round_does_not_begin(jobs: int, tmp_path: Path, clock: SimpleNamespace) -> None:
    """Only the first run trains at least one round in any case."""
    assert a_slice(tmp_path, -1, clock, jobs).unfinished == "unfinished runs: 3 of 3"
    assert [folder.name for folder in tmp_path.iterdir() if folder.is_dir()] == ["FedBN"]
    assert len(RunFolder(tmp_path / "FedBN").history()) == 1


def test_the_same_command_continues_until_the_runs_are_finished(tmp_path: Path) -> None:
    """A job of three rounds, in slices that have time for nothing."""
    (tmp_path / "mine.yaml").write_text(EXPERIMENT)
    words = ["run", "mine.yaml", "rounds=3", "only=FedBN", "--out", "my runs", "--minutes", f"{MOMENT:g}"]
    for number in (1, 2):
        done = python(FEDBN, *words, cwd=tmp_path)
        assert done.returncode == 75, done.stderr
        assert saved_round(tmp_path / "my runs" / "FedBN") == number
        assert done.stderr.splitlines() == [
            "fedbn: out of time, unfinished runs: 1 of 1",
            f"FedBN stopped after round {number} of 3; continue with: fedbn run mine.yaml rounds=3 only=FedBN "
            "--out 'my runs' --minutes 1e-06 --resume",
        ]
        assert "\ntable: my runs/report.md\n" in done.stdout
    done = python(FEDBN, *words, "--resume", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert is_finished(tmp_path / "my runs" / "FedBN")


def test_resume_still_needs_a_run_and_other_settings_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["run", EXPERIMENT, "only=FedBN", "--out", str(tmp_path), "--minutes", f"{MOMENT:g}"]
    assert cli.main([*words, "--resume"]) == 2
    assert "has no run to resume" in capsys.readouterr().err
    assert cli.main(words) == 75
    assert cli.main([*words, "train.lr=0.3"]) == 2
    assert "cannot be resumed with other settings" in capsys.readouterr().err
    assert cli.main(["run", "demo", "--minutes", "0"]) == 2
    assert "minutes is 0.0; expected a number above 0" in capsys.readouterr().err


def test_a_failed_run_is_reported_and_the_exit_code_asks_for_another_slice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = EXPERIMENT + "sweep: {train.lr: [1.0e+38, 0.05]}\n"
    words = ["run", text, "rounds=2", "only=FedBN", "--jobs", "1", "--out", str(tmp_path)]
    for _ in range(2):  # it diverges in round 2
        assert cli.main([*words, "--minutes", f"{MOMENT:g}"]) == 75
    error = capsys.readouterr().err
    assert "out of time, unfinished runs: 1 of 2\nfailed: FedBN-lr=1e+38: " in error
    assert "continue with: fedbn run" in error
    assert cli.main([*words, "--minutes", "60"]) == 1
    assert "1 of the runs failed:\nFedBN-lr=1e+38: " in capsys.readouterr().err
    assert is_finished(tmp_path / "FedBN-lr=0.05")


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_diverged_run_is_a_result_and_is_not_repeated(
    jobs: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The time of a slice is for the others; the exit code and the reason are those of the first time."""
    text = EXPERIMENT + "sweep: {train.lr: [1.0e+38, 0.05]}\n"
    words = ["run", text, "rounds=2", "only=FedBN", "--jobs", jobs, "--out", str(tmp_path)]
    assert cli.main(words) == 1
    first = capsys.readouterr().err
    before = environments(tmp_path)
    assert cli.main([*words, "--resume"]) == 1
    printed = capsys.readouterr()
    assert printed.err == first
    assert environments(tmp_path) == before, "a session began"
    assert "1 of 2 runs are finished already\nFedBN-lr=1e+38 diverged before and would again; delete" in printed.out
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


def test_from_python_a_run_without_enough_time_raises(straight: Path, tmp_path: Path) -> None:
    given: dict[str, Any] = {"only": "FedBN", "out": tmp_path, "resume": True, "progress": False}
    for number in range(1, 10):
        with pytest.raises(OutOfTime, match="unfinished runs: 1 of 1") as found:
            run(EXPERIMENT, minutes=MOMENT, **given)
        assert found.value.__notes__ == [f"resume with out={str(tmp_path)!r}, resume=True"]
        assert saved_round(tmp_path / "FedBN") == number
    result = run(EXPERIMENT, minutes=MOMENT, **given)  # its last round
    assert result.summary.status == "finished"
    assert outcome(tmp_path / "FedBN") == outcome(straight / "FedBN")
    with pytest.raises(SettingsError, match="minutes is 0; expected a number above 0"):
        run_all(EXPERIMENT, minutes=0)
