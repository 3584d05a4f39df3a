"""What a comparison is about, everywhere: the metric on the clients' own examples if a run personalises."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from matplotlib.mathtext import MathTextParser

from fedbn_flwr import Results
from fedbn_flwr.errors import UserError
from fedbn_flwr.results.metric_key import MetricKey
from fedbn_flwr.results.read.runs import find_runs
from fedbn_flwr.results.report.latex import as_latex
from fedbn_flwr.results.report.pictures import plot, sweeps_plot
from fedbn_flwr.results.report.rows import Row, headline, sweeps
from fedbn_flwr.results.report.tables import DEFAULT, ReportForm, as_measured, sweep_tables, table
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
    assert f"& {title}" in (tmp_path / "out" / "report.tex").read_text().splitlines()[5]
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
    assert [panel.get_ylabel() for panel in sweeps_plot([sweep]).axes] == [f"{OWN}, %", "accuracy, %"]


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


def test_every_number_of_a_latex_table_is_a_formula(tmp_path: Path) -> None:
    """By matplotlib's parser of TeX."""
    for seed in (0, 1):
        for label, rmse in (("A", 12345.5), ("B", -0.25), ("C", 7.0)):
            write_run(
                tmp_path / f"{label}{seed}", label, seed, task="regression", rmse=rmse * (seed + 1), status="failed"
            )
    found = re.findall(r"\$[^$]+\$", as_latex(rows_of(tmp_path), ReportForm(("rmse", "seconds"), "A")))
    assert r"$18{,}518 \pm 8{,}730$" in found
    for formula in found:
        assert MathTextParser("path").parse(formula).width > 0


def tabulars(rows: list[Row], form: ReportForm = DEFAULT) -> list[list[str]]:
    """The lines between the rules of each tabular."""
    found = re.findall(r"\\midrule\n(.*?)\\bottomrule", as_latex(rows, form), re.DOTALL)
    return [part.strip().splitlines() for part in found]


def test_a_latex_table_has_the_best_mean_in_bold(tmp_path: Path) -> None:
    for seed in (0, 1):
        for label, accuracy, loss in (
            ("A & B", 0.5, 1.0),
            ("[c]", 0.6, 3.0),
            ("last_1", 0.6, 2.0),
            ("failed", 0.9, 0.1),
        ):
            status = "finished" if label != "failed" else "failed"
            figures = {"accuracy": accuracy + seed / 100, "loss": loss + seed}
            write_run(tmp_path / f"{label[:4]}{seed}", label, seed, status=status, **figures)
    (lines,) = tabulars(rows_of(tmp_path), ReportForm(("accuracy", "loss", "bytes_up"), "A & B"))
    assert lines == [
        r"A \& B & $50.50 \pm 0.71$ & $\mathbf{1.5000} \pm 0.7071$ & $3.00$ & -- & -- & -- & -- \\",
        r"{}[c] & $\mathbf{60.50} \pm 0.71$ & $3.5000 \pm 0.7071$ & $3.00$ & $+10.00$ & -- & -- & $2$ \\",
        r"failed [failed] & $90.50 \pm 0.71$ & $0.6000 \pm 0.7071$ & $3.00$ & $+40.00$ & -- & -- & $2$ \\",
        r"last\_1 & $\mathbf{60.50} \pm 0.71$ & $2.5000 \pm 0.7071$ & $3.00$ & $+10.00$ & -- & -- & $2$ \\",
    ]
    assert r"run & accuracy, \% & loss & MiB up & difference to A \& B" in as_latex(
        rows_of(tmp_path), ReportForm(("accuracy", "loss", "bytes_up"), "A & B")
    )


def test_latex_tables_of_domains_and_sweeps_have_the_lowest_error_in_bold(tmp_path: Path) -> None:
    for label, shift in (("A", 0.0), ("B", 10.0)):
        for alpha in (0.1, 1.0):
            config = {"cell": {"row": label, "sweep": {"alpha": alpha}}, "alpha": alpha}
            rmse = 1234.5 + shift * (1 if alpha < 1 else -1)
            figures = {"rmse": rmse, "rmse_sea": rmse, "clients_own_rmse_std": shift, "accuracy": None}
            write_run(tmp_path / f"{label}{alpha}", f"{label} {alpha}", task="regression", config=config, **figures)
    first, domains, sweep = tabulars(rows_of(tmp_path), ReportForm(("rmse", "clients_own_rmse_std")))[:3]
    assert [r"\mathbf" in line for line in first] == [False, False, False, True]
    assert domains[3] == r"B 1.0 & $\mathbf{1{,}224.5}$ & $\mathbf{1{,}224.5}$ \\"
    assert sweep == [
        r"A & $\mathbf{1{,}234.5}$ & $1{,}234.5$ \\",
        r"B & $1{,}244.5$ & $\mathbf{1{,}224.5}$ \\",
    ]


def test_a_client_s_metric_is_suggested_by_its_name_in_the_summary(tmp_path: Path) -> None:
    write_run(tmp_path / "A", "A", clients_own_accuracy=0.5)
    with pytest.raises(UserError, match=r"no run has a metric 'own_accuracy'.*did you mean 'clients_own_accuracy'?"):
        table(rows_of(tmp_path), ReportForm(("own_accuracy",)))


def test_a_latex_table_fits_on_a_page(tmp_path: Path) -> None:
    names = ("accuracy", "macro_f1", "auc")
    figures = {f"{place}{name}": 0.5 for name in names for place in ("", "clients_", "clients_own_")}
    for label in ("A", "B"):
        write_run(tmp_path / label, label, metrics=names[1:], **figures)
    rows = rows_of(tmp_path)
    found = re.findall(r"\\begin\{tabular\}\{l(r+)\}\n\\toprule\n(.*) \\\\\n", as_latex(rows, DEFAULT))
    assert all(len(columns) <= 7 for columns, _ in found)
    heads = [head for _, line in found for head in line.split(" & ")[1:]]
    assert [head.removesuffix(r", \%") for head in heads] == list(table(rows)[0][1:])


def test_a_single_row_has_nothing_in_bold(tmp_path: Path) -> None:
    """Nor has a value that the only other one cannot be compared with, since its run failed."""
    write_run(tmp_path / "a", "A", config={"cell": {"row": "A", "sweep": {"lr": 1}}})
    assert "mathbf" not in as_latex(rows_of(tmp_path), DEFAULT)
    write_run(tmp_path / "b", "B", config={"cell": {"row": "B", "sweep": {"lr": 1}}}, status="failed")
    write_run(tmp_path / "c", "A", config={"cell": {"row": "A", "sweep": {"lr": 2}}, "lr": 2})
    sweep = tabulars(rows_of(tmp_path))[1]
    assert [r"\mathbf" in line for line in sweep] == [False, False]
    assert sweep[1].startswith(r"B & $60.00$ [failed] & --")


def test_where_own_examples_are_the_headline_the_best_round_is_shown_on_them_too(tmp_path: Path) -> None:
    chosen = {"validation_accuracy": 0.5, "best_round": 1, "accuracy": 0.25, "clients_own_accuracy": 0.75}
    write_run(tmp_path / "shared" / "a", "FedAvg", **chosen)
    heads, _ = table(rows_of(tmp_path / "shared"))
    assert "accuracy on own data of the best round" not in heads
    write_run(tmp_path / "own" / "b", "FedBN", personal=True, **chosen)
    heads, line = table(rows_of(tmp_path / "own"))
    place = heads.index("accuracy on own data of the best round")
    assert (heads[place + 1], line[place : place + 2]) == ("accuracy of the best round", ("75.00%", "25.00%"))
