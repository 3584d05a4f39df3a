"""What a type checker says about a user's script."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command import PATIENCE

SCRIPT = """
from pathlib import Path
from typing import assert_type

from torch import nn

from fedbn_flwr import Result, Results, Settings, run, run_all
from fedbn_flwr import run_every  # type: ignore[attr-defined]
from fedbn_flwr.experiment.settings import Data, Train

result = run("quick", rounds=2, train={"lr": 0.05}, strategy="FedTAN", out=Path("runs"), resume=True)
assert_type(result, Result)
assert_type(result.summary.accuracy, float | None)
assert_type(result.model(), nn.Module)
results = run_all(Settings(rounds=3, train=Train(lr=0.1), data=Data(name="mnist")), seeds=[0, 1])
assert_type(results[0], Result)
assert_type(results.find("quick"), Result)
assert_type(Results(results[:1]), Results)
result.plot().savefig("plot.pdf")
print(result.history["accuracy"], results.table())
run("quick", rouns=3)  # type: ignore[call-arg]
run("quick", rounds="3")  # type: ignore[arg-type]
Settings(rouns=3)  # type: ignore[call-arg]
Settings(rounds="3")  # type: ignore[arg-type]
Train(lrr=0.1)  # type: ignore[call-arg]
print(result.summary.acuracy)  # type: ignore[attr-defined]
"""


@pytest.mark.nightly  # mypy takes a quarter of a minute; `nox -s check` checks assert_type in test_api.py
def test_the_types_of_a_script_are_checked(tmp_path: Path) -> None:
    """Strictly: a comment to ignore an error that is not there would be an error too."""
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr
