"""Tables and plots for a paper: CSV, a data frame, the paired test, and the options of the plot."""

from __future__ import annotations

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

from fedbn_flwr import Results
from fedbn_flwr.commands import cli
from fedbn_flwr.errors import MissingPackage, UserError
from fedbn_flwr.results.metric_key import MetricKey
from fedbn_flwr.results.report.pictures import plot
from fedbn_flwr.results.report.tables import ReportForm, holm, paired, table
from fedbn_flwr.results.report.write import write_report
from tests.support.refusals import refusal
from tests.support.runs import rows_of, write_run

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
        for label, values in (("A", one), ("B", two)):
            for seed, accuracy in enumerate(values.tolist()):
                config = {"data": {"name": "x", "test": test}}
                write_run(tmp_path / key / f"{label}{seed}", label, seed, accuracy=accuracy, config=config)
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
    for label, values in {"A": (0.1, 0.2, 0.3), "B": (0.4, 0.51, 0.6), "C": (0.1, 0.3, 0.35), "D": (0.9,)}.items():
        for seed, accuracy in enumerate(values):
            write_run(tmp_path / f"{label}{seed}", label, seed, accuracy=accuracy)
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
