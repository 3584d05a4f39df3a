"""The scripts of examples/ train on tables, series, text and volumes, with the figures of examples/README.md."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from fedbn_flwr import run_all
from tests.support.command import ROOT

EXAMPLES = ROOT / "examples"
# By how much the first strategy is better than the second, at least.
BETTER = {
    "table": {("FixBN", "FedAvg"): 0.2, ("FedTAN", "FedAvg"): 0.2},
    "series": {("FedBN", "FixBN"): 0.2, ("FixBN", "FedAvg"): 0.05},
    "text": {("FixBN", "FedAvg"): 0.03, ("FedTAN", "FixBN"): 0.1},
    "volume": {("FedBN", "FixBN"): 0.1, ("FixBN", "FedAvg"): 0.2},
}


@pytest.mark.parametrize("name", BETTER)
def test_an_example_shows_what_its_page_says(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    experiment = importlib.import_module(name).EXPERIMENT
    results = run_all(experiment, out=tmp_path, progress=False, engine={"workers": 0, "device": "cpu"})
    found = {
        result.label: result.summary.figures.get("clients_own_accuracy", result.summary.accuracy) for result in results
    }
    (line,) = [line for line in (EXAMPLES / "README.md").read_text().splitlines() if f"`{name}.py`" in line]
    stated = {label: float(value) / 100 for label, value in re.findall(r"(Fed\w+|FixBN) ([\d.]+) %", line)}
    assert found == pytest.approx(stated, abs=0.1), "other processors round differently"
    for (better, worse), margin in BETTER[name].items():
        assert found[better] > found[worse] + margin
