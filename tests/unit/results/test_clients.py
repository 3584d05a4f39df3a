"""Mean, deviation and worst tenth of clients, and the table and plot of a report."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedbn_flwr.results.folder.clients import Spread, last_values, spread
from fedbn_flwr.results.report.pictures import clients_plot
from fedbn_flwr.results.report.tables import client_table
from fedbn_flwr.results.report.write import write_report
from tests.support.runs import rows_of, write_run


@pytest.mark.parametrize(
    ("values", "metric", "expected"),
    [
        ([0.5], "accuracy", Spread(0.5, 0.0, 0.5)),
        ([0.2, 0.4, 0.9], "own_accuracy", Spread(0.5, np.std([0.2, 0.4, 0.9]).item(), 0.2)),
        ([1.0, 3.0], "own_loss", Spread(2.0, 1.0, 3.0)),
        ([0.1, 0.3, *[0.5] * 9], "macro_f1", Spread(4.9 / 11, np.std([0.1, 0.3, *[0.5] * 9]).item(), 0.2)),
    ],
    ids=["one client", "three clients", "a loss is worst if high", "eleven clients have a worst tenth of two"],
)
def test_spread_is_that_of_the_whole_group(values: list[float], metric: str, expected: Spread) -> None:
    found = spread(values, metric)
    assert found == pytest.approx(expected, rel=1e-14)


def test_a_client_that_diverged_leaves_no_spread() -> None:
    assert all(map(math.isnan, spread([1.0, math.nan], "loss")))


def test_the_last_round_in_which_a_metric_was_measured_counts() -> None:
    lines: list[dict[str, Any]] = [
        {"round": 1, "clients": {"0": {"train_loss": 2.0, "own_accuracy": 0.1}, "1": {"own_accuracy": 0.2}}},
        {"round": 2, "clients": {"1": {"train_loss": 1.0}}},
    ]
    assert last_values(lines) == {"train_loss": {"1": 1.0}, "own_accuracy": {"0": 0.1, "1": 0.2}}


def write_clients(folder: Path, label: str, accuracies: list[float], seed: int = 0) -> None:
    write_run(folder, label, seed)
    clients = {str(number): {"own_accuracy": value} for number, value in enumerate(accuracies)}
    (folder / "clients.jsonl").write_text(json.dumps({"round": 3, "clients": clients}) + "\n")


@pytest.mark.usefixtures("plots")
def test_a_report_has_a_table_and_a_plot_of_clients(tmp_path: Path) -> None:
    write_clients(tmp_path / "runs" / "a", "FedBN", [0.5, 0.75, 1.0], seed=0)
    write_clients(tmp_path / "runs" / "b", "FedBN", [0.25, 0.75, 1.0], seed=1)
    write_run(tmp_path / "runs" / "c", "FedAvg")
    rows = rows_of(tmp_path / "runs")
    deviations = [100 * np.std([0.5, 0.75, 1.0]), 100 * np.std([0.25, 0.75, 1.0])]
    deviation = f"{np.mean(deviations):.2f}% ± {np.std(deviations, ddof=1):.2f}"
    assert client_table(rows)[1:] == [
        ("FedBN", "accuracy on own data", "3", "70.83% ± 5.89", deviation, "37.50% ± 17.68")
    ]
    text = write_report([tmp_path / "runs"], tmp_path / "out")
    assert "37.50% ± 17.68" in text
    assert "](clients.png)" in (tmp_path / "out" / "report.md").read_text()
    with Image.open(tmp_path / "out" / "clients.png") as picture:
        assert len(picture.convert("RGB").getcolors(2**20) or ()) > 50


@pytest.mark.slow
@pytest.mark.usefixtures("plots")
def test_tables_and_the_plot_have_the_main_figure_and_the_metrics_of_the_run_first_on_own_examples(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "runs" / "a"
    write_run(folder, "FedBN", metrics=("kappa",))
    names = ("examples", "loss", "accuracy", "accuracy_new", "kappa", "other")
    values = {name: 0.5 for kind in ("", "own_", "validation_") for name in (kind + name for name in names)}
    (folder / "clients.jsonl").write_text(json.dumps({"round": 3, "clients": {"0": values, "1": values}}) + "\n")
    _, *lines = client_table(rows_of(folder))
    assert [line[1] for line in lines] == [
        "accuracy on own data", "kappa on own data", "clients' accuracy", "clients' kappa"
    ]  # fmt: skip
    text = write_report([tmp_path / "runs"], tmp_path / "out")
    assert "kappa on own data" in text
    assert "| kappa on own data | 2 | 0.5000 | 0.0000 | 0.5000 |" in (tmp_path / "out" / "report.md").read_text()
    with Image.open(tmp_path / "out" / "clients.png") as picture:
        assert picture.width < 3000


def test_a_box_plot_has_the_rows_whose_clients_were_evaluated(tmp_path: Path) -> None:
    write_run(
        tmp_path / "a", "FedAvg", files={"clients.jsonl": [{"round": 3, "clients": {"0": {"own_accuracy": 0.5}}}]}
    )
    values = {"accuracy": 0.25, "own_accuracy": 0.75}
    write_run(tmp_path / "b", "FedBN", files={"clients.jsonl": [{"round": 3, "clients": {"0": values}}]})
    picture = clients_plot(rows_of(tmp_path))
    found = {
        panel.get_title(loc="left"): [text.get_text() for text in panel.get_xticklabels()] for panel in picture.axes
    }
    assert found == {"accuracy on own data": ["FedAvg", "FedBN"], "clients' accuracy": ["FedBN"]}
