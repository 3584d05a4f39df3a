"""The tables and the plot of sweeps."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from matplotlib.colors import to_hex
from PIL import Image

from fedbn_flwr.commands import cli
from fedbn_flwr.results.folder.writer import RunFolder
from fedbn_flwr.results.report.pictures import COLOURS, plot, sweeps_plot
from fedbn_flwr.results.report.rows import Row, choose, sweeps, validation
from fedbn_flwr.results.report.tables import DEFAULT, ReportForm, Table, candidates_tables, sweep_tables, tables
from fedbn_flwr.results.report.write import write_report
from tests.support.runs import change_summary, rows_of, write_run


@pytest.mark.parametrize("status", ["interrupted", "failed", "running"])
def test_a_run_that_has_not_finished_is_marked(tmp_path: Path, status: str) -> None:
    for seed in (0, 1):
        write_run(tmp_path / str(seed), "A", seed, accuracy=0.2, accuracy_red=0.3)
    change_summary(tmp_path / "1", status=status)
    with RunFolder(tmp_path / "1").locked() if status == "running" else nullcontext():
        rows = rows_of(tmp_path)
    assert [lines[1][0] for _, lines in tables(rows)] == [f"A [{status}] (1 of 2 seeds)"] * 2


# --- sweeps ---


def swept_tables(rows: list[Row], form: ReportForm = DEFAULT) -> list[Table]:
    return [table for sweep in sweeps(rows) for table in sweep_tables(sweep, form)]


def write_cell(folder: Path, row: str, sweep: dict[str, Any], accuracy: float, seed: int = 0, **more: Any) -> None:
    config = {"cell": {"row": row, "sweep": sweep, "tune": more.pop("tune", {})}, **more.pop("config", {})}
    label = ", ".join([row, *(f"{key}={value}" for key, value in sweep.items())])
    write_run(folder / f"{label}-{len(list(folder.glob('*')))}", label, seed, config=config, accuracy=accuracy, **more)


def test_a_sweep_is_a_table_with_a_column_for_each_value(tmp_path: Path) -> None:
    for alpha in (1.0, 0.1):
        for seed in (0, 1):
            write_cell(tmp_path, "BN", {"alpha": alpha}, 0.5 + 0.2 * (alpha == 1) + 0.1 * seed, seed)
    write_cell(tmp_path, "GN", {"alpha": 0.1}, 0.4)
    write_cell(tmp_path, "Centralised", {}, 0.9)
    ((title, lines),) = swept_tables(rows_of(tmp_path))
    assert title == "accuracy by alpha"
    assert lines == [("alpha", "0.1", "1.0"), ("BN", "55.00% ± 7.07", "75.00% ± 7.07"), ("GN", "40.00%", "-")]


def test_a_run_of_a_sweep_that_has_not_finished_is_marked(tmp_path: Path) -> None:
    for steps in (1, 100):
        write_cell(tmp_path, "BN", {"steps": steps}, 0.5, seed=steps)
    change_summary(next(tmp_path.glob("BN, steps=1-*")), status="failed")
    ((_, lines),) = swept_tables(rows_of(tmp_path))
    assert lines[1] == ("BN", "50.00% [failed]", "50.00%")


def test_a_sweep_has_tables_and_panels_of_the_columns_that_are_asked_for(tmp_path: Path) -> None:
    """Without --columns: what its runs are compared by, and the same of the clients' own models."""
    for alpha in (0.1, 1.0):
        for row, own in (("FedAvg", None), ("FedBN", alpha / 2)):
            write_cell(tmp_path, row, {"alpha": alpha}, 0.5, clients_own_accuracy=own)
    rows = rows_of(tmp_path)
    plain, asked = swept_tables(rows), swept_tables(rows, ReportForm(columns=("clients_own_accuracy", "bytes_up")))
    assert [title for title, _ in plain] == ["accuracy by alpha", "accuracy on own data by alpha"]
    assert [title for title, _ in asked] == ["accuracy on own data by alpha", "MiB up by alpha"]
    assert plain[1][1][1:] == asked[0][1][1:] == [("FedAvg", "-", "-"), ("FedBN", "5.00%", "50.00%")]
    assert asked[1][1][1:] == [("FedAvg", "3.00", "3.00"), ("FedBN", "3.00", "3.00")]
    panels = sweeps_plot(rows, ReportForm(columns=("clients_own_accuracy", "bytes_up"))).axes
    assert [panel.get_ylabel() for panel in panels] == ["accuracy on own data, %", "MiB up"]
    write_report([tmp_path], tmp_path / "out", ReportForm(columns=("bytes_up",)))
    assert "MiB up by alpha" in (tmp_path / "out" / "report.md").read_text()
    assert "accuracy by alpha" not in (tmp_path / "out" / "report.md").read_text()


def test_a_value_at_which_runs_diverged_has_a_cross_and_no_dot(tmp_path: Path) -> None:
    for rate in (0.1, 60.0):
        for seed in range(3):
            write_cell(tmp_path, "A", {"lr": rate}, 0.5, seed, diverged=rate == 60)
            write_cell(tmp_path, "B", {"lr": rate}, 0.7, seed, diverged=rate == 60 and seed == 0)
    rows = rows_of(tmp_path)
    ((_, lines),) = swept_tables(rows)
    assert lines[1:] == [
        ("A", "50.00% ± 0", "diverged in round 4"),
        ("B", "70.00% ± 0", "70.00% ± 0 [diverged in round 4] (2 of 3 seeds)"),
    ]
    (panel,) = sweeps_plot(rows).axes
    crosses = [line.get_xdata()[0] for line in panel.get_lines() if line.get_marker() == "x"]
    dots = [each.lines[0].get_xdata()[0] for each in panel.containers]
    assert (len(crosses), len(dots)) == (2, 3)
    assert {*crosses} - {*dots} == {min(crosses)}, "of A, which has no result"
    assert panel.get_xlabel() == "lr (cross: diverged)"


def test_a_run_outside_of_the_sweep_is_a_line_across_all_values(tmp_path: Path) -> None:
    for q in (0.5, 1.0):
        write_cell(tmp_path, "QFed", {"q": q}, q / 2)
    write_cell(tmp_path, "FedAvg", {}, 0.4)
    figure = sweeps_plot(rows_of(tmp_path))
    heights = {
        line.get_label(): {*line.get_ydata()} for line in figure.axes[0].get_lines() if line.get_marker() == "none"
    }
    assert [*heights.values()].count({40.0}) == 1
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["QFed", "FedAvg"]


def test_the_colour_of_a_curve_is_the_strategy_s_and_its_dash_the_swept_value_s(tmp_path: Path) -> None:
    """Also of the dots by domain; in the picture of the sweep a strategy has the same colour."""
    for row in "ABCDE":
        for alpha in (0.1, 0.5, 5.0):
            write_cell(tmp_path, row, {"alpha": alpha}, 0.5, accuracy_sea=0.5)
    rows = rows_of(tmp_path)
    figure = plot(rows)
    curves = figure.axes[0].get_lines()
    assert [to_hex(line.get_color()).upper() for line in curves] == [COLOURS[i // 3] for i in range(15)]
    assert [line.get_marker() for line in curves] == ["o", "s", "^"] * 5
    dashes = [str(line._dash_pattern[1]) for line in curves[::5]]
    assert len({*dashes}) == 3, "one of each value"
    dots = figure.axes[-1].containers
    assert {(dot.lines[0].get_color(), dot.lines[0].get_marker()) for dot in dots} == {
        (colour, marker) for colour in COLOURS[:5] for marker in "os^"
    }
    (panel,) = sweeps_plot(rows).axes
    assert {dot.lines[0].get_color() for dot in panel.containers} == {*COLOURS[:5]}


def test_curves_that_strategy_and_value_do_not_tell_apart_all_differ(tmp_path: Path) -> None:
    for row in range(9):  # more than there are colours
        for alpha in (0.1, 0.5):
            write_cell(tmp_path, f"strategy {row}", {"alpha": alpha}, 0.5)
    curves = plot(rows_of(tmp_path)).axes[0].get_lines()
    assert len({(line.get_color(), line.get_marker(), line.get_linestyle()) for line in curves}) == 18


def test_a_wrapped_rule_s_setting_is_on_the_axis_of_the_others(tmp_path: Path) -> None:
    for fraction in (0.1, 0.5):
        write_cell(tmp_path, "BN", {"strategy.fraction_train": fraction}, fraction)
        write_cell(tmp_path, "FixBN", {"strategy.base.fraction_train": fraction}, 2 * fraction)
    ((_, lines),) = swept_tables(rows_of(tmp_path))
    assert lines[0] == ("strategy.fraction_train", "0.1", "0.5")
    assert set(lines[1:]) == {("BN", "10.00%", "50.00%"), ("FixBN", "20.00%", "100.00%")}


def test_the_last_key_is_the_axis_with_numbers_in_their_order_and_other_keys_are_panels(tmp_path: Path) -> None:
    for kind in ("iid", {"kind": "classes", "classes_per_client": 2}):
        for steps in (100, 1, 20):
            write_cell(tmp_path, "BN", {"partition": kind, "steps": steps}, 0.5)
    found = sweeps(rows_of(tmp_path))
    assert [sweep.title for sweep in found] == ["partition=iid", "partition=classes classes_per_client=2"]
    assert [sweep.values for sweep in found] == [["1", "20", "100"]] * 2


def test_keys_of_a_rule_and_of_the_one_that_it_wraps_are_two(tmp_path: Path) -> None:
    for name in ("FixBN", "MeanStatistics"):
        for base in ("FedAvg", "FedProx"):
            write_cell(tmp_path, "A", {"strategy.name": name, "strategy.base.name": base}, 0.5)
    found = sweeps(rows_of(tmp_path))
    assert {(sweep.title, value) for sweep in found for value in sweep.lines["A"]} == {
        (f"strategy.base.name={base}", name) for name in ("FixBN", "MeanStatistics") for base in ("FedAvg", "FedProx")
    }


def test_rows_with_other_settings_are_chosen_and_shown_by_themselves(tmp_path: Path) -> None:
    for rounds in (2, 4):
        for alpha in (0.1, 1.0):
            for lr in (0.1, 0.3):
                config = {"rounds": rounds, "train": {"lr": lr}, "data": {"partition": {"alpha": alpha}}}
                more = {"tune": {"train.lr": lr}, "config": config, "validation_accuracy": lr}
                write_cell(tmp_path, "BN", {"data.partition.alpha": alpha}, rounds / 10, **more)
    chosen = choose(rows_of(tmp_path))
    assert [row.runs[0].config["train"]["lr"] for row in chosen] == [0.3] * 4
    ((_, lines),) = swept_tables(chosen)
    assert lines[1:] == [("BN, rounds=2", "20.00%", "20.00%"), ("BN, rounds=4", "40.00%", "40.00%")]


@pytest.mark.parametrize("key", ["data.partition", "data.partition.kind"])
def test_settings_below_a_varied_key_do_not_divide_a_line(tmp_path: Path, key: str) -> None:
    partitions: list[dict[str, Any]] = [{"kind": "iid"}, {"kind": "domain", "clients_per_domain": None}]
    for given in (*partitions, {"kind": "domain", "clients_per_domain": 2}):
        value = given["kind"] if key.endswith("kind") else given
        config = {"data": {"partition": given}}
        write_cell(tmp_path / "swept", "BN", {key: value}, 0.5, config=config)
        write_cell(tmp_path / "tuned", "BN", {}, 0.5, tune={key: value}, config=config, validation_accuracy=0.5)
    ((_, lines),) = swept_tables(rows_of(tmp_path / "swept"))
    other = [] if key == "data.partition" else ["BN, data.partition.kind=domain, clients_per_domain=2"]
    assert [line[0] for line in lines[1:]] == ["BN", *other]
    assert len(choose(rows_of(tmp_path / "tuned"))) == 1


def test_candidates_none_of_which_is_chosen_are_all_shown(tmp_path: Path) -> None:
    for alpha in (0.1, 1.0):
        for lr in (0.1, 0.3):
            write_cell(tmp_path, "BN", {"alpha": alpha}, lr, tune={"train.lr": lr}, config={"train": {"lr": lr}})
    ((_, lines),) = swept_tables(choose(rows_of(tmp_path)))
    assert lines[1:] == [
        ("BN", "10.00%", "10.00%"),
        ("BN, alpha=0.1, lr=0.3", "30.00%", "-"),
        ("BN, alpha=1.0, lr=0.3", "-", "30.00%"),
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("pictures")
def test_the_report_and_the_page_have_a_plot_of_the_sweep(tmp_path: Path) -> None:
    for steps in (1, 100):
        for seed, accuracy in enumerate((0.5, 0.7)):
            write_cell(tmp_path, "BN", {"train.steps": steps}, accuracy, seed)
    write_report([tmp_path], tmp_path / "out")
    page = tmp_path / "out" / "report.md"
    assert "](sweep.png)" in page.read_text()
    with Image.open(tmp_path / "out" / "sweep.png") as picture:
        assert picture.width > 500
    write_report([tmp_path], tmp_path / "page.html", only_page=True)
    assert 'aria-label="accuracy, %, train.steps"' in (tmp_path / "page.html").read_text()
    plain = tmp_path / "plain"
    write_run(plain / "run", "FedAvg")
    write_report([plain], plain)
    assert not (plain / "sweep.png").exists()
    assert "train.steps" not in (plain / "report.html").read_text()


# --- The best candidate of each run and condition is chosen by held-out training examples, never by the test examples.


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
