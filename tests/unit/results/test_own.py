"""What a comparison is about, everywhere: the metric on the clients' own examples if a run personalises."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from fedbn_flwr import Results
from fedbn_flwr.errors import UserError
from fedbn_flwr.results.metric_key import MetricKey
from fedbn_flwr.results.read.runs import find_runs
from fedbn_flwr.results.report.pictures import plot, sweeps_plot
from fedbn_flwr.results.report.rows import headline, sweeps
from fedbn_flwr.results.report.tables import ReportForm, as_measured, sweep_tables, table
from fedbn_flwr.results.report.write import write_report
from tests.support.runs import rows_of, write_run

OWN, GLOBAL = "accuracy on own data", "accuracy"
CASES: list[tuple[dict[str, Any], str, str]] = [
    ({"task": None}, "accuracy", OWN),
    ({"task": "regression"}, "rmse", "RMSE on own data"),
    ({"task": "segmentation"}, "mean_iou", "mean IoU on own data"),
    ({"task": "several", "metrics": ("concordance",)}, "loss", "loss on own data"),
]


def write_both(folder: Path, main: str = "accuracy", own: float | None = 0.5, **more: Any) -> None:
    """FedAvg is better on all examples, FedBN on own ones."""
    write_run(folder / "a", "FedAvg", **{main: 0.75, f"clients_own_{main}": own}, **more)
    write_run(folder / "b", "FedBN", personal=True, **{main: 0.5, f"clients_own_{main}": 0.875}, **more)


@pytest.mark.slow
@pytest.mark.usefixtures("pictures")
@pytest.mark.parametrize(
    ("kind", "main", "title"),
    CASES,
    ids=[main for _, main, _ in CASES],
)
def test_if_a_run_personalises_the_metric_on_own_examples_is_first_everywhere(
    tmp_path: Path, kind: dict[str, Any], main: str, title: str
) -> None:
    write_both(tmp_path / "runs", main, **kind)
    rows = rows_of(tmp_path / "runs")
    assert headline(find_runs([tmp_path / "runs"])) == MetricKey(main, "clients_own")
    heads, *lines = table(rows)
    assert heads[1:3] == (title, MetricKey.parse(main).title)
    shares = [as_measured(MetricKey.parse(main), [value]) for value in (0.5, 0.75, 0.875)]
    assert [line[1:3] for line in lines] == [(shares[0], shares[1]), (shares[2], shares[0])]
    unit = ", %" if "%" in shares[0] else ""
    axes = [panel.get_ylabel() for panel in plot(rows).axes]
    assert [axes[0], axes[2]] == [title + unit, MetricKey.parse(main).title + unit]
    write_report([tmp_path / "runs"], tmp_path / "out")
    page = (tmp_path / "out" / "report.html").read_text()
    curves = re.findall(r"<summary>([^<]+)</summary>", page[page.index('id="Curves"') :])
    assert curves[0] == title
    assert (
        (tmp_path / "out" / "report.csv")
        .read_text()
        .startswith(f"run,status,seeds,runs,runs_left_out,clients_own_{main},")
    )
    kept = json.loads((tmp_path / "out" / "report.json").read_text())
    assert [run["curve"][-1][f"clients_own_{main}"] for run in kept] == [0.5, 0.875]


def test_the_main_metric_is_first_if_no_run_personalises_or_a_run_lacks_the_other(tmp_path: Path) -> None:
    for label in ("FedAvg", "FixBN"):
        write_run(tmp_path / "all" / label, label, clients_own_accuracy=0.5)
    write_both(tmp_path / "some", own=None)
    for folder in ("all", "some"):
        rows = rows_of(tmp_path / folder)
        assert table(rows)[0][1] == GLOBAL
        labels = [panel.get_ylabel() for panel in plot(rows).axes]
        assert [labels[0], labels[2]] == ["accuracy, %", "accuracy on own data, %"]


def test_a_run_that_was_not_evaluated_does_not_decide(tmp_path: Path) -> None:
    write_both(tmp_path)
    write_run(tmp_path / "c", "FedTAN", lines=[{"loss": None}], status="failed")
    assert table(rows_of(tmp_path))[0][1] == OWN


@pytest.mark.slow
@pytest.mark.usefixtures("pictures")
def test_columns_choose_the_table_the_curves_and_the_comparison(tmp_path: Path) -> None:
    for seed in (0, 1):
        for label, values in (("FedAvg", (0.75, 0.5)), ("FedBN", (0.5, 0.875))):
            figures = {"accuracy": values[0], "clients_own_accuracy": values[1]}
            write_run(tmp_path / f"{label}{seed}", label, seed, personal=label == "FedBN", **figures)
    for keys, difference in (((), "+37.50"), (("bytes_up", "accuracy"), "+0.00"), (("accuracy",), "-25.00")):
        heads, _, second = table(rows_of(tmp_path), ReportForm(keys, "FedAvg"))
        assert second[heads.index("difference to FedAvg")] == difference
    write_report([tmp_path], tmp_path / "out", ReportForm(("bytes_up", "accuracy")))
    page = (tmp_path / "out" / "report.html").read_text()
    pictures = re.findall(r'aria-label="([^"]+)"', page[page.index('class="pictures"') :])
    assert pictures[0] == "accuracy, %, rounds"
    assert list(Results.read(tmp_path / "FedAvg0", tmp_path / "FedBN0").frame().columns)[4] == "clients_own_accuracy"


def test_a_sweep_s_first_table_and_panel_have_it_too(tmp_path: Path) -> None:
    for alpha in (0.1, 1.0):
        for label in ("FedAvg", "FedBN"):
            config = {"cell": {"row": label, "sweep": {"alpha": alpha}}}
            own = alpha / 4 + (label == "FedBN") / 2
            folder = tmp_path / f"{label}{alpha}"
            personal = label == "FedBN"
            write_run(folder, f"{label}, {alpha}", config=config, clients_own_accuracy=own, personal=personal)
    (sweep,) = sweeps(rows_of(tmp_path))
    assert [title for title, _ in sweep_tables(sweep)] == [f"{OWN} by alpha", "accuracy by alpha"]
    assert sweep_tables(sweep)[0][1][1:] == [("FedAvg", "2.50%", "25.00%"), ("FedBN", "52.50%", "75.00%")]
    assert [panel.get_ylabel() for panel in sweeps_plot(rows_of(tmp_path)).axes] == [f"{OWN}, %", "accuracy, %"]


# --- mean and deviation in a cell ---


@pytest.mark.parametrize(
    ("key", "values", "shown"),
    [
        ("accuracy", [0.75], "75.00%"),
        ("accuracy", [1.0, 1.0], "100.00% ± 0"),
        ("accuracy", [0.3, 0.1 + 0.2], "30.00% ± 0"),
        ("accuracy", [0.5, 0.50004], "50.002% ± 0.003"),
        ("accuracy", [0.0, 2e-5], "0.001% ± 0.001"),
        ("accuracy", [0.5, 0.6], "55.00% ± 7.07"),
        ("rmse", [50.0, 50.0], "50.000 ± 0"),
        ("rmse", [123456.0, 123456.25], "123,456.1 ± 0.2"),
        ("accuracy", [0.5], "50.00%"),
        ("accuracy", [0.5] * 5, "50.00% ± 0"),
        ("rounds", [40, 40], "40"),
        ("rounds", [100, 100], "100"),
        ("rounds", [100, 102], "101 ± 1"),
        ("bytes_up", [2**20, 2**20], "1.00"),
        ("x", [math.inf, 1.0], "inf"),
        ("x", [math.inf, -math.inf], "nan"),
        ("x", [1.0, math.nan], "nan"),
        ("x", [1.0, 2.0], "1.5000 ± 0.7071"),
    ],
)
def test_a_deviation_is_of_finite_values_and_zero_only_if_all_are_equal(
    key: str, values: list[float], shown: str
) -> None:
    assert as_measured(MetricKey.parse(key), values) == shown


def test_a_client_s_metric_is_suggested_by_its_name_in_the_summary(tmp_path: Path) -> None:
    write_run(tmp_path / "A", "A", clients_own_accuracy=0.5)
    with pytest.raises(UserError, match=r"no run has a metric 'own_accuracy'.*did you mean 'clients_own_accuracy'?"):
        table(rows_of(tmp_path), ReportForm(("own_accuracy",)))


def test_where_own_examples_are_the_headline_the_best_round_is_shown_on_them_too(tmp_path: Path) -> None:
    chosen = {"validation_accuracy": 0.5, "best_round": 1, "accuracy": 0.25, "clients_own_accuracy": 0.75}
    write_run(tmp_path / "shared" / "a", "FedAvg", **chosen)
    heads, _ = table(rows_of(tmp_path / "shared"))
    assert "accuracy on own data of the best round" not in heads
    write_run(tmp_path / "own" / "b", "FedBN", personal=True, **chosen)
    heads, line = table(rows_of(tmp_path / "own"))
    place = heads.index("accuracy on own data of the best round")
    assert (heads[place + 1], line[place : place + 2]) == ("accuracy of the best round", ("75.00%", "25.00%"))
