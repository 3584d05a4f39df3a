"""The best round by validation, for shares and for errors."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.app import ArrayRecord

from fedbn_flwr.experiment.listeners.evaluate import Choose
from fedbn_flwr.experiment.listeners.listener import FinishedRound
from fedbn_flwr.experiment.settings import Evaluate, Settings
from fedbn_flwr.tasks import CLASSIFICATION, REGRESSION, Task


@pytest.mark.parametrize(
    ("task", "values", "expected"),
    [
        (CLASSIFICATION, [0.5, 0.4, 0.5, 0.6, 0.6], [1, 4]),
        (REGRESSION, [9.0, 8.0, 8.0, 7.0, math.nan, 7.5, 7.0], [1, 2, 4]),
        (REGRESSION, [math.nan] * 3, []),
    ],
)
def test_the_best_round_is_the_first_of_equal_ones(task: Task, values: list[float], expected: list[int]) -> None:
    rule = SimpleNamespace(traits=SimpleNamespace(has_global_model=False))
    run = Settings(evaluate=Evaluate(validation=0.1))
    running: Any = SimpleNamespace(prepared=SimpleNamespace(rule=rule, task=task, run=run))
    best, found = Choose(running.prepared, []), []
    for number, value in enumerate(values, start=1):
        line: dict[str, Any] = {"round": number, f"validation_{task.main}": value}
        at = best.on_round(running, FinishedRound(number, ArrayRecord(), ArrayRecord(), line=line))
        found += [at.line["best_round"]] if "best_round" in at.line else []
    assert found == expected
