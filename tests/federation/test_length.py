"""Runs that go on for more rounds than they began with, and runs that end early because nothing gets better."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedbn_flwr import run
from fedbn_flwr.commands import cli
from fedbn_flwr.errors import SettingsError
from fedbn_flwr.experiment.run.launch import serve
from fedbn_flwr.results.result import Result
from tests.federation.test_resume import states_of
from tests.support.marks import slow_except
from tests.support.sessions import outcome

Changes = dict[str, Any]

SMALL: Changes = {
    "clients": 3,
    "data": {"name": "digits", "test_examples": 80, "partition": {"kind": "classes", "classes_per_client": 4}},
    "train": {"lr": 0.05, "momentum": 0.9, "batch_size": 16, "steps": 2},
    "engine": {"workers": 0, "device": "cpu"},
    "progress": False,
}


def small(**changes: Any) -> Changes:
    train = {**SMALL["train"], **changes.pop("train", {})}
    return {**SMALL, **changes, "train": train}


CASES: Mapping[str, Changes] = {
    "FedBN": small(strategy="FedBN"),
    "Scaffold": small(strategy="Scaffold"),
    "GlobalMomentum": small(strategy="GlobalMomentum"),
    "keep_momentum": small(train={"keep_momentum": True}),
    "a round": small(
        strategy={"name": "FixBN", "freeze_round": 1}, train={"schedule": {"kind": "step", "milestones": [3]}}
    ),
    "some clients": small(strategy={"name": "FedBN", "fraction_train": 0.67}, evaluate={"validation": 0.1}),
}


@pytest.mark.parametrize("case", slow_except({"FedBN", "keep_momentum"}, CASES))
def test_two_rounds_and_two_more_are_four(case: str, tmp_path: Path) -> None:
    settings = CASES[case]
    whole = run({}, rounds=4, out=tmp_path / "whole", **settings)
    run({}, rounds=2, out=tmp_path / "parts", **settings)
    parts = run({}, rounds=4, out=tmp_path / "parts", resume=True, **settings)
    assert outcome(parts.folder) == outcome(whole.folder)
    assert states_of(parts.folder) == states_of(whole.folder)
    assert parts.config["rounds"] == 4


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (small(train={"schedule": "cosine"}), r"train\.schedule \(cosine\) depends"),
        (small(train={"schedule": "step"}), r"train\.schedule \(step\)"),
        (small(strategy={"name": "FixBN", "freeze_round": 0.5}), r"strategy\.freeze_round of FixBN"),
        (
            small(strategy={"name": "FedTANII", "fedtan_rounds": 0.5, "min_batch": 16}, train={"schedule": "cosine"}),
            r"train\.schedule \(cosine\) and strategy\.fedtan_rounds of FedTANII",
        ),
    ],
)
def test_what_depends_on_the_number_of_rounds_is_named(changes: Changes, named: str, tmp_path: Path) -> None:
    done = run({}, rounds=2, out=tmp_path, **changes)
    before = outcome(done.folder)
    with pytest.raises(SettingsError, match=rf"cannot be resumed with 4 rounds instead of 2: {named}.*would have been"):
        run({}, rounds=4, out=tmp_path, resume=True, **changes)
    assert outcome(done.folder) == before


def test_a_run_does_not_lose_rounds_or_other_settings(tmp_path: Path) -> None:
    run({}, rounds=3, out=tmp_path, **small())
    with pytest.raises(SettingsError, match="cannot end after round 2: it has 3 rounds"):
        run({}, rounds=2, out=tmp_path, resume=True, **small())
    with pytest.raises(SettingsError, match=r"train\.lr was 0\.05 and is 0\.1"):
        run({}, rounds=4, out=tmp_path, resume=True, **small(train={"lr": 0.1}))


def ends_after(values: list[float], patience: int, least: float, every: int) -> int:
    """The round after which a run of these values ends, by the definition, from the whole history each time."""
    for last in range(every, len(values) + 1, every):
        best = 0
        for number in range(every, last + 1, every):
            if not best or values[number - 1] > values[best - 1] + least:
                best = number
        if last - best >= patience:
            return last
    return len(values)


@pytest.mark.parametrize(
    ("evaluate", "key"),
    [
        ({"validation": 0.1}, "validation_accuracy"),
        pytest.param({}, "accuracy", marks=pytest.mark.slow),
        # Patience is over between two evaluated rounds.
        pytest.param({"every": 3}, "accuracy", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("least", slow_except({0.02}, [0.0, 0.02]))
def test_a_run_ends_when_nothing_is_better(evaluate: Changes, key: str, least: float, tmp_path: Path) -> None:
    settings = small(evaluate=evaluate, train={"lr": 0.3})
    whole = run({}, rounds=14, out=tmp_path / "whole", **settings)
    values = [line.get(key, np.nan) for line in whole.files.history()]
    every = evaluate.get("every", 1)
    expected = ends_after(values, 2, least, every)
    impatient = {**settings, "evaluate": {**evaluate, "patience": 2, "min_difference": least}}
    found = run({}, rounds=14, out=tmp_path / "found", **impatient)
    assert found.summary.rounds == expected < 14, "the case has no early end"
    assert [line.get(key) for line in found.files.history()] == [
        line.get(key) for line in whole.files.history()[:expected]
    ]
    assert f"stopped after round {expected}: none was better" in str(found.summary.stopped)
    # A killed process has not written that it ended; the rounds say so.
    found.files.path.joinpath("summary.json").write_text(
        json.dumps({**json.loads((found.folder / "summary.json").read_text()), "status": "running", "stopped": None})
    )
    again = run({}, rounds=14, out=tmp_path / "found", resume=True, **impatient)
    assert (again.summary.rounds, again.summary.stopped) == (expected, found.summary.stopped)
    patient = {**settings, "evaluate": {**evaluate, "patience": 14, "min_difference": least}}
    more = run({}, rounds=14, out=tmp_path / "found", resume=True, **patient)
    assert more.summary.stopped is None
    assert outcome(more.folder) == outcome(whole.folder)


@pytest.mark.slow
def test_the_report_and_the_status_say_that_a_run_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "rounds=9",
        "strategy=FedAvg",
        "model.norm=gn",
        "train.lr=1e-9",
        "evaluate.patience=2",
        "engine.workers=0",
        "--device",
        "cpu",
    ]
    assert cli.main(["run", "quick", *words, "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "stopped after round 3: none was better than round 1 (accuracy" in shown
    assert r"stopped after round 3\]" in (tmp_path / "report.md").read_text()
    assert cli.main(["status", str(tmp_path)]) == 0
    assert "stopped after round 3" in capsys.readouterr().out
    assert cli.main(["run", "quick", "evaluate.min_difference=0.1"]) == 2


def test_a_run_under_flower_ends_too(tmp_path: Path) -> None:
    """`serve` is what the ServerApp calls, on any of Flower's engines."""
    from fedbn_flwr import LocalGrid, client_app
    from fedbn_flwr.experiment.node import make_client

    text = "rounds: 9\nclients: 2\nmodel: {norm: gn}\nengine: {device: cpu}\n"
    text += "train: {lr: 1.0e-9, steps: 1}\nevaluate: {patience: 2}"
    config = {"experiment": text, "out": str(tmp_path)}
    with LocalGrid(client_app(make_client), 2, run_config=config) as grid:
        serve(grid, config)
    (folder,) = (path.parent for path in tmp_path.glob("*/summary.json"))
    assert Result.read(folder).summary.rounds == 3
    longer = {
        **config,
        "experiment": text.replace("rounds: 9", "rounds: 4").replace("patience: 2", "patience: 3"),
        "resume": True,
    }
    with LocalGrid(client_app(make_client), 2, run_config=longer) as grid:
        serve(grid, longer)
    assert (Result.read(folder).summary.rounds, Result.read(folder).summary.stopped) == (4, None)
