"""Tables and plots for a paper: CSV, LaTeX, a data frame, the paired test, and the options of the plot."""

from __future__ import annotations

import io
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from scipy import stats

from fedbn_flwr import Results, cli
from fedbn_flwr.errors import MissingPackage, UserError
from fedbn_flwr.results.read.runs import find_runs
from fedbn_flwr.results.report.pictures import plot
from fedbn_flwr.results.report.rows import group
from fedbn_flwr.results.report.tables import paired
from tests.support.runs import write_run

pytestmark = pytest.mark.usefixtures("pictures")

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


def test_the_paired_test_is_student_s() -> None:
    """Student's sleep data, as R's t.test prints them, and twenty random pairs against SciPy's ttest_rel."""
    sleep = (1.2, 2.4, 1.3, 1.3, 0.0, 1.0, 1.8, 0.8, 4.6, 1.4)
    found = paired(dict(enumerate(sleep)), dict.fromkeys(range(10), 0.0))
    assert [found.difference, found.low, found.high] == pytest.approx([1.58, 0.7001142, 2.4598858], rel=1e-7)
    assert (found.pairs, round(found.p, 6)) == (10, 0.002833)
    draws = np.random.default_rng(0)
    for count in range(2, 22):
        one, two = draws.normal(size=count), draws.normal(0.3, size=count)
        found = paired(dict(enumerate(one.tolist())), {**dict(enumerate(two.tolist())), 99: 5.0})
        expected = stats.ttest_rel(one, two)
        interval = expected.confidence_interval(0.95)
        assert found.pairs == count
        assert [found.p, found.low, found.high] == pytest.approx([expected.pvalue, interval.low, interval.high])


@pytest.mark.parametrize("values", [{0: 0.5}, {0: 0.5, 1: 0.6}, {7: 0.5}, {0: math.inf, 1: 0.5}])
def test_without_a_spread_there_is_no_p_value(values: dict[int, float]) -> None:
    found = paired(values, {0: 0.4, 1: 0.5})
    assert all(map(math.isnan, (found.p, found.low, found.high)))
    assert found.pairs == len(values.keys() & {0, 1})


# --- tables ---


def test_csv_has_means_deviations_and_numbers_of_seeds(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "--csv", runs, "--columns", "accuracy,rounds,seconds", "--baseline", "FedAvg & co")
    frame = pd.read_csv(io.StringIO(text), index_col="run")
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


def test_a_frame_has_the_same_numbers_as_the_csv(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = Results.read(runs)
    text = printed(capsys, "--csv", runs)
    pd.testing.assert_frame_equal(results.frame(), pd.read_csv(io.StringIO(text), index_col="run"))
    assert list(results.frame(["loss"]).columns)[-2:] == ["loss", "loss_std"]


def test_a_frame_needs_pandas(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = Results.read(runs)
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingPackage, match=r"Results.frame\(\) needs the package 'pandas'.*fedbn-flwr\[data\]"):
        results.frame()


def test_latex_is_the_first_table(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "--latex", runs, "--columns", "accuracy,loss,seconds", "--baseline", "FedAvg & co")
    note, *lines = text.splitlines()
    assert note.startswith("% name: digits, 4 clients, seeds 0, 1, 2.")
    assert lines == [
        r"\begin{tabular}{lrrrrrrr}",
        r"\toprule",
        r"run & accuracy & loss & seconds & difference to FedAvg \& co & 95 \% interval & p & pairs \\",
        r"\midrule",
        r"FedAvg \& co (3 seeds) & 72.00\% $\pm$ 2.00 & 1.2800 $\pm$ 0.0200 & 4.0 $\pm$ 2.0 & - & - & - & - \\",
        r"Fix\_BN 100\% (3 seeds) & 76.33\% $\pm$ 3.21 & 1.2367 $\pm$ 0.0321 & 4.0 $\pm$ 2.0"
        r" & +4.33 & -0.84 to +9.50 & 0.069 & 3 \\",
        r"{[}c{]} Fed\#TAN {[}failed{]} (1 of 3 seeds) & 90.00\% & 1.1000 & 2.0 & +20.00 & - & - & 1 \\",
        r"\bottomrule",
        r"\end{tabular}",
    ]


def test_latex_leaves_the_choice_by_test_images_out(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "--latex", runs)
    assert "best accuracy on test" not in text
    assert "MiB down" in text
    assert "best accuracy on test" in printed(capsys, "--latex", runs, "--columns", "best_test_accuracy")


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="LaTeX is not installed")
def test_latex_compiles(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(runs / "odd", r"\end{x}~^$&%#_{}[|<>", 0)
    table = printed(capsys, "--latex", runs, "--baseline", "FedAvg & co")
    document = rf"\documentclass{{article}}\usepackage{{booktabs}}\begin{{document}}{table}\end{{document}}"
    (tmp_path / "a.tex").write_text(document)
    subprocess.run(["pdflatex", "-halt-on-error", "a.tex"], cwd=tmp_path, check=True, capture_output=True, timeout=120)


def test_tables_are_written_to_a_file(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "--csv", runs)
    file = tmp_path / "new" / "table.csv"
    assert printed(capsys, "--csv", runs, "--out", file) == f"table: {file}\n"
    assert file.read_text() == text
    assert cli.main(["report", "--csv", str(runs), "--out", str(tmp_path)]) == 1
    assert "cannot be written: Is a directory" in capsys.readouterr().err


def test_columns_and_baseline_are_those_of_the_whole_report(runs: Path, tmp_path: Path, capsys: Any) -> None:
    text = printed(capsys, runs, "--columns", "loss", "--baseline", "FedAvg & co", "--out", tmp_path / "out")
    heading = ["run", "loss", "difference to FedAvg & co", "95 % interval", "p", "pairs"]
    assert re.split(r"\s{2,}", text.splitlines()[0]) == heading
    assert "| -0.0433 | -0.0950 to +0.0084 | 0.069 | 3 |" in (tmp_path / "out" / "report.md").read_text()
    assert "-0.0950 to +0.0084" in (tmp_path / "out" / "report.html").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--columns", "acuracy"], "no run has a figure 'acuracy' in its summary.json; did you mean 'accuracy'?"),
        (["--columns", "label"], "no run has a figure 'label'"),
        (["--baseline", "FedAvg"], "no row is called 'FedAvg'; did you mean 'FedAvg & co'?"),
    ],
)
def test_what_a_table_cannot_show_is_named(
    runs: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["report", "--latex", str(runs), *words]) == 2
    assert message in capsys.readouterr().err


# --- plots ---


def test_a_plot_for_a_paper_is_one_panel_of_a_size(runs: Path, tmp_path: Path, capsys: Any) -> None:
    rows = group(find_runs([runs]))
    figure = plot(rows, measure="loss", axis="seconds", size=(3.4, 2.6))
    (panel,) = figure.axes
    assert (panel.get_xlabel(), panel.get_ylabel()) == ("seconds", "loss")
    assert tuple(figure.get_size_inches()) == (3.4, 2.6)
    assert panel.get_lines()[0].get_xydata()[-1].tolist() == pytest.approx([4.0, 2 - 0.72]), "no percent"
    file = tmp_path / "new" / "a.pdf"
    assert printed(capsys, runs, "--plot", file, "--axis", "mib", "--size", 3.4, 2.6) == f"plot:  {file}\n"
    assert file.read_bytes().startswith(b"%PDF")
    printed(capsys, runs, "--plot", tmp_path / "a.png", "--axis", "mib", "--size", 2, 3)
    with Image.open(tmp_path / "a.png") as picture:
        assert picture.size == (260, 390)


def test_bands_are_chosen(runs: Path) -> None:
    rows = group(find_runs([runs]))
    assert [len(plot(rows, band=band, axis="round").axes[0].collections) for band in (None, True, False)] == [2, 2, 0]
    many = [*rows[:2]] * 6
    assert [len(plot(many, band=band, axis="round").axes[0].collections) for band in (None, True, False)] == [0, 12, 0]


@pytest.mark.parametrize(
    ("look", "message"),
    [
        ({"measure": "acuracy"}, "no measure 'acuracy'; did you mean 'accuracy'"),
        ({"axis": "time"}, "no axis 'time'; .*communication_rounds, mib, round, seconds"),
        ({"size": (0, 3)}, "expected width and height"),
        ({"size": (3,)}, "expected width and height"),
    ],
)
def test_a_plot_that_cannot_be_drawn_says_why(runs: Path, look: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        plot(group(find_runs([runs])), **look)


def test_an_unknown_format_is_named(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(runs), "--plot", str(tmp_path / "a.foo")]) == 2
    assert "a.foo' has no known format; expected a name that ends in" in capsys.readouterr().err
