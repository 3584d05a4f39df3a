"""How an experiment lets clients train: at a rate that follows the strategy's switch, and each in its own way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from fedbn_flwr import run, run_all
from tests.support.federations import near

ROUNDS, FACTOR = 6, 0.1
TRAINING = {"lr": 0.1, "batch_size": 16, "steps": 2}
DATA = {"name": "digits", "examples": 200, "test_examples": 50, "partition": {"kind": "iid"}}


def model_of(folder: Path, strategy: dict[str, Any], schedule: dict[str, Any]) -> dict[str, Any]:
    settings = {
        "rounds": ROUNDS, "clients": 2, "data": DATA, "model": {"name": "mlp"}, "strategy": strategy,
        "train": {**TRAINING, "schedule": schedule}, "engine": {"workers": 0},
    }  # fmt: skip
    return load_file(run(settings, out=folder, progress=False).folder / "model.safetensors")


@pytest.mark.parametrize(
    ("strategy", "last"),
    [
        ({"name": "FixBN", "freeze_round": 3}, 3),
        pytest.param(
            {"name": "FixBN", "freeze_round": 3, "base": {"name": "FedProx", "proximal_mu": 0.1}},
            3,
            marks=pytest.mark.slow,
        ),
        ({"name": "FedTANII", "fedtan_rounds": 2, "min_batch": 1}, 2),
        ({"name": "FedBS", "epsilon": 100.0, "patience": 2}, 2),
    ],
)
def test_the_rate_falls_in_the_round_after_the_strategy_froze_or_switched(
    tmp_path: Path, strategy: dict[str, Any], last: int
) -> None:
    followed = model_of(tmp_path / "followed", strategy, {"switch": FACTOR})
    twin = model_of(tmp_path / "twin", strategy, {"kind": "step", "milestones": [last / ROUNDS], "gamma": FACTOR})
    constant = model_of(tmp_path / "constant", strategy, {"kind": "constant"})
    near(followed, twin)
    assert any(not np.array_equal(followed[key], constant[key]) for key in followed)


def test_a_strategy_that_never_switches_keeps_its_rate(tmp_path: Path) -> None:
    followed = model_of(tmp_path / "followed", {"name": "FedAvg"}, {"switch": FACTOR})
    constant = model_of(tmp_path / "constant", {"name": "FedAvg"}, {"kind": "constant"})
    near(followed, constant)


OWN = {"batch_size": 8, "steps": 3, "lr_factor": 0.5}
EXPERIMENT = {
    "rounds": 2,
    "clients": 2,
    "model": {"name": "mlp"},
    "engine": {"device": "cpu"},
    "runs": {
        "all": {"train": {"lr": 0.05, "batch_size": 8, "steps": 3}},
        "each": {"train": {"lr": 0.1, "epochs": 2, "of_clients": [{"client": 0, **OWN}, {"client": 1, **OWN}]}},
        "one": {"train": {"lr": 0.1, "epochs": 2, "of_clients": [{"client": 1, **OWN}]}},
    },
}


def test_settings_of_every_client_are_those_of_all_and_the_report_says_who_has_them(tmp_path: Path) -> None:
    results = run_all(EXPERIMENT, out=tmp_path, progress=False)
    of_all, each, one = (result.model().state_dict() for result in results)
    assert all(torch.equal(values, each[key]) for key, values in of_all.items())
    assert not all(torch.equal(values, one[key]) for key, values in of_all.items())
    titles, _, *rows = results.table().partition("clients that took part\n")[2].splitlines()
    assert titles.split()[-5:] == ["batch", "size", "steps", "lr", "factor"]
    differ = [line.split()[:2] for line in rows if line.split()[-3:] == ["8", "3", "0.5"]]
    assert differ == [["each", "0"], ["each", "1"], ["one", "1"]]
