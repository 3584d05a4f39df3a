"""How a person names a run: a folder in the home folder, and a number of NumPy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedbn_flwr import Result, Results
from tests.support.runs import write_run


def test_a_folder_may_be_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path / "x", "first")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Result.read("~/x").folder == tmp_path / "x"
    assert [result.label for result in Results.read("~/x")] == ["first"]


def test_numbers_of_numpy_are_indices(tmp_path: Path) -> None:
    for name in ("first", "second"):
        write_run(tmp_path / name, name)
    results = Results.read(tmp_path)
    assert results[np.int64(1)] is results[1]
    assert results[np.argmax([3, 2])] is results[0]
    wrong: Any = 0.0
    with pytest.raises(TypeError, match="indices must be integers"):
        results[wrong]
