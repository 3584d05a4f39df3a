"""The page of a report: its data, and that text of run folders stays text. test_browser.py looks at it in a browser."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import statistics
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from fedbn_flwr import cli
from fedbn_flwr.results.curves import POINTS, Measure, curves, measures, thinned
from fedbn_flwr.results.page import write_page
from fedbn_flwr.results.report import as_markdown, as_text, table
from fedbn_flwr.results.rows import find_runs, group
from fedbn_flwr.results.write import write_html, write_report
from tests.support.runs import TRAFFIC, write_run

HOSTILE = (
    "<script>alert(1)</script>",
    "</script><img src=x onerror=alert(2)>",
    "\"quotes' & $\\frac$ `code`",
    "\u0639\u0631\u0628\u064a \u202e reversed",
    "..",
    '=HYPERLINK("http://x.example")',
    "_long_ " * 60,
    "{{data}} | \x1b[31m \u2028 line",
)


class Page(HTMLParser):
    """The elements of a page, and the text of its table cells, summaries and script elements."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self._open: list[str] = []
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._open.append(tag)
        self.texts.setdefault(tag, []).append("")

    def handle_endtag(self, tag: str) -> None:
        if tag in self._open:
            del self._open[len(self._open) - 1 - self._open[::-1].index(tag) :]

    def handle_data(self, data: str) -> None:
        if self._open:
            self.texts[self._open[-1]][-1] += data

    @property
    def data(self) -> Any:
        return json.loads(self.texts["script"][0])


def page_of(folder: Path) -> Page:
    file = folder / "page.html"
    write_page(group(find_runs([folder])), file)
    return Page(file)


def history(count: int, every: int = 1, **more: Any) -> list[dict[str, Any]]:
    return [
        {"round": i, **TRAFFIC, **({"accuracy": i / 100, **more} if i % every == 0 else {})}
        for i in range(1, count + 1)
    ]


# --- curves -------------------------------------------------------------------


def test_a_curve_has_the_rounds_of_all_runs_and_what_was_spent_until_then() -> None:
    slow = [{**line, "seconds": 1.5} for line in history(4)]
    found = curves([history(6, every=2), slow], ["accuracy"])
    assert found.rounds == [2, 4]
    assert found.axes == {
        "round": [2, 4],
        "communication_rounds": [2, 4],
        "mib": [4, 8],
        "seconds": [2.0, 4.0],  # mean of 1 and 3, of 2 and 6
    }
    assert found.points("accuracy", "seconds") == ([2.0, 4.0], [[0.02, 0.02], [0.04, 0.04]])


def test_a_round_that_diverged_is_left_out() -> None:
    lines = history(3)
    lines[1]["accuracy"] = math.nan
    assert curves([lines], ["accuracy"]).points("accuracy", "round") == ([1, 3], [[0.01], [0.03]])


def test_long_runs_are_thinned_evenly_with_first_and_last_round() -> None:
    found = curves([history(10_000, every=7)], ["accuracy"])
    assert len(found.rounds) == POINTS
    assert (found.rounds[0], found.rounds[-1], found.total) == (7, 9996, 10_000)
    assert {later - earlier for earlier, later in zip(found.rounds, found.rounds[1:], strict=False)} <= {21, 28}
    assert thinned(range(5), 5) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("key", "group_", "title", "fraction"),
    [
        ("accuracy", "global model", "accuracy", True),
        ("accuracy_real", "global model", "accuracy, domain real", True),
        ("clients_own_macro_f1", "clients, own test images", "macro F1", True),
        ("clients_own_accuracy_worst_tenth", "clients, own test images", "accuracy, mean of the worst tenth", True),
        ("clients_accuracy_std", "clients, all test images", "accuracy, deviation over clients", True),
        ("train_loss", "training", "training loss", False),
        ("my_metric", "global model", "my metric", False),
        ("auc_macro", "global model", "auc macro", False),
        ("validation_accuracy", "held-out training images", "accuracy", True),
        ("unseen_accuracy_tuned", "new clients, own test images", "accuracy, fine-tuned", True),
    ],
)
def test_measures_are_named_in_words(key: str, group_: str, title: str, fraction: bool) -> None:
    assert Measure.of(key) == Measure(key, group_, title, fraction)


def test_every_metric_can_have_domains() -> None:
    lines = history(2, accuracy_sea=0.5, auc_sea=0.5, auc_macro=0.5, clients_own_dice_sea=0.5)
    titles = {measure.key: measure.title for measure in measures([lines])}
    assert titles["auc_sea"] == "AUC, domain sea"
    assert (titles["auc_macro"], titles["clients_own_dice_sea"]) == ("auc macro", "dice sea"), "not beside an accuracy"


def test_traffic_and_seconds_are_no_measures() -> None:
    keys = [measure.key for measure in measures([history(2, mean_iou=0.1, accuracy_sea=0.5)])]
    assert keys == ["accuracy", "mean_iou", "accuracy_sea"]


# --- content ------------------------------------------------------------------


def test_the_page_has_the_charts_whose_files_exist(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "FedAvg")
    data = page_of(tmp_path).data
    assert [data[key] for key in ("clients", "partitions", "matrices", "layers", "domains")] == [None, [], [], [], []]
    norms = [
        {"round": i, "layers": {"bn1": {"mean_drift": 1 / i}}, "clients": {"0": {"bn1": {"mean_deviation": 0.5}}}}
        for i in (1, 2)
    ]
    files = {
        "partition.json": {"title": "digits: iid", "classes": ["a", "b"], "counts": [[3, 0], [1, 2]], "clients": []},
        "clients.jsonl": [{"round": 3, "clients": {str(i): {"own_accuracy": i / 10} for i in range(11)}}],
        "matrix.json": {"clients": ["0", "1"], "accuracy": [[0.9, None], [0.1, 0.8]]},
        "norms.jsonl": norms,
    }
    write_run(tmp_path / "full", "FedBN", files=files, accuracy_sea=0.5)
    data = page_of(tmp_path).data
    box = data["clients"]["boxes"]["own_accuracy"][1]
    values = [i / 10 for i in range(11)]
    assert box["mean"] == pytest.approx(0.5)
    assert box["deviation"] == pytest.approx(statistics.pstdev(values))
    assert box["worst"] == pytest.approx(0.05), "the mean of the two worst of eleven"
    assert box["quartiles"] == pytest.approx([0.25, 0.5, 0.75])
    assert data["clients"]["boxes"]["own_accuracy"][0] is None
    assert data["partitions"][0]["counts"] == [[3, 0], [1, 2]]
    assert data["partitions"][0]["clients"] == ["0", "1"]
    assert data["matrices"][0]["values"] == [[0.9, None], [0.1, 0.8]]
    (layers,) = data["layers"]
    assert layers["series"] == {"mean_drift": [[1, 0.5]], "mean_deviation, mean over clients": [[0.5, 0.5]]}
    assert layers["by_client"] == {"mean_deviation": [[0.5]]}
    assert [bars for kind in data["domains"] for bars in kind["bars"]] == [[None, None], [[0.5, 0], [0.5, 0]]]


def test_measures_of_clients_name_their_images(tmp_path: Path) -> None:
    names = ("images", "accuracy", "own_auc_macro", "validation_accuracy", "unseen_accuracy", "unseen_accuracy_tuned")
    lines = [{"round": 3, "clients": {"0": dict.fromkeys(names, 0.5)}}]
    write_run(tmp_path / "run", "FedBN", files={"clients.jsonl": lines})
    assert [(each["title"], each["fraction"]) for each in page_of(tmp_path).data["clients"]["measures"]] == [
        ("accuracy (all test images)", True),
        ("auc macro (own test images)", False),
        ("accuracy (held-out training images)", True),
        ("accuracy (new clients, own test images)", True),
        ("accuracy, fine-tuned (new clients, own test images)", True),
        ("training images", False),
    ]


def test_a_large_matrix_is_averaged_in_blocks(tmp_path: Path) -> None:
    names = [str(i) for i in range(150)]
    values = [[float(i // 2) for _ in names] for i in range(150)]
    write_run(tmp_path / "run", "FedBN", files={"matrix.json": {"clients": names, "accuracy": values}})
    (matrix,) = page_of(tmp_path).data["matrices"]
    assert matrix["block"] == 2
    assert matrix["clients"][:2] == ["0 to 1", "2 to 3"]
    assert [row[0] for row in matrix["values"]] == list(range(75))


def test_a_damaged_file_is_reported_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "run", "FedBN")
    (tmp_path / "run" / "matrix.json").write_text("{")
    assert cli.main(["report", "--html", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert "matrix.json" in capsys.readouterr().err


def test_settings_that_differ_and_published_figures_are_tables(tmp_path: Path) -> None:
    published = {"accuracy": [0.5, 0.01], "clients_own_accuracy": 0.9, "source": "Paper, Table 1"}
    for seed in (0, 1):
        config = {"train": {"lr": 0.1, "steps": 5}, "published": published}
        write_run(tmp_path / f"a{seed}", "FixBN", seed, config=config, accuracy=0.6)
    write_run(tmp_path / "b", "FedAvg", config={"train": {"lr": 0.2, "steps": 5}})
    page = page_of(tmp_path)
    cells = page.texts["td"]
    start = cells.index("accuracy (global model)")
    assert cells[start + 1 : start + 7] == ["50.00% ± 1.00", "60.00%", "2", "+10.00", "no", "Paper, Table 1"]
    assert cells[start + 8 : start + 13] == ["90.00%", "-", "0", "-", "-"], "not measured"
    assert "train.lr" in page.texts["th"]
    assert "train.steps" not in page.texts["th"], "it is the same in all runs"
    assert any("steps: 5" in text for text in page.texts["pre"]), "the settings of each run"
    assert len(group(find_runs([tmp_path]))) == 2


# --- hostile text -----------------------------------------------------------


def write_hostile(folder: Path) -> None:
    for number, label in enumerate(HOSTILE):
        files = {
            "partition.json": {"title": label, "classes": [label, "b"], "counts": [[1, number]], "clients": [label]},
            "clients.jsonl": [{"round": 3, "clients": {label: {"own_accuracy": 0.5}, "1": {"own_accuracy": 0.2}}}],
            "matrix.json": {"clients": [label], "accuracy": [[0.5]]},
            "norms.jsonl": [{"round": 1, "layers": {label: {label: 0.5}}, "clients": {}}],
        }
        config = {"model": {"name": label}, "published": {"accuracy": 0.5, "source": label}}
        write_run(folder / str(number), label, number, config=config, files=files, **{f"accuracy_{label}": 0.5})


def test_hostile_text_is_text_in_the_page(tmp_path: Path) -> None:
    write_run(tmp_path / "plain", "FedAvg")
    known = {tag for tag, _ in page_of(tmp_path).tags}
    write_hostile(tmp_path)
    page = page_of(tmp_path)
    assert {tag for tag, _ in page.tags} - known <= {"td", "details", "summary", "pre", "small"}, "no img"
    assert [attributes for tag, attributes in page.tags if tag == "script"] == [
        {"type": "application/json", "id": "data"}, {},
    ]  # fmt: skip
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
    assert not [name for tag, attributes in page.tags if tag != "link" for name in ("src", "href") if name in attributes
                and not str(attributes[name]).startswith("#")]  # fmt: skip
    labels = [row["label"] for row in page.data["rows"]]
    assert "<script>alert(1)</script>" in labels
    assert "{{data}} | \N{REPLACEMENT CHARACTER}[31m line" in labels


def test_a_spreadsheet_sees_no_formula(tmp_path: Path) -> None:
    write_hostile(tmp_path)
    files = page_of(tmp_path).data["files"]
    runs, rounds = (list(csv.DictReader(io.StringIO(files[name]))) for name in ("runs.csv", "curves.csv"))
    assert {line["row"] for line in runs} == {line["row"] for line in rounds}
    assert '\'=HYPERLINK("http://x.example")' in {line["row"] for line in runs}
    assert [line["accuracy"] for line in rounds[:3]] == ["0.2", "0.4", "0.6"]
    assert float(runs[0]["bytes_up"]) == 3 * 2**20


def test_markdown_and_terminal_show_text(tmp_path: Path) -> None:
    write_hostile(tmp_path)
    lines = table(group(find_runs([tmp_path])))
    marked = as_markdown(lines)
    assert len(marked.splitlines()) == 2 + len(HOSTILE), "a line break in a label would begin another row"
    assert all(len(re.findall(r"(?<!\\)\|", line)) == len(lines[0]) + 1 for line in marked.splitlines())
    assert not re.search(r"(?<!\\)[<$`]", marked)
    assert all(line.isprintable() for line in as_text(lines).splitlines())


def test_plots_find_no_formula_in_a_label(tmp_path: Path) -> None:
    write_hostile(tmp_path / "runs")
    write_report([tmp_path / "runs"], tmp_path / "out")
    for name in ("report.png", "clients.png"):
        assert (tmp_path / "out" / name).read_bytes().startswith(b"\x89PNG")


# --- files ----------------------------------------------------------------------


def test_only_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "run", "FedAvg")
    assert cli.main(["report", "--html", str(tmp_path / "run"), "--out", str(tmp_path / "new" / "page.html")]) == 0
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["page.html"]
    assert f"page:  {tmp_path / 'new' / 'page.html'}" in capsys.readouterr().out
    assert cli.main(["report", "--html", str(tmp_path / "run"), "--out", str(tmp_path / "folder")]) == 0
    assert [file.name for file in (tmp_path / "folder").iterdir()] == ["report.html"]


def test_equal_runs_give_equal_plots(tmp_path: Path) -> None:
    write_run(tmp_path / "run", "FedAvg")
    for name in ("one", "two"):
        write_report([tmp_path / "run"], tmp_path / name)
    assert (tmp_path / "one" / "report.svg").read_bytes() == (tmp_path / "two" / "report.svg").read_bytes()


def test_ten_thousand_rounds_of_twenty_runs_fit_in_a_page(tmp_path: Path) -> None:
    write_run(tmp_path / "0", "0", lines=[{"accuracy": 0.5 + 1 / (i + 3), "loss": 1 / (i + 7)} for i in range(10_000)])
    text = (tmp_path / "0" / "summary.json").read_text()
    for number in range(1, 20):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "history.jsonl").symlink_to(tmp_path / "0" / "history.jsonl")
        (folder / "summary.json").write_text(text.replace('"label": "0"', f'"label": "{number}"'))
    write_html([tmp_path], tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size < 10e6
    assert len(Page(tmp_path / "page.html").data["rows"]) == 20
