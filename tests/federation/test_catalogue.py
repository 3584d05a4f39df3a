"""The shipped experiments run for two rounds on random examples of the form of their data."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from fedbn_flwr.experiment.file.content import shipped_experiments
from fedbn_flwr.experiment.run.launch import carry_out
from fedbn_flwr.experiment.settings import Experiment
from fedbn_flwr.messages import limits
from tests.support.hostile import kept_log
from tests.support.marks import slow_except
from tests.support.smoke import smoke_runs

LARGE = ("alexnet_bn", "resnet18", "deeplabv3plus_resnet50")


@pytest.fixture(autouse=True)
def _smaller_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """No honest client comes within a millionth of the size, or a tenth of the factor, of a reply that is left out."""
    monkeypatch.setattr(limits, "_HUGE", limits._HUGE / 1e6)
    monkeypatch.setattr(limits, "MOST_TIMES", limits.MOST_TIMES / 10)


def check(experiment: Experiment, out: Path) -> None:
    (run,) = experiment.runs
    with kept_log() as log:
        carry_out(experiment, out, resume=False, quiet=True)
    assert [line for line in log if "left out" in line] == [], run.label
    (file,) = out.rglob("summary.json")
    summary = json.loads(file.read_text())
    assert (summary["status"], summary["rounds"]) == ("finished", 2), run.label
    shutil.rmtree(out)  # all models together have tens of gigabytes


# One or two of each folder.
QUICK = ("demo", "quick", "fedtan/mnist", "ours/heart")


@pytest.mark.parametrize("name", slow_except(QUICK, shipped_experiments()))
def test_the_last_run_of_each_experiment_finishes(name: str, tmp_path: Path) -> None:
    """The last one is the rule of the paper in most files."""
    *_, last = smoke_runs(name)
    if last.runs[0].model.name in LARGE:
        pytest.skip(f"{last.runs[0].model.name} takes four to sixty seconds a run; all runs are nightly")
    check(last, tmp_path / "out")


@pytest.mark.nightly
@pytest.mark.parametrize("name", shipped_experiments())
def test_every_run_of_each_experiment_finishes(name: str, tmp_path: Path) -> None:
    for number, experiment in enumerate(smoke_runs(name)):
        check(experiment, tmp_path / str(number))
