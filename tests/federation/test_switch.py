"""A learning rate that follows the round in which a strategy freezes or switches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from fedbn_flwr import run
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
