"""The shipped experiments run at size smoke: two rounds on random examples of the form of their data."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from fedbn_flwr.experiment.file.content import shipped_experiments
from fedbn_flwr.experiment.file.layers import load_experiment
from fedbn_flwr.experiment.run.loop import carry_out
from fedbn_flwr.experiment.settings import Experiment, Settings

SMOKE = ["size=smoke", "engine.workers=0", "engine.device=cpu"]

LARGE = ("alexnet_bn", "resnet18", "deeplabv3plus_resnet50")


def check(experiment: Experiment, run: Settings, out: Path) -> None:
    carry_out(dataclasses.replace(experiment, runs=(run,)), out, resume=False, quiet=True)
    (file,) = out.rglob("summary.json")
    summary = json.loads(file.read_text())
    assert (summary["status"], summary["rounds"]) == ("finished", run.rounds), run.label
    if run.published is not None:
        assert set(run.published.model_extra or {}) <= set(summary), "a published figure has a measured one beside it"
        assert "other set-up (size smoke" in (out / "report.md").read_text(), run.label


@pytest.mark.parametrize("name", shipped_experiments())
def test_the_last_run_of_each_experiment_finishes(name: str, tmp_path: Path) -> None:
    """The last one is the rule of the paper in most files."""
    experiment = load_experiment(name, SMOKE)
    last = experiment.runs[-1]
    if last.model.name in LARGE:
        pytest.skip(f"{last.model.name} takes four to sixty seconds a run; all runs are nightly")
    check(experiment, last, tmp_path / "out")


@pytest.mark.nightly
@pytest.mark.parametrize("name", shipped_experiments())
def test_every_run_of_each_experiment_finishes(name: str, tmp_path: Path) -> None:
    experiment = load_experiment(name, SMOKE)
    for number, run in enumerate(experiment.runs):
        check(experiment, run, tmp_path / str(number))
