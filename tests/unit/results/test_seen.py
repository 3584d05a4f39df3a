"""The last lines of `fedbn run`: what was seen, and what comes next."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedbn_flwr.results.report.seen import decided, next_step, seen
from tests.support.runs import rows_of, write_run

CENTRAL = {"clients": 1, "data": {"name": "digits", "partition": {"kind": "iid"}}}
FEDERATED = {"clients": 5, "data": {"name": "digits", "partition": {"kind": "classes"}}}
OTHER_DATA = {"clients": 5, "data": {"name": "mnist"}}
SWEPT = FEDERATED | {"cell": {"sweep": {"train.lr": 0.1}}}
REGRESSION = {"config": FEDERATED, "task": "regression", "accuracy": None}


@pytest.mark.parametrize(
    ("runs", "sentence"),
    [
        (
            {
                "Centralised": {"config": CENTRAL, "accuracy": 0.967},
                "FedAvg": {"accuracy": 0.799},
                "FixBN": {"accuracy": 0.961},
                "FedTAN": {"accuracy": 0.956},
            },
            "In accuracy, FedAvg ends 16.8 points below Centralised, FixBN 0.6 points below it.",
        ),
        (
            {"Centralised": {"config": CENTRAL, "accuracy": 0.967}, "FixBN": {"accuracy": 0.967}},
            "In accuracy, FixBN ends level with Centralised.",
        ),
        (
            {
                "FedAvg": {"accuracy": 0.78},
                "FixBN": {"accuracy": 0.92},
                "failed": {"accuracy": 0.1, "status": "failed"},
            },
            "In accuracy, FixBN ends 14.0 points above FedAvg.",
        ),
        (
            {"FedAvg": {**REGRESSION, "rmse": 50.0}, "FedBN": {**REGRESSION, "rmse": 48.5}},
            "In RMSE, FedBN ends 1.500 below FedAvg.",
        ),
        ({"FixBN": {"accuracy": 0.9}}, ""),
        ({"digits": {"accuracy": 0.9}, "mnist": {"config": OTHER_DATA, "accuracy": 0.99}}, ""),
        ({"FixBN": {"accuracy": 0.9}, "FixBN, lr=0.1": {"config": SWEPT, "accuracy": 0.8}}, ""),
    ],
)
def test_what_a_comparison_has_shown(runs: dict[str, dict[str, Any]], sentence: str, tmp_path: Path) -> None:
    for label, about in runs.items():
        write_run(tmp_path / label, label, **{"config": FEDERATED, **about})
    assert seen(rows_of(tmp_path)) == sentence


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"a": [0.9, 0.91, 0.92], "b": [0.8, 0.82, 0.81], "c": [0.7, 0.72, 0.71]}, "a is better than b, c. Take a."),
        (
            {"a": [0.9, 0.91, 0.92], "b": [0.93, 0.85, 0.94], "c": [0.7, 0.72, 0.71]},
            "a is better than c. The data don't decide between a and b.",
        ),
        ({"a": [0.9, 0.8, 0.7], "b": [0.7, 0.9, 0.75]}, "The data don't decide between a and b."),
        ({"a": [0.9, 0.91], "b": [0.8, 0.8]}, ""),
        ({"a": [0.9, 0.91, 0.92]}, ""),
    ],
)
def test_tuned_rows_are_decided_by_paired_tests(values: dict[str, list[float]], sentence: str, tmp_path: Path) -> None:
    """At 5 % for all comparisons with the best row together, without central training."""
    for label, ends in {**values, "central": [1.0] * 3}.items():
        data = CENTRAL if label == "central" else FEDERATED
        config = data | {"cell": {"tune": {"train.lr": 0.1}, "row": label}}
        for seed, accuracy in enumerate(ends):
            write_run(tmp_path / f"{label}{seed}", label, seed, config=config, accuracy=accuracy)
    said = decided(rows_of(tmp_path)).partition(" (Paired")[0]
    assert said == sentence


def test_what_comes_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").touch()
    write_run(tmp_path / "out" / "a", "a", config=FEDERATED)
    one = rows_of(tmp_path)
    write_run(tmp_path / "out" / "b", "b", config=FEDERATED)
    two = rows_of(tmp_path)
    for seed in (1, 2):
        for label in "ab":
            write_run(tmp_path / "out" / f"{label}{seed}", label, seed, config=FEDERATED)
    assert next_step(one, "demo") == "Next: fedbn new mine"
    assert next_step(one, "mine.yaml") == "Next: fedbn predict out/a --data PATH"
    assert next_step(two, "mine.yaml") == "Next: fedbn run mine.yaml 'seeds=[0,1,2,3,4]'"
    assert next_step(rows_of(tmp_path), "mine.yaml") == "Next: fedbn report out --baseline a"
