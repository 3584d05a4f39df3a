"""A run that diverged is a result: resuming does not repeat it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from fedbn_flwr import run
from fedbn_flwr.commands import cli
from fedbn_flwr.errors import Diverged

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
    """The exit code and the reason are those of the first time."""
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
