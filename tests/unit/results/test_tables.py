"""Tables and plots for a paper: CSV, a data frame, the paired test, and the options of the plot."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from scipy import stats

from fedbn_flwr import Result, Results
from fedbn_flwr.commands import cli
from fedbn_flwr.errors import MissingPackage, UserError
from fedbn_flwr.results.folder.clients import Spread, last_values, spread
from fedbn_flwr.results.metric_key import MetricKey
from fedbn_flwr.results.read.runs import find_runs
from fedbn_flwr.results.report.pictures import clients_plot, plot, sweeps_plot
from fedbn_flwr.results.report.rows import choose, headline, sweeps
from fedbn_flwr.results.report.tables import (
    ReportForm,
    as_measured,
    candidates_tables,
    client_table,
    holm,
    paired,
    sweep_tables,
    table,
)
from fedbn_flwr.results.report.write import write_report
from tests.support.refusals import refusal
from tests.support.runs import rows_of, write_run, write_seeds

ACCURACIES = {"FedAvg & co": (0.70, 0.72, 0.74), "Fix_BN 100%": (0.75, 0.74, 0.80), "[c] Fed#TAN": (0.9, 0.9, 0.9)}


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Three rows of three seeds; two seeds of the last one, which has the highest accuracy, failed."""
    for number, (label, values) in enumerate(ACCURACIES.items()):
        for seed, value in enumerate(values):
            lines = [{"accuracy": value, "loss": 2.0 - value, "seconds": 1.0 + seed}] * 2
            status = "failed" if number == 2 and seed else "finished"
            config = {"cell": {"place": [number]}, "clients": 4, "data": {"name": "digits"}}
            write_run(tmp_path / "runs" / f"{number}-{seed}", label, seed, lines=lines, status=status, config=config)
    return tmp_path / "runs"


def printed(capsys: pytest.CaptureFixture[str], *words: Any) -> str:
    assert cli.main(["report", *map(str, words)]) == 0
    return capsys.readouterr().out


# --- the paired test ---


def test_a_repetition_of_a_seed_is_no_further_pair(tmp_path: Path) -> None:
    for number, (seed, accuracy) in enumerate(((0, 0.5), (0, 0.75), (1, 0.25))):
        write_run(tmp_path / str(number), "A", seed, accuracy=accuracy)
    (row,) = rows_of(tmp_path)
    assert row.by_seed(MetricKey("accuracy")) == {0: 0.625, 1: 0.25}


def test_the_paired_test_is_student_s() -> None:
    """Student's sleep data, as R's t.test prints them, and twenty random pairs against SciPy's ttest_rel."""
    sleep = (1.2, 2.4, 1.3, 1.3, 0.0, 1.0, 1.8, 0.8, 4.6, 1.4)
    found = paired(dict(enumerate(sleep)), dict.fromkeys(range(10), 0.0))
    assert [found.difference, found.low, found.high] == pytest.approx([1.58, 0.7001142, 2.4598858], rel=1e-7)
    assert (found.pairs, round(found.p, 6)) == (10, 0.002833)
    draws = np.random.default_rng(0)
    for count in range(3, 22):
        one, two = draws.normal(size=count), draws.normal(0.3, size=count)
        found = paired(dict(enumerate(one.tolist())), {**dict(enumerate(two.tolist())), 99: 5.0})
        expected = stats.ttest_rel(one, two)
        interval = expected.confidence_interval(0.95)
        assert found.pairs == count
        assert [found.p, found.low, found.high] == pytest.approx([expected.pvalue, interval.low, interval.high])


def test_splits_of_their_own_are_corrected_for_the_overlap_of_their_training_sets(tmp_path: Path) -> None:
    """Nadeau and Bengio: t = mean / sqrt((1/n + n_test/n_train) variance), with n - 1 degrees of freedom."""
    one, two = np.array([0.81, 0.84, 0.80, 0.88, 0.83]), np.array([0.79, 0.80, 0.81, 0.82, 0.80])
    difference = one - two
    expected = {}
    for key, ratio in (
        ("share", 0.2 / 0.8),
        ("folds", 48 / (240 - 48)),
        ("fixed", 0.0),
        ("plain", 0.0),
        ("named", 0.0),
    ):
        error = np.sqrt((1 / 5 + ratio) * np.sum((difference - difference.mean()) ** 2) / 4)
        width = stats.t.ppf(0.975, 4) * error
        p = 2 * stats.t.sf(difference.mean() / error, 4)
        expected[key] = [difference.mean(), difference.mean() - width, difference.mean() + width, p]
    assert expected["plain"][-1] == pytest.approx(stats.ttest_rel(one, two).pvalue)
    assert expected["folds"][-1] > 1.5 * expected["plain"][-1]
    tests = {
        "share": {"share": 0.2, "split": "seed"},
        "folds": {"folds": 5},
        "fixed": {"share": 0.2, "by": "patient"},
        "plain": 0.2,
        "named": "test",
    }
    said = {
        "share": "own test split",
        "folds": "own test split",
        "fixed": "the seeds, not the",
        "plain": "the seeds, not the",
    }
    for key, test in tests.items():
        config = {"data": {"name": "x", "test": test}}
        write_seeds(tmp_path / key, {"A": one.tolist(), "B": two.tolist()}, config=config)
        write_report([tmp_path / key], tmp_path / "out", ReportForm(baseline="B"))
        frame = pd.read_csv(tmp_path / "out" / "report.csv", index_col="run")
        found = frame.loc["A", ["difference", "low", "high", "p"]].tolist()
        assert found == pytest.approx(expected[key], rel=1e-12)
        sentences = re.findall("own test split|the seeds, not the", (tmp_path / "out" / "report.md").read_text())
        assert sentences == ([said[key]] if key in said else [])


@pytest.mark.parametrize(
    ("values", "others", "pairs", "difference"),
    [
        ({0: 0.5}, {0: 0.4, 1: 0.5}, 1, 0.1),
        ({0: 0.5, 1: 0.6}, {0: 0.4, 1: 0.5}, 2, 0.1),
        ({7: 0.5}, {0: 0.4, 1: 0.5}, 0, math.nan),
        ({0: math.inf, 1: 0.5}, {0: 0.4, 1: 0.5}, 2, math.nan),
        ({0: 0.75, 1: 0.5, 2: 0.25}, {0: 0.5, 1: 0.375}, 2, 0.1875),
        (
            {0: 340 / 359, 1: 337 / 359, 2: 331 / 359},
            {0: 339 / 359, 1: 336 / 359, 2: 330 / 359},
            3,
            1 / 359,
        ),
    ],
    ids=["one", "two", "none", "infinite", "two of three", "equal but for rounding"],
)
def test_fewer_than_three_pairs_or_equal_differences_have_no_p_value(
    values: dict[int, float], others: dict[int, float], pairs: int, difference: float
) -> None:
    """Student's t with one degree of freedom gives intervals of hundreds of points, and p values that say nothing."""
    found = paired(values, others)
    assert (found.pairs, found.difference) == (pairs, pytest.approx(difference, rel=0, abs=1e-12, nan_ok=True))
    assert all(map(math.isnan, (found.p, found.low, found.high)))


def test_p_values_are_corrected_for_the_number_of_rows(tmp_path: Path) -> None:
    """Holm's example: the smallest of m times m, the next times m - 1, and none below the one before."""
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.7, 0.8]) == [1.0, 1.0]
    values = {"A": (0.1, 0.2, 0.3), "B": (0.4, 0.51, 0.6), "C": (0.1, 0.3, 0.35), "D": (0.9,)}
    write_seeds(tmp_path, values)
    found = Results.read(tmp_path).frame(baseline="A")
    assert found.loc[["B", "C"], "p_holm"].tolist() == [2 * found.loc["B", "p"], found.loc["C", "p"]]
    assert found.loc[["A", "D"], "p_holm"].isna().all(), "no test, which doesn't count"
    shown = dict(zip("ABCD", table(rows_of(tmp_path), ReportForm(baseline="A"))[1:], strict=True))
    assert (shown["C"][-2], shown["D"][-2]) == (f"{found.loc['C', 'p']:.3f}", "-")


# --- tables ---


def test_csv_has_means_deviations_and_numbers_of_seeds(runs: Path, tmp_path: Path) -> None:
    write_report([runs], tmp_path, ReportForm(("accuracy", "rounds", "seconds"), "FedAvg & co"))
    frame = pd.read_csv(tmp_path / "report.csv", index_col="run")
    assert list(frame.index) == list(ACCURACIES)
    assert list(frame["seeds"]) == [3, 3, 1]
    assert list(frame["runs_left_out"]) == [0, 0, 2]
    assert list(frame["status"]) == ["finished", "finished", "failed"]
    assert list(frame["rounds"].astype(str)) == ["2", "2", "2"], "a whole number"
    for label in list(ACCURACIES)[:2]:
        assert frame.loc[label, "accuracy"] == pytest.approx(np.mean(ACCURACIES[label]))
        assert frame.loc[label, "accuracy_std"] == pytest.approx(np.std(ACCURACIES[label], ddof=1))
    expected = stats.ttest_rel(ACCURACIES["Fix_BN 100%"], ACCURACIES["FedAvg & co"])
    assert frame.loc["Fix_BN 100%", ["pairs", "difference", "p"]].tolist() == pytest.approx(
        [3, 0.13 / 3, expected.pvalue]
    )
    assert frame.loc["[c] Fed#TAN", "pairs"] == 1, "the seed that finished"
    assert np.isnan(frame.loc["[c] Fed#TAN", "p"])


def test_a_frame_has_the_same_numbers_as_the_csv(runs: Path, tmp_path: Path) -> None:
    results = Results.read(runs)
    write_report([runs], tmp_path)
    pd.testing.assert_frame_equal(results.frame(), pd.read_csv(tmp_path / "report.csv", index_col="run"))
    assert list(results.frame(["loss"]).columns)[-2:] == ["loss", "loss_std"]
    pd.testing.assert_frame_equal(results.frame("loss"), results.frame(["loss"]))


def test_a_frame_needs_pandas(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = Results.read(runs)
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingPackage, match=r"Results.frame\(\) needs the package 'pandas'.*CLONE\[data\]"):
        results.frame()


def test_columns_and_baseline_are_those_of_the_whole_report(runs: Path, tmp_path: Path, capsys: Any) -> None:
    text = printed(capsys, runs, "--columns", "loss", "--baseline", "FedAvg & co", "--out", tmp_path / "out")
    heading = ["run", "loss", "difference to FedAvg & co", "95 % interval", "p (Holm)", "pairs"]
    assert re.split(r"\s{2,}", text.splitlines()[0]) == heading
    assert "| -0.0433 | -0.0950 to +0.0084 | 0.069 | 3 |" in (tmp_path / "out" / "report.md").read_text()
    assert "-0.0950 to +0.0084" in (tmp_path / "out" / "report.html").read_text()


def test_a_baseline_is_also_the_label_of_the_file_if_one_row_has_it(tmp_path: Path) -> None:
    """Rows have longer names: those of sweeps, of other settings, and of other models than the global one."""
    for seed in (0, 1):
        for label, row, rate in (("BN, lr=1", "BN", 1), ("GN, lr=1", "GN", 1), ("GN, lr=2", "GN", 2), ("IN", "IN", 1)):
            config = {"cell": {"row": row, "sweep": {"train.lr": rate}}, "train": {"lr": rate}}
            write_run(tmp_path / f"{label}-{seed}", label, seed, config=config, accuracy=rate / 4)
        write_run(tmp_path / f"local-{seed}", "Local", seed, config={})
        file = tmp_path / f"local-{seed}" / "summary.json"
        file.write_text(file.read_text().replace("the global model", "the clients' models, mean"))
    results = Results.read(tmp_path)
    for given, name in (("BN", "BN, lr=1"), ("Local", "Local (the clients' models)"), ("GN, lr=2", "GN, lr=2")):
        pd.testing.assert_frame_equal(results.frame(baseline=given), results.frame(baseline=name))
        pairs = results.frame(baseline=given)["pairs"].to_dict()
        assert pairs[name.partition(" (")[0]] == 0, "the baseline is not compared with itself"
    with pytest.raises(UserError, match=r"^2 rows are called 'GN'; .*known: GN, lr=1, GN, lr=2$"):
        results.frame(baseline="GN")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--columns", "acuracy"], "no run has a metric 'acuracy' in its summary.json; did you mean 'accuracy'?"),
        (["--columns", "label"], "no run has a metric 'label'"),
        (["--baseline", "FedAvg"], "no row is called 'FedAvg'; did you mean 'FedAvg & co'?"),
    ],
)
def test_what_a_table_cannot_show_is_named(
    runs: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refusal(capsys, "report", runs, *words)


# --- plots ---


@pytest.mark.slow
def test_a_plot_for_a_paper_is_one_panel(runs: Path, tmp_path: Path) -> None:
    figure = plot(rows_of(runs), MetricKey("loss"), "seconds")
    figure.set_size_inches(3.4, 2.6)
    (panel,) = figure.axes
    assert (panel.get_xlabel(), panel.get_ylabel()) == ("seconds", "loss")
    assert panel.get_lines()[0].get_xydata()[-1].tolist() == pytest.approx([4.0, 2 - 0.72]), "no percent"
    figure.write(tmp_path / "new" / "a.pdf")
    assert (tmp_path / "new" / "a.pdf").read_bytes().startswith(b"%PDF")
    figure.savefig(tmp_path / "a.png", dpi=100)
    with Image.open(tmp_path / "a.png") as picture:
        assert picture.size == (340, 260)


@pytest.mark.parametrize(
    ("look", "message"),
    [
        ({"measure": MetricKey("acuracy")}, "no measure 'acuracy'; did you mean 'accuracy'"),
        ({"axis": "time"}, "no axis 'time'; .*communication_rounds, mib, round, seconds"),
    ],
)
def test_a_plot_that_cannot_be_drawn_says_why(runs: Path, look: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        plot(rows_of(runs), **look)


# --- What a comparison is about, everywhere: the metric on the clients' own examples if a run personalises.


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


# --- Reports on tasks whose main figure is better when lower, or is not a share: a regression's RMSE.


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
def errors(tmp_path: Path) -> Path:
    clients = {str(i): {"rmse": 50.0 + i, "own_rmse": 40.0 + 10 * i, "own_loss": 1600.0} for i in range(3)}
    for number, (label, values) in enumerate(ERRORS.items()):
        for seed, error in enumerate(values):
            config = {"cell": {"place": [number]}, "clients": 3, "rounds": 3, "data": {"name": "diabetes"}}
            files = {"clients.jsonl": [{"round": 3, "clients": clients}]}
            folder = tmp_path / "runs" / f"{label}-{seed}"
            write_run(folder, label, seed, task="regression", lines=lines(error), config=config, files=files)
    return tmp_path / "runs"


def test_no_error_is_in_percent(errors: Path) -> None:
    form = ReportForm(("rmse", "best_test_rmse", "mae", "r2", "loss"), "FedAvg")
    heads, first, second, third = table(rows_of(errors), form)
    assert heads[1:7] == ("RMSE", "best RMSE on test", "MAE", "R²", "loss", "difference to FedAvg")
    assert first[1:3] == ("61.250 ± 1.768", "59.250 ± 1.768")
    assert first[3].startswith("49.000")
    assert second[1:3] == ("53.500 ± 2.121", "51.500 ± 2.121")
    assert second[3].startswith("42.800")
    assert third[1] == "53.625 ± 0.530"
    assert second[6] == "-7.750", "value minus baseline: negative is better"
    assert not any("%" in cell for line in (first, second, third) for cell in line)


def test_tables_pictures_and_page_have_the_error_in_its_own_unit(errors: Path, tmp_path: Path) -> None:
    text = write_report([errors], tmp_path / "out")
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
    rows = rows_of(errors)
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


def test_status_and_result_name_the_figure(errors: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status", str(errors)]) == 0
    heads, _, line, *_ = capsys.readouterr().out.splitlines()
    assert heads.split()[3] == "RMSE"
    assert line.split()[3] in {f"{error:.4f}" for errors in ERRORS.values() for error in errors}
    assert cli.main(["status", "--json", str(errors / "FixBN-0")]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["rmse"] == 52.0
    assert not {"accuracy", "measure", "value"} & found.keys()
    assert ", RMSE 52.0000, in" in repr(Result.read(errors / "FixBN-0"))
    write_run(errors / "other", "other", config={"clients": 3, "rounds": 3})
    assert cli.main(["status", str(errors)]) == 0
    shown = capsys.readouterr().out
    assert shown.splitlines()[0].split()[3] == "metric"
    assert "RMSE 52.0000" in shown
    assert "accuracy 0.6000" in shown


# --- Mean, deviation and worst tenth of clients, and the table and plot of a report.


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
