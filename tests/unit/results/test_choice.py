"""The best candidate of each run and condition is chosen by held-out training examples, never by the test examples."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedbn_flwr.commands import cli
from fedbn_flwr.results.report.rows import Row, choose, validation
from fedbn_flwr.results.report.tables import candidates_tables
from fedbn_flwr.results.report.write import write_report
from tests.support.runs import rows_of, write_run

EXPERIMENT = """
rounds: 2
clients: 2
model: {name: mlp}
train: {steps: 2}
seeds: [0, 1]
engine: {device: cpu, workers: 0}
sweep: {train.batch_size: [16, 32]}
runs: {BN: {tune: {train.lr: [1.0e-6, 0.2]}}, GN: {model: {norm: gn}}}
sizes: {small: {data: {examples: 400}, sweep: {train.batch_size: [16]}}}
"""


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("choice")
    (folder / "e.yaml").write_text(EXPERIMENT)
    assert cli.main(["run", str(folder / "e.yaml"), "--size", "small", "--out", str(folder / "out")]) == 0
    return folder / "out"


BEST, WORSE, OTHER = "BN, batch_size=16, lr=0.2", "BN, batch_size=16, lr=1e-06", "GN, batch_size=16"


def by_label(out: Path) -> dict[str, Row]:
    return {row.label: row for row in rows_of(out)}


def shown(rows: dict[str, Row]) -> set[str]:
    return {row.label for row in choose(list(rows.values()))}


def test_the_candidate_with_the_best_validation_accuracy_is_shown_and_all_are_listed(out: Path) -> None:
    rows = by_label(out)
    assert shown(rows) == {BEST, OTHER}
    listed = {line[0]: line[-1] for line in candidates_tables(list(rows.values()))[0][1][1:]}
    assert listed == {BEST: "chosen", WORSE: ""}


def test_the_figures_of_all_candidates_are_kept(out: Path, tmp_path: Path) -> None:
    write_report([out], tmp_path)
    kept = json.loads((tmp_path / "report.json").read_text())
    assert len(kept) == 6
    assert {each["summary"]["label"] for each in kept if each.get("chosen", True)} == {BEST, OTHER}


@pytest.mark.parametrize(
    ("label", "test", "validation", "expected"), [(WORSE, 1.0, 0.0, BEST), (BEST, 1.0, float("nan"), WORSE)]
)
def test_neither_test_images_nor_a_candidate_that_diverged_are_chosen(
    label: str, test: float, validation: float, expected: str, out: Path
) -> None:
    rows = by_label(out)
    for run in rows[label].runs:
        run.summary.values |= {"accuracy": test, "best_test_accuracy": test}
        run.lines[-1]["validation_accuracy"] = validation
    assert shown(rows) == {expected, OTHER}


def test_a_candidate_that_failed_is_not_chosen(out: Path) -> None:
    rows = by_label(out)
    for run in rows[BEST].runs:
        run.summary.status = "failed"
    assert shown(rows) == {WORSE, OTHER}
    listed = {line[0]: line[1:] for line in candidates_tables(list(rows.values()))[0][1]}
    assert listed[BEST][0] == "-"
    assert listed[BEST][1].endswith(" [failed]")
    assert listed[BEST][-1] == ""
    for run in rows[WORSE].runs:
        run.summary.status = "failed"
    assert shown(rows) == {BEST, WORSE, OTHER}, "none is chosen"


def test_what_an_interrupted_seed_reached_is_no_figure_of_its_candidate(out: Path) -> None:
    rows, values = by_label(out), validation(by_label(out)[WORSE])
    run = rows[WORSE].runs[0]
    run.summary.status, run.lines[-1]["validation_accuracy"] = "interrupted", 1.0
    assert validation(rows[WORSE]) == values[1:]
    assert shown(rows) == {BEST, OTHER}


def test_the_report_names_the_size(out: Path) -> None:
    for name in ("report.md", "report.html"):
        text = (out / name).read_text()
        assert "Size small: a smaller version of the experiment." in text
        assert "candidates: the best is chosen by the accuracy on held-out training examples" in text
    assert '"size": "small"' in (out / "BN-batch_size=16-lr=0.2-seed0" / "summary.json").read_text()


def test_validation_and_test_figures_of_a_candidate_are_of_the_same_models(tmp_path: Path) -> None:
    """FedBN's clients validate their own models on their own data, which the global model's test accuracy is not of."""
    for lr in (0.1, 0.01):
        for label, own in (("FedAvg", {}), ("FedBN", {"clients_own_accuracy": 0.97})):
            config = {"cell": {"row": label, "tune": {"train.lr": lr}}, "train": {"lr": lr}}
            figures = {"accuracy": 0.7, "validation_accuracy": 0.9 + lr, **own}
            write_run(tmp_path / f"{label}{lr}", f"{label}, lr={lr}", config=config, **figures)
    write_run(tmp_path / "c", "FedBN, lr=9", config={"cell": {"row": "FedBN", "tune": {"train.lr": 9}}}, diverged=True)
    (of_all, first), (of_own, second) = candidates_tables(rows_of(tmp_path))
    assert of_all == "candidates: the best is chosen by the accuracy on held-out training examples, mean over seeds"
    assert of_own == "candidates: the best is chosen by the accuracy on own held-out training examples, mean over seeds"
    assert first[0][1:3] == ("validation accuracy", "test accuracy")
    assert second[0][1:3] == ("validation accuracy on own data", "test accuracy on own data")
    assert first[1:] == [
        ("FedAvg, lr=0.01", "91.00%", "70.00%", "1 seed", ""),
        ("FedAvg, lr=0.1", "100.00%", "70.00%", "1 seed", "chosen"),
    ]
    assert second[1:] == [
        ("FedBN, lr=0.01", "91.00%", "97.00%", "1 seed", ""),
        ("FedBN, lr=0.1", "100.00%", "97.00%", "1 seed", "chosen"),
        ("FedBN, lr=9", "-", "diverged in round 4", "1 seed", ""),
    ]
