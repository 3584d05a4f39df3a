"""The best candidate of each run and condition is chosen by held-out training examples, never by the test examples."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedbn_flwr import cli
from fedbn_flwr.results.read.runs import find_runs
from fedbn_flwr.results.report.rows import Row, choose, group, validation
from fedbn_flwr.results.report.tables import candidates_tables
from fedbn_flwr.results.report.write import write_report

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


def rows_of(out: Path) -> dict[str, Row]:
    return {row.label: row for row in group(find_runs([out]))}


def shown(rows: dict[str, Row]) -> set[str]:
    return {row.label for row in choose(list(rows.values()))}


def test_the_candidate_with_the_best_validation_accuracy_is_shown_and_all_are_listed(out: Path) -> None:
    rows = rows_of(out)
    assert shown(rows) == {BEST, OTHER}
    listed = {line[0]: line[-1] for line in candidates_tables(list(rows.values()))[0][1][1:]}
    assert listed == {BEST: "chosen", WORSE: ""}


def test_the_figures_of_all_candidates_are_kept(out: Path, tmp_path: Path) -> None:
    write_report([out], tmp_path)
    kept = json.loads((tmp_path / "report.json").read_text())
    assert len(kept) == 6
    assert {each["summary"]["label"] for each in kept if each.get("chosen", True)} == {BEST, OTHER}


def test_the_test_images_have_no_part_in_the_choice(out: Path) -> None:
    rows = rows_of(out)
    for run in rows[WORSE].runs:
        run.summary.figures |= {"accuracy": 1.0, "best_test_accuracy": 1.0}
    assert shown(rows) == {BEST, OTHER}


def test_a_candidate_that_diverged_is_not_chosen(out: Path) -> None:
    rows = rows_of(out)
    for run in rows[BEST].runs:
        run.lines[-1]["validation_accuracy"] = float("nan")
    assert shown(rows) == {WORSE, OTHER}


def test_a_candidate_that_failed_is_not_chosen(out: Path) -> None:
    rows = rows_of(out)
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
    rows, values = rows_of(out), validation(rows_of(out)[WORSE])
    run = rows[WORSE].runs[0]
    run.summary.status, run.lines[-1]["validation_accuracy"] = "interrupted", 1.0
    assert validation(rows[WORSE]) == values[1:]
    assert shown(rows) == {BEST, OTHER}


def test_the_report_names_the_size(out: Path) -> None:
    for name in ("report.md", "report.html"):
        text = (out / name).read_text()
        assert "Size small, which is smaller than the file." in text
        assert "candidates: the best is chosen by the accuracy on held-out training examples" in text
    assert '"size": "small"' in (out / "BN-batch_size=16-lr=0.2-seed0" / "summary.json").read_text()
