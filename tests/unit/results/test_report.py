"""Reports of runs with an accuracy for each domain, or with mean IoU."""

from __future__ import annotations

import json
import math
import re
import shutil
import statistics
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

from fedbn_flwr import Results
from fedbn_flwr.commands import cli
from fedbn_flwr.results.metric_key import MetricKey
from fedbn_flwr.results.read.runs import find_runs
from fedbn_flwr.results.report.pictures import clients_plot, plot
from fedbn_flwr.results.report.rows import Row, headline
from fedbn_flwr.results.report.seen import decided, next_step, seen
from fedbn_flwr.results.report.tables import (
    Lines,
    ReportForm,
    by_domain,
    client_table,
    domain_table,
    notes,
    numbers,
    table,
)
from fedbn_flwr.results.report.write import write_report
from tests.support.marks import slow_except
from tests.support.refusals import refusal
from tests.support.runs import change_summary, rows_of, write_run, write_seeds


def domain_tables(rows: list[Row]) -> list[Lines]:
    return [domain_table(rows, *each)[1] for each in by_domain(rows).items()]


DOMAINS = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")


def write_runs(folder: Path, domains: tuple[str, ...], labels: tuple[str, ...], seeds: int) -> None:
    for i, label in enumerate(labels):
        for seed in range(seeds):
            own = {f"clients_own_accuracy_{d}": 0.3 + 0.05 * k + 0.02 * i + 0.01 * seed for k, d in enumerate(domains)}
            shared = {f"accuracy_{d}": 0.8 * own[f"clients_own_accuracy_{d}"] for d in domains}
            write_run(folder / f"{label}-{seed}", label, seed, **(shared if label != "Standalone" else {}), **own)


def test_each_domain_is_a_column_of_a_table_of_its_own(tmp_path: Path) -> None:
    write_runs(tmp_path, DOMAINS[:4], ("FedAvg", "Standalone"), seeds=2)
    rows = rows_of(tmp_path)
    assert not set(DOMAINS) & set(table(rows)[0]), "the first table does not get wider"
    shared, own = domain_tables(rows)
    assert shared[0] == own[0] == ("run", *DOMAINS[:4], "average")
    assert [line[0] for line in shared[1:]] == ["FedAvg"], "Standalone has no global model"
    assert [line[0] for line in own[1:]] == ["FedAvg", "Standalone"]
    deviation = statistics.stdev([30, 31])
    assert own[1][1:3] == (f"30.50% ± {deviation:.2f}", f"35.50% ± {deviation:.2f}")
    # Each domain counts alike, and the deviation is that of the seeds' averages.
    assert own[1][-1] == f"38.00% ± {deviation:.2f}"


def test_a_row_whose_accuracy_is_not_the_global_model_s_says_so(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "FedAvg")
    write_run(tmp_path / "b", "Standalone")
    change_summary(tmp_path / "b", accuracy_of="the clients' models, mean")
    labels = [row.label for row in rows_of(tmp_path)]
    assert labels == ["FedAvg", "Standalone (the clients' models)"]
    assert [row.label for row in rows_of(tmp_path / "b")] == ["Standalone"], "all rows are alike"
    frame = Results.read(tmp_path).frame("accuracy")
    assert frame.loc["Standalone", "accuracy_of"] == "the clients' models, mean"


def test_communication_rounds_are_a_panel_where_they_are_not_rounds(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "FedAvg")
    assert [panel.get_xlabel() for panel in plot(rows_of(tmp_path)).axes] == ["rounds", "MiB down and up"]
    write_run(tmp_path / "b", "FedTAN", lines=[{"accuracy": 0.5, "loss": 1.0, "communication_rounds": 3}])
    titles = [panel.get_xlabel() for panel in plot(rows_of(tmp_path)).axes]
    assert titles == ["rounds", "communication rounds", "MiB down and up"]


def test_a_row_without_a_global_model_is_in_the_panels_of_the_clients_only(tmp_path: Path) -> None:
    for label in ("FedAvg", "Standalone"):
        write_run(tmp_path / label, label, clients_own_accuracy=0.9)
    for accuracy_of, counts in {"the global model": [2, 2], "the clients' models, mean": [1, 2]}.items():
        change_summary(tmp_path / "Standalone", accuracy_of=accuracy_of)
        panels = plot(rows_of(tmp_path)).axes
        assert [len(panel.get_lines()) for panel in panels if panel.get_xlabel() == "rounds"] == counts


@pytest.mark.parametrize(("labels", "bands"), [("ABCDEFGH", 8), ("ABCDEFGHI", 0)])
def test_the_title_speaks_of_bands_only_where_they_are_drawn(tmp_path: Path, labels: str, bands: int) -> None:
    write_seeds(tmp_path, dict.fromkeys(labels, (0.5, 0.6)))
    picture = plot(rows_of(tmp_path))
    assert len(picture.axes[0].collections) == bands
    assert ("Band: ±" in picture.get_suptitle()) == bool(bands)


def test_without_domains_there_is_one_table(tmp_path: Path) -> None:
    write_run(tmp_path / "run", "FedAvg")
    assert domain_tables(rows_of(tmp_path)) == []
    text, _, _ = write_report([tmp_path], tmp_path).partition("\n\ntable: ")
    assert "domain" not in text
    assert (tmp_path / "report.md").read_text().count("|---|") == 1


@pytest.mark.usefixtures("plots")
def test_runs_that_stop_before_their_first_evaluation_have_a_report(tmp_path: Path) -> None:
    write_run(tmp_path / "run", "FedAvg", lines=[{"train_loss": 2.0}, {"train_loss": 1.0}], status="interrupted")
    assert "FedAvg [interrupted]" in write_report([tmp_path], tmp_path)
    assert (tmp_path / "report.png").exists()


@pytest.mark.usefixtures("plots")
@pytest.mark.parametrize("count", slow_except({6}, [3, 6]))
def test_page_text_and_plot_show_the_domains(tmp_path: Path, count: int) -> None:
    labels = ("FedAvg+BN", "FedAvg+GN", "SiloBN", "FixBN", "FedBN", "FedWon", "FedProx", "Standalone", "FedTAN")
    write_runs(tmp_path / "runs", DOMAINS[:count], labels, seeds=3)
    text = write_report([tmp_path / "runs"], tmp_path / "out")
    picture = tmp_path / "out" / "report.png"
    own = text.split("accuracy on own data, by domain\n")[1].split("\n\n")[0].splitlines()
    assert own[0].split() == ["run", *DOMAINS[:count], "average"]
    assert len(own) == 2 + len(labels)
    assert max(map(len, text.splitlines())) <= 120, "the width of a terminal"
    assert f"| run | {' | '.join(DOMAINS[:count])} | average |" in (tmp_path / "out" / "report.md").read_text()
    plain = tmp_path / "plain"
    write_run(plain / "run", "FedAvg")
    write_report([plain], plain)
    with Image.open(picture) as with_domains, Image.open(plain / "report.png") as without:
        assert with_domains.width == without.width
        assert with_domains.height > 1.5 * without.height, "below the curves are dots"


def test_runs_are_compared_by_the_main_figure_of_their_task(tmp_path: Path) -> None:
    for name, task, known in (
        ("a", "segmentation", "mean_iou"), ("b", None, "mean_iou"), ("c", "regression", "rmse"), ("d", None, "auc"),
    ):  # fmt: skip
        accuracy = {"accuracy": None} if task == "regression" else {}
        lines = [{"accuracy": 0.5, "loss": 1.0, known: 0.3, **accuracy}]
        write_run(tmp_path / name, name, task=task, lines=lines)
    assert str(headline(find_runs([tmp_path / "a"]))) == "mean_iou"
    assert str(headline(find_runs([tmp_path / "b"]))) == "accuracy", "of classification"
    assert str(headline(find_runs([tmp_path / "a", tmp_path / "b"]))) == "accuracy", "which both have"
    assert str(headline(find_runs([tmp_path / "c"]))) == "rmse"
    assert str(headline(find_runs([tmp_path / "c", tmp_path / "d"]))) == "rmse", "no figure is of both"


@pytest.mark.slow
@pytest.mark.usefixtures("pictures")
def test_a_metric_of_the_user_may_be_infinite(tmp_path: Path) -> None:
    for steps in (1, 2):
        for seed, odd in enumerate((math.inf, 1.0)):
            folder = tmp_path / f"{steps}-{seed}"
            clients = [{"round": 3, "clients": {"0": {"own_odd": odd}, "1": {"own_odd": 1.0}}}]
            config = {"cell": {"row": "A", "sweep": {"steps": steps}}}
            write_run(folder, f"A {steps}", seed, config=config, files={"clients.jsonl": clients}, odd=odd, dice=odd)
            change_summary(folder, metrics=["odd", "dice"], odd=odd, dice=odd)
    text = write_report([tmp_path], tmp_path / "out")
    for shown in (text, (tmp_path / "out" / "report.md").read_text()):
        assert "inf%" in shown


@pytest.mark.usefixtures("plots")
def test_the_command_writes_into_a_new_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("first", "second"):
        write_run(tmp_path / name / "run", name)
    write_report([tmp_path / "first"], tmp_path / "first")
    before = (tmp_path / "first" / "report.md").read_bytes()
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDBN_OUT", raising=False)
    assert cli.main(["report", "first", "second"]) == 0
    (folder,) = Path("runs").iterdir()
    assert folder.name.startswith("report-")
    assert f"table: {folder / 'report.md'}\nplot:  {folder / 'report.png'}" in capsys.readouterr().out
    assert {file.name for file in folder.iterdir()} == {
        "report.md", "report.csv", "report.png", "report.svg", "report.json", "report.html",
    }  # fmt: skip
    assert "| second |" in (folder / "report.md").read_text()
    assert (tmp_path / "first" / "report.md").read_bytes() == before


def test_runs_are_grouped_by_all_settings_but_the_seed(tmp_path: Path) -> None:
    for name, seed, lr, workers in (("a", 0, 0.1, 0), ("b", 1, 0.1, 2), ("c", 0, 0.01, 0), ("d", 0, 0.01, 0)):
        write_run(tmp_path / name, "FixBN", seed)
        settings = {"label": "FixBN", "seed": seed, "train": {"lr": lr, "steps": 5}, "engine": {"workers": workers}}
        (tmp_path / name / "config.yaml").write_text(yaml.safe_dump(settings))
    write_run(tmp_path / "e", "FedAvg")
    first = [line[0] for line in table(rows_of(tmp_path))[1:]]
    assert first == ["FixBN, lr=0.1 (2 seeds)", "FixBN, lr=0.01 (2 runs, 1 seed)", "FedAvg"]
    assert [len(row.values(MetricKey("accuracy"))) for row in rows_of(tmp_path)] == [2, 1, 1], "a seed counts once"


# --- seeds that failed ----------------------------------------------------------


def test_all_figures_of_a_row_are_of_the_seeds_that_finished(tmp_path: Path) -> None:
    """Seed s has the accuracy 0.5 + s / 10 and takes s + 1 seconds a round; those that failed have one round."""
    for seed, rounds in enumerate((1, 1, 3)):
        lines = [{"accuracy": 0.5 + seed / 10, "loss": 1.0, "seconds": seed + 1.0, "accuracy_sea": 0.3}] * rounds
        clients = [{"round": 1, "clients": {"0": {"own_accuracy": seed / 10}, "1": {"own_accuracy": seed / 10}}}]
        status, files = "finished" if rounds == 3 else "failed", {"clients.jsonl": clients}
        write_run(tmp_path / f"FedTAN-seed{seed}", "FedTAN", seed, lines=lines, files=files, status=status)
    (row,) = rows = rows_of(tmp_path)
    heads, cells = table(rows)
    found = dict(zip(heads, cells, strict=True))
    assert found["run"] == "FedTAN [failed] (1 of 3 seeds)"
    assert [found[key] for key in ("accuracy", "rounds", "MiB up", "seconds")] == ["70.00%", "3", "3.00", "9.0"]
    assert [domain_tables(rows)[0][1][0], client_table(rows)[1][0]] == [row.title] * 2
    assert client_table(rows)[1][3] == "20.00%"
    (line, *_) = plot(rows).axes[0].get_lines()
    assert line.get_xydata().tolist() == [[1, 70], [2, 70], [3, 70]]
    write_report([tmp_path], tmp_path / "out")
    (run,) = json.loads((tmp_path / "out" / "report.json").read_text())[2:]
    assert [point["round"] for point in run["curve"]] == [1, 2, 3]


def test_a_row_that_no_seed_finished_has_the_figures_of_those_that_were_evaluated(tmp_path: Path) -> None:
    for seed, accuracy in enumerate((0.5, None, 0.7)):
        lines = [{"loss": 1.0, "seconds": seed + 1.0} | ({} if accuracy is None else {"accuracy": accuracy})]
        write_run(tmp_path / str(seed), "A", seed, lines=lines, status="failed")
    heads, cells = table(rows_of(tmp_path))
    found = dict(zip(heads, cells, strict=True))
    assert (found["run"], found["accuracy"]) == ("A [failed] (2 of 3 seeds)", f"60.00% ± {math.sqrt(200):.2f}")
    assert found["seconds"] == f"2.0 ± {math.sqrt(2):.1f}"


def write_diverged(folder: Path, label: str, seed: int, rounds: int) -> None:
    lines = [{"accuracy": number / 10, "loss": 1.0, "accuracy_sea": 0.5} for number in range(1, rounds + 1)]
    clients = [{"round": rounds, "clients": {"0": {"own_accuracy": 0.9}}}]
    write_run(folder / f"{label}{seed}", label, seed, lines=lines, diverged=True, files={"clients.jsonl": clients})


def test_runs_that_diverged_have_a_curve_and_no_results(tmp_path: Path) -> None:
    """The last accuracies before the divergence, 50 and 70 %, are no results; the best one is known."""
    write_diverged(tmp_path, "A", 0, 5)
    write_diverged(tmp_path, "A", 1, 7)
    write_diverged(tmp_path, "B", 0, 5)
    rows = rows_of(tmp_path)
    heads, *lines = table(rows)
    found = [dict(zip(heads, line, strict=True)) for line in lines]
    assert [each["run"] for each in found] == ["A [diverged in rounds 6 to 8] (2 seeds)", "B [diverged in round 6]"]
    assert [each["accuracy"] for each in found] == ["-", "-"]
    assert found[0]["best accuracy on test"] == f"60.00% ± {math.sqrt(200):.2f}"
    assert found[0]["rounds"] == f"6 ± {math.sqrt(2):.0f}"
    assert domain_tables(rows)[0][1:] == client_table(rows)[1:] == []
    assert clients_plot(rows) is None
    first, end, *_ = plot(rows).axes[0].get_lines()
    assert first.get_xydata().tolist() == [[number, 10 * number] for number in range(1, 6)], "what both have"
    assert (end.get_marker(), end.get_xydata().tolist()) == ("x", [[5, 50]])
    (line, _) = numbers(rows, ReportForm())
    assert line["status"] == "diverged in rounds 6 to 8"
    assert math.isnan(line["accuracy"])


def test_a_seed_that_diverged_is_not_in_the_mean_and_is_named(tmp_path: Path) -> None:
    for seed, accuracy in ((1, 0.5), (2, 0.7)):
        write_run(tmp_path / str(seed), "A", seed, accuracy=accuracy)
    write_diverged(tmp_path, "A", 0, 9)
    (row,) = rows_of(tmp_path)
    assert table([row])[1][:2] == ("A [diverged in round 10] (2 of 3 seeds)", f"60.00% ± {math.sqrt(200):.2f}")
    assert not [line for line in plot([row]).axes[0].get_lines() if line.get_marker() == "x"], (
        "the curve is of the others"
    )


def test_a_column_that_a_seed_lacks_has_no_figure(tmp_path: Path) -> None:
    write_run(tmp_path / "0", "A", 0, clients_accuracy=0.4)
    write_run(tmp_path / "1", "A", 1)
    write_run(tmp_path / "2", "B", 1, clients_accuracy=0.4, accuracy_sea=0.1, accuracy_farm=0.3)
    write_run(tmp_path / "3", "B", 2, clients_accuracy=0.4, accuracy_sea=0.1)
    clients = {"round": 3, "clients": {"0": {"own_accuracy": 0.5}}}
    (tmp_path / "0" / "clients.jsonl").write_text(json.dumps(clients) + "\n")
    rows = rows_of(tmp_path)
    heads, *lines = table(rows)
    assert [line[heads.index("clients' accuracy")] for line in lines] == ["-", "40.00% ± 0"]
    assert domain_tables(rows)[0][1:] == [("B", "10.00% ± 0", "-", "-")]
    assert client_table(rows)[1:] == [], "its other seed has no clients"


# --- order and names of rows ----------------------------------------------------


def test_rows_follow_the_given_folders_and_in_them_the_file(tmp_path: Path) -> None:
    for number, label in enumerate(("FixBN", "FedAvg", "FedBN")):
        for seed in (1, 0):
            folder = tmp_path / "b" / f"{label}-{seed}"
            write_run(folder, label, seed, config={"cell": {"place": [number]}})
            change_summary(folder, began=f"2026-01-0{9 - number}")  # began in another order
    write_run(tmp_path / "a" / "Local", "Local", config={"cell": {"place": [0]}})
    found = find_runs([tmp_path / "b", tmp_path / "a"])
    names = ["FixBN-0", "FixBN-1", "FedAvg-0", "FedAvg-1", "FedBN-0", "FedBN-1", "Local"]
    assert [run.folder.name for run in found] == names
    assert [run.folder.name for run in find_runs([tmp_path])] == [names[-1], *names[:-1]]
    assert find_runs([tmp_path / "b" / "FedBN-1", tmp_path / "b"])[0].folder.name == "FedBN-1"


def test_rows_with_many_differences_have_numbers(tmp_path: Path) -> None:
    for number, folder in enumerate(("compare", "low")):
        config = {"train": {f"setting_{each}": number for each in range(12)}}
        write_run(tmp_path / folder / "FixBN", "FixBN", config=config)
    write_run(tmp_path / "compare" / "Z", "Z")
    labels = [row.label for row in rows_of(tmp_path / "compare", tmp_path / "low")]
    assert labels == ["FixBN (1)", "Z", "FixBN (2)"], "a further folder does not move the rows of the first"


def test_a_report_says_which_row_has_runs_on_different_examples(tmp_path: Path) -> None:
    for number, checksum in enumerate(("aa", "bb", None)):
        files = {"environment.json": {"token": str(number)} | ({"data_checksum": checksum} if checksum else {})}
        write_run(tmp_path / "A" / str(number), "A", number, files=files)
        write_run(tmp_path / "B" / str(number), "B", number, files={"environment.json": {"token": f"b{number}"}})
    assert notes(rows_of(tmp_path)) == ["A: its runs have the same settings and different examples (aa, bb)."]


def test_a_report_says_that_rows_have_different_numbers_of_rounds(tmp_path: Path) -> None:
    for number, label in enumerate(("FedAvg", "FixBN", "FedBN"), start=2):
        write_run(tmp_path / label, label, lines=[{"accuracy": 0.5, "loss": 1.0}] * max(3, number))
    change_summary(tmp_path / "FixBN", status="interrupted")
    assert notes(rows_of(tmp_path)) == ["Rounds differ: FedAvg 3, FedBN 4."]


def test_a_report_says_what_its_runs_have_in_common_and_where_they_differ(tmp_path: Path) -> None:
    for seed, rounds, label in ((0, 3, "A"), (2, 3, "A"), (0, 4, "B")):
        config = {"data": {"name": "digits"}, "clients": 4, "rounds": rounds, "model": {"name": "cnn"}}
        write_run(tmp_path / f"{label}{seed}", label, seed, config=config)
    write_report([tmp_path], tmp_path / "out")
    page = (tmp_path / "out" / "report.html").read_text()
    first, *rest = (tmp_path / "out" / "report.md").read_text().split("\n\n")
    assert first == "name: digits, cnn, 4 clients, seeds 0, 2."
    assert "settings that differ:" in rest
    assert rest[rest.index("settings that differ:") + 1].splitlines()[2:] == ["| A | 3 |", "| B | 4 |"]
    assert "name: digits, cnn, 4 clients, seeds 0, 2. 3 runs" in page
    assert re.findall("<th scope=.col.>(.*?)</th>", page)[-2:] == ["run", "rounds"], "and no setting that is equal"
    assert "rounds: 4" in page, "the settings of each run"


def test_runs_are_found_by_links_and_each_once(tmp_path: Path) -> None:
    write_run(tmp_path / "disk" / "A", "A")
    (tmp_path / "runs" / "deep").mkdir(parents=True)
    (tmp_path / "runs" / "A").symlink_to(tmp_path / "disk" / "A")
    (tmp_path / "runs" / "deep" / "up").symlink_to(tmp_path / "runs")  # without an end
    (found,) = find_runs([tmp_path / "runs"])
    assert found.folder == tmp_path / "runs" / "A"
    write_run(tmp_path / "disk" / "B", "B")
    (tmp_path / "runs" / "deep" / "all").symlink_to(tmp_path / "disk")
    assert len(find_runs([tmp_path / "runs"])) == 1, "a link to folders of runs may be one to the whole disk"
    assert {run.label for run in find_runs([tmp_path / "runs", tmp_path / "runs" / "deep" / "all"])} == {"A", "B"}


def test_a_summary_that_leads_nowhere_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "A").mkdir()
    (tmp_path / "A" / "summary.json").symlink_to(tmp_path / "gone.json")
    assert "holds no run" in refusal(capsys, "report", tmp_path, "--out", tmp_path / "out")
    write_run(tmp_path / "B", "B")
    assert [run.label for run in find_runs([tmp_path])] == ["B"]


def test_a_copy_of_a_run_is_no_repetition(tmp_path: Path, flower_log: pytest.LogCaptureFixture) -> None:
    for seed in range(3):
        write_run(tmp_path / "a" / str(seed), "A", seed, files={"environment.json": {"token": str(seed)}})
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    longer = [{"accuracy": 0.1}] * 4
    write_run(tmp_path / "c", "A", 1, files={"environment.json": {"token": "1"}}, lines=longer)  # it was continued
    for folder in "xy":
        write_run(tmp_path / folder, "B")  # without a token
    write_run(tmp_path / "z", "C", files={"environment.json": {"token": "1"}})  # continues a run with other settings
    found = find_runs([tmp_path / name for name in "abcxyz"])
    assert [str(run.folder.relative_to(tmp_path)) for run in found] == ["a/0", "a/2", "c", "x", "y", "z"]
    first, second = tmp_path / "b" / "0", tmp_path / "a" / "0"
    assert f"{first} is a copy of {second}, and is not counted" in flower_log.text
    assert f"{tmp_path / 'a' / '1'} is a copy of {tmp_path / 'c'}, and is not counted" in flower_log.text


# --- The last lines of `fedbn run`: what was seen, and what comes next.


CENTRAL = {"clients": 1, "data": {"name": "digits", "partition": {"kind": "iid"}}}
FEDERATED = {"clients": 5, "data": {"name": "digits", "partition": {"kind": "classes"}}}
OTHER_DATA = {"clients": 5, "data": {"name": "mnist"}}
SWEPT = FEDERATED | {"cell": {"sweep": {"train.lr": 0.1}}}
REGRESSION = {"config": FEDERATED, "task": "regression", "accuracy": None}


@pytest.mark.parametrize(
    ("runs", "sentence"),
    [
        (
            {
                "Centralised": {"config": CENTRAL, "accuracy": 0.967},
                "FedAvg": {"accuracy": 0.799},
                "FixBN": {"accuracy": 0.961},
                "FedTAN": {"accuracy": 0.956},
            },
            "In accuracy, FedAvg ends 16.8 points below Centralised, FixBN 0.6 points below it.",
        ),
        (
            {"Centralised": {"config": CENTRAL, "accuracy": 0.967}, "FixBN": {"accuracy": 0.967}},
            "In accuracy, FixBN ends level with Centralised.",
        ),
        (
            {
                "FedAvg": {"accuracy": 0.78},
                "FixBN": {"accuracy": 0.92},
                "failed": {"accuracy": 0.1, "status": "failed"},
            },
            "In accuracy, FixBN ends 14.0 points above FedAvg.",
        ),
        (
            {"FedAvg": {**REGRESSION, "rmse": 50.0}, "FedBN": {**REGRESSION, "rmse": 48.5}},
            "In RMSE, FedBN ends 1.500 below FedAvg.",
        ),
        ({"FixBN": {"accuracy": 0.9}}, ""),
        ({"digits": {"accuracy": 0.9}, "mnist": {"config": OTHER_DATA, "accuracy": 0.99}}, ""),
        ({"FixBN": {"accuracy": 0.9}, "FixBN, lr=0.1": {"config": SWEPT, "accuracy": 0.8}}, ""),
    ],
)
def test_what_a_comparison_has_shown(runs: dict[str, dict[str, Any]], sentence: str, tmp_path: Path) -> None:
    for label, about in runs.items():
        write_run(tmp_path / label, label, **{"config": FEDERATED, **about})
    assert seen(rows_of(tmp_path)) == sentence


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"a": [0.9, 0.91, 0.92], "b": [0.8, 0.82, 0.81], "c": [0.7, 0.72, 0.71]}, "a is better than b, c. Take a."),
        (
            {"a": [0.9, 0.91, 0.92], "b": [0.93, 0.85, 0.94], "c": [0.7, 0.72, 0.71]},
            "a is better than c. The data don't decide between a and b.",
        ),
        ({"a": [0.9, 0.8, 0.7], "b": [0.7, 0.9, 0.75]}, "The data don't decide between a and b."),
        ({"a": [0.9, 0.91], "b": [0.8, 0.8]}, ""),
        ({"a": [0.9, 0.91, 0.92]}, ""),
    ],
)
def test_tuned_rows_are_decided_by_paired_tests(values: dict[str, list[float]], sentence: str, tmp_path: Path) -> None:
    """At 5 % for all comparisons with the best row together, without central training."""
    cell = {"cell": {"tune": {"train.lr": 0.1}}}
    write_seeds(tmp_path, values, config=FEDERATED | cell)
    write_seeds(tmp_path, {"central": [1.0] * 3}, config=CENTRAL | cell)
    said = decided(rows_of(tmp_path)).partition(" (Paired")[0]
    assert said == sentence


def test_what_comes_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").touch()
    write_run(tmp_path / "out" / "a", "a", config=FEDERATED)
    one = rows_of(tmp_path)
    write_run(tmp_path / "out" / "b", "b", config=FEDERATED)
    two = rows_of(tmp_path)
    for seed in (1, 2):
        for label in "ab":
            write_run(tmp_path / "out" / f"{label}{seed}", label, seed, config=FEDERATED)
    assert next_step(one, "demo") == "Next: fedbn new mine"
    assert next_step(one, "mine.yaml") == "Next: fedbn predict out/a --data PATH"
    assert next_step(two, "mine.yaml") == "Next: fedbn run mine.yaml 'seeds=[0,1,2,3,4]'"
    assert next_step(rows_of(tmp_path), "mine.yaml") == "Next: fedbn report out --baseline a"
