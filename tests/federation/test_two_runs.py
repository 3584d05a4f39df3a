"""Experiments that one process runs one after another do not change each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedbn_flwr import run

FREEZES = {"name": "FixBN", "freeze_round": 1}


@pytest.mark.parametrize("other", [FREEZES, pytest.param("SiloBN", marks=pytest.mark.slow)])
def test_a_run_equals_itself_after_another_strategy_s(tmp_path: Path, other: Any) -> None:
    """A frozen round leaves batch norms in eval mode, and the runs of a process share the model's modules."""

    def model(name: str, strategy: Any) -> bytes:
        settings = {"rounds": 2, "clients": 2, "strategy": strategy, "train": {"steps": 2}}
        out = tmp_path / name
        run(settings, engine={"workers": 0, "device": "cpu"}, out=out, progress=False)
        (file,) = out.rglob("model.safetensors")
        return file.read_bytes()

    first = model("first", "FedAvg")
    model("other", other)
    assert model("again", "FedAvg") == first
