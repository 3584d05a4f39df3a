"""Reports on tasks whose main figure is better when lower, or is not a share: a regression's RMSE."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from fedbn_flwr import Result
from fedbn_flwr.commands import cli
from fedbn_flwr.results.report.pictures import clients_plot, plot
from fedbn_flwr.results.report.rows import choose
from fedbn_flwr.results.report.tables import ReportForm, candidates_tables, table
from fedbn_flwr.results.report.write import write_report
from tests.support.runs import rows_of, write_run

ERRORS = {"FedAvg": (60.0, 62.5), "FixBN": (52.0, 55.0), "FedTAN": (53.25, 54.0)}


def lines(error: float) -> list[dict[str, Any]]:
    """Three rounds, the second of which is the best."""
    return [
        {
            "rmse": error + worse, "mae": 0.8 * error, "r2": 0.4, "loss": error**2,
            "clients_rmse": error, "clients_own_rmse": error - 5, "rmse_north": error - 1, "rmse_south": error + 3,
            "validation_rmse": error + worse,
        }
        for worse in (10, -2, 0)
    ]  # fmt: skip


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    clients = {str(i): {"rmse": 50.0 + i, "own_rmse": 40.0 + 10 * i, "own_loss": 1600.0} for i in range(3)}
    for number, (label, values) in enumerate(ERRORS.items()):
        for seed, error in enumerate(values):
            config = {"cell": {"place": [number]}, "clients": 3, "rounds": 3, "data": {"name": "diabetes"}}
            files = {"clients.jsonl": [{"round": 3, "clients": clients}]}
            folder = tmp_path / "runs" / f"{label}-{seed}"
            write_run(folder, label, seed, task="regression", lines=lines(error), config=config, files=files)
    return tmp_path / "runs"


def test_no_error_is_in_percent(runs: Path) -> None:
    form = ReportForm(("rmse", "best_test_rmse", "mae", "r2", "loss"), "FedAvg")
    heads, first, second, third = table(rows_of(runs), form)
    assert heads[1:7] == ("RMSE", "best RMSE on test", "MAE", "R²", "loss", "difference to FedAvg")
    assert first[1:3] == ("61.250 ± 1.768", "59.250 ± 1.768")
    assert first[3].startswith("49.000")
    assert second[1:3] == ("53.500 ± 2.121", "51.500 ± 2.121")
    assert second[3].startswith("42.800")
    assert third[1] == "53.625 ± 0.530"
    assert second[6] == "-7.750", "value minus baseline: negative is better"
    assert not any("%" in cell for line in (first, second, third) for cell in line)


def test_tables_pictures_and_page_have_the_error_in_its_own_unit(runs: Path, tmp_path: Path) -> None:
    text = write_report([runs], tmp_path / "out")
    assert text.startswith("Lower is better: RMSE.\n\n")
    first, domains, clients = text.split("\n\n")[1:-1]
    assert first.splitlines()[0].split("  ")[0] == "run"
    assert first.split()[1:5] == ["RMSE", "best", "RMSE", "on"]
    assert "clients' RMSE" in first
    assert "53.500 ± 2.121" in first
    assert domains.startswith("RMSE, by domain\n")
    assert "52.500 ± 2.121  56.500 ± 2.121" in domains
    line = next(line for line in clients.splitlines() if line.startswith("FixBN") and "own data" in line)
    worst = "the worst tenth of an error is the highest"
    assert re.split(r"\s{2,}", line)[-3:] == ["50.000 ± 0", "8.1650 ± 0", "60.000 ± 0"], worst
    (figures, *_) = json.loads((tmp_path / "out" / "report.json").read_text())
    assert figures["curve"][1] == {
        "round": 2, "rmse": 58.0, "mae": 48.0, "r2": 0.4, "loss": 3600.0, "clients_own_rmse": 55.0,
        "communication_rounds": 2,
        "bytes_down": 2 * 2**20, "bytes_up": 2 * 2**20,
    }  # fmt: skip
    assert "Lower is better: RMSE." in (tmp_path / "out" / "report.md").read_text()
    rows = rows_of(runs)
    labels = [panel.get_ylabel() for panel in plot(rows).axes]
    assert {"RMSE", "RMSE on own data"} <= {*labels}
    assert not any("%" in label for label in labels)
    box = clients_plot(rows)
    assert [panel.get_ylabel() for panel in box.axes if panel.get_visible()] == ["", ""]
    assert max(panel.get_ylim()[1] for panel in box.axes) < 100, "not times 100"


def test_the_candidate_with_the_lowest_validation_error_is_chosen(tmp_path: Path) -> None:
    """One seed of the second failed: the mean of the other is not preferred."""
    for lr, errors in ((0.1, (60.0, 60.0)), (0.01, (50.0, None)), (0.001, (55.0, 56.0))):
        for seed, error in enumerate(errors):
            config = {"cell": {"row": "A", "tune": {"train.lr": lr}}, "train": {"lr": lr}}
            write_run(
                tmp_path / f"{lr}-{seed}", f"A, lr={lr}", seed, task="regression", lines=lines(error or 1.0),
                config=config, status="finished" if error else "failed",
            )  # fmt: skip
    found = rows_of(tmp_path)
    assert [row.label for row in choose(found)] == ["A, lr=0.001"]
    ((title, (heads, *_)),) = candidates_tables(found)
    assert heads[1:3] == ("validation RMSE on own data", "test RMSE on own data")
    assert "chosen by the RMSE on own held-out" in title


def test_candidates_of_each_task_have_a_table_of_its_figure(tmp_path: Path) -> None:
    for lr in (0.1, 0.01):
        cell = {"cell": {"row": "A", "tune": {"train.lr": lr}}, "train": {"lr": lr}}
        write_run(tmp_path / f"{lr}", f"A, lr={lr}", task="regression", lines=lines(50.0), config=cell)
        write_run(tmp_path / f"{lr}-c", f"B, lr={lr}", validation_accuracy=0.5, config=cell | {"rounds": 9})
    first, second = candidates_tables(rows_of(tmp_path))
    assert [line[0] for line in first[1]] == ["run", "A, lr=0.01", "A, lr=0.1"]
    assert first[1][0][1:3] == ("validation RMSE on own data", "test RMSE on own data")
    assert [line[1] for line in second[1]] == ["validation accuracy", "50.00%", "50.00%"]


def test_status_and_result_name_the_figure(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status", str(runs)]) == 0
    heads, _, line, *_ = capsys.readouterr().out.splitlines()
    assert heads.split()[3] == "RMSE"
    assert line.split()[3] in {f"{error:.4f}" for errors in ERRORS.values() for error in errors}
    assert cli.main(["status", "--json", str(runs / "FixBN-0")]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["rmse"] == 52.0
    assert not {"accuracy", "measure", "value"} & found.keys()
    assert ", RMSE 52.0000, in" in repr(Result.read(runs / "FixBN-0"))
    write_run(runs / "other", "other", config={"clients": 3, "rounds": 3})
    assert cli.main(["status", str(runs)]) == 0
    shown = capsys.readouterr().out
    assert shown.splitlines()[0].split()[3] == "metric"
    assert "RMSE 52.0000" in shown
    assert "accuracy 0.6000" in shown
