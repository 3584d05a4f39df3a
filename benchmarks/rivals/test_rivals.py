"""The candidates that need no environment of their own train the same model, and another model would be found."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from .__main__ import CANDIDATES, ROOT, SAME, cell, difference, table
from .environments import HERE, python_of


@pytest.mark.slow
def test_ours_and_the_bare_loop_train_the_same_model(tmp_path: Path) -> None:
    file = tmp_path / "rivals.json"
    words = ["mlp-bn", "--only", "bare", "ours", "ours-2", "--repeats", "1", "--seconds", "0", "--json", str(file)]
    command = [sys.executable, "-m", "benchmarks.rivals", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=300)
    assert "mlp-bn, bare: the same model as ours" in done.stdout
    found = json.loads(file.read_text())
    (network,) = found["networks"].values()
    assert 0 < network["difference"]["bare"] < SAME
    assert network["difference"]["ours-2"] == 0, "processes agree bit for bit"
    assert found["table"]["rows"][0][0] == "MLP with batch norm"


def test_a_difference_is_relative_to_what_the_round_changed() -> None:
    initial, ours = ({"weight": np.array(values, np.float32)} for values in ([0.0, 0.0], [3.0, 4.0]))
    assert difference(ours, ours, initial) == 0
    assert difference(initial, ours, initial) == 1, "a candidate that does not train"
    assert difference({"weight": np.array([3.0, 4.1])}, ours, initial) == pytest.approx(0.1 / 5)


def test_a_cell_compares_with_ours_on_as_many_processes() -> None:
    taken = {"ours": [1.0, 2.0, 8.0], "bare": [0.5, 2.0, 4.0], "ours-2": [0.5, 1.0, 4.0], "pfl-2": [1.0, 2.0, 8.0]}
    assert cell(taken, "ours") == "2.00"
    assert cell(taken, "bare") == "2.00 (0.50)", "the median of ratios within a turn"
    assert cell(taken, "pfl-2") == "2.00 (2.00)"
    assert cell(taken, "fedjax") == "-"


@pytest.mark.parametrize("name", ["rivals", "rivals-amd"])
def test_the_published_table_follows_from_the_turns_beside_it(name: str) -> None:
    found = json.loads((ROOT / "docs" / "results" / "performance" / f"{name}.json").read_text(encoding="utf-8"))
    assert table(found["networks"], [*CANDIDATES])["rows"] == found["table"]["rows"]


def test_an_environment_with_these_requirements_is_used_again(tmp_path: Path) -> None:
    (tmp_path / "pfl").mkdir()
    shutil.copy(HERE / "pfl.txt", tmp_path / "pfl" / "requirements.txt")
    assert python_of("pfl", tmp_path) == tmp_path / "pfl" / "bin" / "python"
