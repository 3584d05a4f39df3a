"""The best round by validation, and the end of a run that no longer improves, for shares and for errors."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.app import ArrayRecord

from fedbn_flwr.experiment.listeners.best import Best
from fedbn_flwr.experiment.listeners.listener import Round
from fedbn_flwr.results.folder import RunFolder
from fedbn_flwr.tasks import CLASSIFICATION, REGRESSION, SEVERAL, Task


def ended(folder: Path, task: Task, values: list[float], patience: int) -> tuple[Any, list[int]]:
    """Why and after which round a run ends, and its best rounds."""
    best = Best(RunFolder(folder), task, patience)
    found = []
    for number, value in enumerate(values, start=1):
        line: dict[str, Any] = {"round": number, f"validation_{task.main}": value}
        rule = SimpleNamespace(traits=SimpleNamespace(has_global_model=False))
        running: Any = SimpleNamespace(prepared=SimpleNamespace(rule=rule))
        at = best.on_round(running, Round(number, ArrayRecord(), ArrayRecord(), line=line))
        found += [at.line["best_round"]] if "best_round" in at.line else []
        if at.ended:
            return (number, at.ended), found
    return None, found


def test_the_lowest_error_is_the_best(tmp_path: Path) -> None:
    values = [9.0, 8.0, 8.0, 7.0, math.nan, 7.5, 7.0]
    found, best = ended(tmp_path, REGRESSION, values, patience=3)
    assert best == [1, 2, 4], "the first of equal ones"
    assert found == (7, "validation RMSE has not improved in 3 evaluations; its best is 7.0000 in round 4")


@pytest.mark.parametrize("task", [CLASSIFICATION, REGRESSION, SEVERAL])
def test_patience_counts_from_the_best_round(tmp_path: Path, task: Task) -> None:
    sign = 1 if task is CLASSIFICATION else -1
    values = [4 + sign * 0.25 * number for number in range(8)] + [4.0] * 8
    (number, text), best = ended(tmp_path, task, values, patience=3)
    assert best == [1, 2, 3, 4, 5, 6, 7, 8]
    assert number == 11
    assert "has not improved in 3 evaluations" in text


def test_a_run_that_diverged_at_once_ends_without_a_best_round(tmp_path: Path) -> None:
    found, best = ended(tmp_path, REGRESSION, [math.nan] * 3, patience=2)
    assert best == []
    assert found == (2, "validation RMSE has not improved in 2 evaluations")
