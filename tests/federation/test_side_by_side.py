"""Runs of an experiment side by side: the same results as one after the other, stopped and continued at any moment."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from fedbn_flwr.commands import cli
from fedbn_flwr.errors import RunFailed, SettingsError
from fedbn_flwr.experiment.api import run_all
from fedbn_flwr.experiment.file.layers import parse_overrides, parse_yaml, read_experiment
from fedbn_flwr.experiment.run import launch as run_module
from fedbn_flwr.results.folder.writer import RunFolder
from tests.support.command import FEDBN, PROGRAM, environment, python, signalled
from tests.support.network import wait_for
from tests.support.runs import is_finished, saved_round
from tests.support.sessions import outcome

EXPERIMENT = """
name: experiment
rounds: 3
clients: 2
model: {name: mlp}
train: {batch_size: 16, steps: 1}
engine: {device: cpu}
sweep: {train.lr: [0.05, 0.1]}
runs:
  FedBN: {strategy: {name: FedBN}}
  FedTAN: {strategy: {name: FedTAN, min_batch: 16}}
"""
NAMES = ("FedBN-lr=0.05", "FedBN-lr=0.1", "FedTAN-lr=0.05", "FedTAN-lr=0.1")


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("straight")
    run_all(EXPERIMENT, out=out, jobs=1, progress=False)
    return out


@pytest.mark.slow
def test_runs_side_by_side_are_bit_for_bit_those_that_follow_one_another(straight: Path, tmp_path: Path) -> None:
    results = run_all(EXPERIMENT, out=tmp_path, jobs=3, progress=False)
    assert [result.folder.name for result in results] == list(NAMES)
    assert [outcome(tmp_path / name) for name in NAMES] == [outcome(straight / name) for name in NAMES]
    assert all(is_finished(tmp_path / name) for name in NAMES)
    assert (tmp_path / "report.html").exists()


AFTER_COMPILING = f"""
import warnings
import torch
warnings.simplefilter("ignore")
torch.compile(lambda x: x.sum(), backend="eager")(torch.zeros(2, requires_grad=True)).backward()
from fedbn_flwr import run_all
from fedbn_flwr.errors import FedbnError
for settings in ({{"jobs": 2}}, {{"jobs": 1, "engine": {{"workers": 2}}}}):
    try:
        run_all({EXPERIMENT!r}, progress=False, out=str(settings["jobs"]), **settings)
    except FedbnError as error:
        print(str(error).count("which has trained a compiled model"), flush=True)
"""


@pytest.mark.slow
def test_processes_after_a_compiled_pass_are_refused_with_the_reason(tmp_path: Path) -> None:
    """PyTorch cannot compute gradients in a process that is forked then."""
    done = python(AFTER_COMPILING, cwd=tmp_path)
    assert done.stdout.split() == ["1", "1"], done.stdout + done.stderr


@pytest.mark.slow
def test_a_run_that_another_process_has_begun_meanwhile_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare = run_module.prepare

    def slowly(*given: Any, **options: Any) -> Any:
        RunFolder(tmp_path / NAMES[1]).begin({"train": {"lr": 0.3}})
        return prepare(*given, **options)

    monkeypatch.setattr(run_module, "prepare", slowly)
    with pytest.raises(RunFailed, match=r"1 of the runs failed:\nFedBN-lr=0\.1: .*holds a run already"):
        run_all(EXPERIMENT, out=tmp_path, jobs=1, progress=False)
    assert "lr: 0.3" in (tmp_path / NAMES[1] / "config.yaml").read_text()
    assert is_finished(tmp_path / NAMES[0])


@pytest.mark.slow
@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_run_goes_on_when_the_reader_of_its_output_has_ended(jobs: str, tmp_path: Path) -> None:
    (tmp_path / "experiment.yaml").write_text(EXPERIMENT)
    ended = "import os; reader, writer = os.pipe(); os.dup2(writer, 1); os.close(reader)\n"
    python(ended + FEDBN, "run", "experiment.yaml", "--jobs", jobs, "--out", "out", cwd=tmp_path)
    assert all(is_finished(tmp_path / "out" / name) for name in NAMES)


@pytest.mark.slow
def test_workers_end_with_a_server_that_was_killed(tmp_path: Path) -> None:
    """Also one whose client still trains. The run folder is free at once: workers have no copy of its lock."""
    (tmp_path / "slow.py").write_text(
        "import os, time\nfrom torch.nn.functional import cross_entropy\n\n"
        "def loss(logits, labels):\n    if logits.requires_grad and len(logits) == 16:\n"
        "        open(f'begun-{os.getpid()}', 'w').close()\n        time.sleep(600)\n"
        "    return cross_entropy(logits, labels)\n"
    )
    (tmp_path / "experiment.yaml").write_text(EXPERIMENT)
    settings = ["only=[FedBN]", "sweep=null", "train.loss=slow:loss", "engine.workers=2"]
    words = ["run", "experiment.yaml", *settings, "--out", "out"]
    process = subprocess.Popen([*PROGRAM, *words], cwd=tmp_path, stdout=subprocess.PIPE, env=environment())
    wait_for("a client that trains", lambda: any(tmp_path.glob("begun-*")))
    assert is_locked(tmp_path / "out" / "FedBN")
    process.kill()
    process.wait()
    assert not is_locked(tmp_path / "out" / "FedBN")
    workers = [Path("/proc", file.name.removeprefix("begun-")) for file in tmp_path.glob("begun-*")]
    wait_for("the end of the workers", lambda: not any(worker.exists() for worker in workers))


def is_locked(path: Path) -> bool:
    try:
        with RunFolder(path).locked():
            return False
    except SettingsError:
        return True


def test_a_finished_cell_is_never_computed_again_and_new_ones_are_added(tmp_path: Path) -> None:
    """Values of a sweep, and rows."""
    begun = EXPERIMENT.replace("[0.05, 0.1]", "[0.05]").partition("  FedTAN")[0]
    run_all(begun, out=tmp_path, jobs=2, progress=False)
    before = {name: (tmp_path / name / "history.jsonl").stat() for name in NAMES[:1]}
    results = run_all(EXPERIMENT, out=tmp_path, jobs=2, resume=True, progress=False)
    assert [result.summary.status for result in results] == ["finished"] * 4
    assert {name: (tmp_path / name / "history.jsonl").stat() for name in before} == before


def test_a_folder_that_another_process_writes_is_left_to_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "e.yaml"
    file.write_text(EXPERIMENT)
    with RunFolder(tmp_path / "out" / NAMES[0]).locked():
        words = ["run", str(file), "only=FedBN", "--jobs", "2", "--out", str(tmp_path / "out")]
        assert cli.main(words) == 1
    assert "another process is writing" in capfd.readouterr().err
    assert is_finished(tmp_path / "out" / NAMES[1])


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_all_runs_continue_after_a_stop(sent: signal.Signals, straight: Path, tmp_path: Path) -> None:
    """The moment of the signal is arbitrary."""
    (tmp_path / "e.yaml").write_text(EXPERIMENT)
    words = ["run", str(tmp_path / "e.yaml"), "--jobs", "2", "--out", str(tmp_path / "out")]
    stopped = signalled(
        sent, lambda: saved_round(tmp_path / "out" / NAMES[0]), FEDBN, *words, cwd=tmp_path, PAUSE="0.2"
    )
    assert stopped.returncode == (-signal.SIGKILL if sent == signal.SIGKILL else 130), stopped.stderr
    assert "Traceback" not in stopped.stderr
    assert cli.main([*words, "--resume"]) == 0
    assert [outcome(tmp_path / "out" / name) for name in NAMES] == [outcome(straight / name) for name in NAMES]


@pytest.mark.parametrize(
    ("changes", "unfinished", "given", "expected"),
    [
        ([], 1_000, None, 4),
        ([], 4, None, 4),
        ([], 3, None, 1),
        ([], 0, None, 1),
        ([], 3, 8, 3),
        (["engine.workers=0"], 1_000, None, 1),
        (["engine.threads=2"], 1_000, None, 1),
    ],
)
def test_as_many_runs_as_cores_run_side_by_side(
    changes: list[str], unfinished: int, given: int | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "cores", lambda: 4)
    runs = read_experiment(parse_yaml(EXPERIMENT), parse_overrides(changes)).runs
    assert run_module.jobs_of(runs, unfinished, given) == expected


def test_impossible_jobs_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "quick", "--jobs", "0"]) == 2
    assert "--jobs is 0; expected a number of runs" in capsys.readouterr().err
    assert cli.main(["run", "quick", "engine.threads=2", "--jobs", "2"]) == 2
    assert "--jobs is 2, but a run trains on a GPU or has engine.threads above 1" in capsys.readouterr().err
