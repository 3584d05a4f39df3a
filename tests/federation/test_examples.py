"""The scripts of examples/ train on tables, series, text and volumes, with the figures of examples/README.md."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch

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


@pytest.mark.slow
@pytest.mark.parametrize("name", BETTER)
def test_an_example_shows_what_its_page_says(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    experiment = importlib.import_module(name).EXPERIMENT
    results = run_all(experiment, out=tmp_path, progress=False, engine={"workers": 0, "device": "cpu"})
    found = {
        result.label: result.summary.values.get("clients_own_accuracy", result.summary.accuracy) for result in results
    }
    (line,) = [line for line in (EXAMPLES / "README.md").read_text().splitlines() if f"`{name}.py`" in line]
    stated = {label: float(value) / 100 for label, value in re.findall(r"(Fed\w+|FixBN) ([\d.]+) %", line)}
    assert found == pytest.approx(stated, abs=0.1), "other processors round differently"
    for (better, worse), margin in BETTER[name].items():
        assert found[better] > found[worse] + margin


@pytest.fixture
def brca(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module("brca")


def test_cox_s_loss_is_the_partial_likelihood_and_has_its_gradient(brca: Any) -> None:
    """As in FLamby's file: the mean over all patients, of which those who died count."""
    draw = torch.Generator().manual_seed(0)
    risks = torch.randn(8, 1, generator=draw, dtype=torch.float64, requires_grad=True)
    days = torch.tensor([5.0, -7.0, 2.0, 9.0, -1.0, 4.0, -3.0, 8.0], dtype=torch.float64)
    terms = [
        torch.log(sum(risks[j, 0].exp() for j in range(8) if days[j].abs() >= days[i])) - risks[i, 0]
        for i in range(8)
        if days[i] > 0
    ]
    expected = sum(terms) / 8
    found = brca.cox(risks, days)
    assert found.item() == pytest.approx(expected.item(), rel=1e-13)
    gradients = [torch.autograd.grad(loss, risks)[0] for loss in (found, expected)]
    assert torch.allclose(*gradients, rtol=1e-12, atol=1e-14)


def test_concordance_counts_pairs_of_which_the_first_died(brca: Any) -> None:
    days = torch.tensor([1.0, -2.0, 3.0, 3.0, -3.0])  # pairs: 4 of the first, and 1 each of the third and the fourth
    assert float(brca.concordance(torch.tensor([5.0, 4, 3, 2, 1]), days)) == 1
    assert float(brca.concordance(torch.tensor([1.0, 2, 3, 4, 5]), days)) == 0
    assert float(brca.concordance(torch.tensor([0.0, 0, 0, 0, 0]), days)) == 0.5
    assert float(brca.concordance(torch.tensor([4.0, 9, 3, 1, 2]), days)) == pytest.approx(4 / 6)


@pytest.mark.slow
def test_survival_times_of_real_regions_are_learned(brca: Any, shared_data: Path, tmp_path: Path) -> None:
    if not (folder := shared_data / "tcga_brca").is_dir():
        pytest.skip("no tcga_brca/ in the folder of real data sets")
    data = brca.patients(folder)
    assert [len(data[part]["labels"]) for part in ("train", "test")] == [866, 222]
    options = {"data": {"options": {"folder": str(folder)}}, "engine": {"workers": 0, "device": "cpu"}}
    (result,) = run_all(brca.EXPERIMENT, only="FedAdam", seeds=[0], out=tmp_path, progress=False, **options)
    assert 0.7 < result.summary.values["concordance"] < 0.9
