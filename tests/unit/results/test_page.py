"""The page of a report: its tables and pictures, and that text of run folders stays text."""

from __future__ import annotations

import itertools
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from fedbn_flwr.commands import cli
from fedbn_flwr.results.folder.clients import PartitionCounts
from fedbn_flwr.results.metric_key import MetricKey
from fedbn_flwr.results.report.curves import POINTS, curve, measures, thin
from fedbn_flwr.results.report.pictures import partitions_plot, plot
from fedbn_flwr.results.report.tables import as_markdown, as_text, table
from fedbn_flwr.results.report.write import write_report
from fedbn_flwr.results.text import in_plot
from tests.support.fixtures import drawing
from tests.support.refusals import refusal
from tests.support.runs import TRAFFIC, rows_of, write_run

pytestmark = pytest.mark.usefixtures("pictures")

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
    """The elements of a page, and the text behind the start of each: of its table cells, headings and so on."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.texts.setdefault(tag, []).append("")

    def handle_data(self, data: str) -> None:
        if self.tags:
            self.texts[self.tags[-1][0]][-1] += data


def page_of(folder: Path) -> Page:
    file = folder / "page.html"
    write_report([folder], file, only_page=True)
    return Page(file)


def history(count: int, every: int = 1, **more: Any) -> list[dict[str, Any]]:
    return [
        {"round": i, **TRAFFIC, **({"accuracy": i / 100, **more} if i % every == 0 else {})}
        for i in range(1, count + 1)
    ]


# --- curves -------------------------------------------------------------------


def test_a_curve_has_the_rounds_of_all_runs_and_what_was_spent_until_then() -> None:
    slow = [{**line, "seconds": 1.5} for line in history(4)]
    runs = [history(6, every=2), slow]
    places = {"round": [2, 4], "communication_rounds": [2, 4], "mib": [4, 8], "seconds": [2.0, 4.0]}
    for axis, at in places.items():  # seconds: mean of 1 and 3, of 2 and 6
        assert curve(runs, MetricKey("accuracy"), axis) == (at, [[0.02, 0.02], [0.04, 0.04]])


def test_a_round_that_diverged_is_left_out() -> None:
    lines = history(3)
    lines[1]["accuracy"] = math.nan
    assert curve([lines], MetricKey("accuracy"), "round") == ([1, 3], [[0.01], [0.03]])


def test_long_runs_are_thinned_evenly_with_first_and_last_round() -> None:
    rounds, _ = curve([history(10_000, every=7)], MetricKey("accuracy"), "round")
    assert (len(rounds), rounds[0], rounds[-1]) == (POINTS, 7, 9996)
    assert {later - earlier for earlier, later in itertools.pairwise(rounds)} <= {21, 28}
    assert thin(range(5), 5) == [0, 1, 2, 3, 4]


def test_traffic_and_seconds_are_no_measures() -> None:
    keys = list(map(str, measures(history(2, mean_iou=0.1, accuracy_sea=0.5))))
    assert keys == ["accuracy", "mean_iou", "accuracy_sea"]


# --- content ------------------------------------------------------------------


@pytest.mark.slow
def test_the_page_has_the_pictures_whose_files_exist(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "FedAvg")
    assert page_of(tmp_path).texts["h2"] == ["Results", "Pictures", "Curves", "Settings"]
    files = {
        "partition.json": {"title": "digits: iid", "classes": ["a", "b"], "counts": [[3, 0], [1, 2]], "clients": []},
        "clients.jsonl": [{"round": 3, "clients": {str(i): {"own_accuracy": i / 10} for i in range(11)}}],
    }
    write_run(tmp_path / "full", "FedBN", files=files, accuracy_sea=0.5)
    page = page_of(tmp_path)
    assert page.texts["h2"] == ["Results", "Pictures", "Curves", "Data of the clients", "Settings"]
    assert {"loss", "digits: iid", "accuracy, domain sea"} <= set(page.texts["summary"])
    assert "accuracy, by domain" in page.texts["caption"]


def test_a_picture_shows_the_values_and_has_a_name(tmp_path: Path) -> None:
    lines = [{"accuracy": a, "loss": 1.0, "accuracy_sea": 0.5} for a in (0.1, 0.7, 0.4)]
    write_run(tmp_path / "run", "FedAvg", lines=lines)
    curve, *_, domains = plot(rows_of(tmp_path)).axes
    assert curve.get_lines()[0].get_xydata().tolist() == [[1, 10], [2, pytest.approx(70)], [3, 40]]
    assert [dot.lines[0].get_ydata()[0] for dot in domains.containers] == [50, 50], "sea, and the average"
    pictures = [attributes for tag, attributes in page_of(tmp_path).tags if tag == "svg"]
    assert {attributes["role"] for attributes in pictures} == {"img"}
    assert {"accuracy, %, rounds", "loss, rounds, logarithmic scale"} <= {each["aria-label"] for each in pictures}


def test_the_middle_of_a_long_name_is_left_out_in_pictures() -> None:
    """Names of rows that differ in a swept value differ at their end."""
    found = [in_plot("a long name " * 9 + f"alpha={alpha}") for alpha in (0.1, 0.5)]
    assert [len(name) for name in found] == [60, 60]
    assert [name[-9:] for name in found] == ["alpha=0.1", "alpha=0.5"]


@pytest.mark.slow
def test_pictures_of_a_page_share_no_identity(tmp_path: Path) -> None:
    """An element that is defined in a closed part of the page would not be drawn elsewhere."""
    write_run(tmp_path / "run", "FedAvg", clients_own_accuracy=0.5)
    pictures = (page_of(tmp_path), (tmp_path / "page.html").read_text().split("<svg")[1:])[1]
    found = [set(re.findall(r' id="([^"]+)"', picture)) for picture in pictures]
    assert len(pictures) > 3
    assert len(set().union(*found)) == sum(map(len, found))
    for picture, known in zip(pictures, found, strict=True):
        assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', picture)) <= known


def test_colours_of_text_and_axes_are_those_of_the_page(tmp_path: Path) -> None:
    """Black and white of matplotlib, in the words that the style of the page replaces in a dark setting."""
    write_run(tmp_path / "run", "FedAvg")
    page_of(tmp_path)
    style, *pictures = (tmp_path / "page.html").read_text().split("<svg")
    replaced = re.findall(r'svg \[style\*="([^"]+)"\]', style)
    assert replaced == ["fill: #ffffff", "stroke: #000000", "fill: #000000"]
    assert all(words in pictures[0] for words in replaced[:2])


@pytest.mark.slow
def test_the_page_after_a_run_has_the_pictures_of_the_files(tmp_path: Path) -> None:
    """It draws no others."""
    counts = {"title": "digits: iid", "classes": ["a", "b"], "counts": [[3, 0], [1, 2]], "clients": []}
    write_run(tmp_path / "run", "FedAvg", files={"partition.json": counts})
    for whole, headings in ((False, ["Pictures"]), (True, ["Pictures", "Curves", "Data of the clients"])):
        write_report([tmp_path / "run"], tmp_path / "out", whole=whole)
        text = (tmp_path / "out" / "report.html").read_text()
        assert re.findall("<h2>(.*?)</h2>", text) == ["Results", *headings, "Settings"]
        assert text.count("<figure") == (1 if not whole else text.count("<svg"))
        assert text.count('class="wide"') == (not whole)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (None, ""),
        ({"counts": [[1, 2], [1]]}, "a client's counts are not one for each class"),
        ({"counts": [[1, 2, 3], [1, 2]]}, "a client's counts are not one for each class"),
        ({"clients": ["north"]}, "its clients have neither a name each nor none"),
    ],
)
def test_a_damaged_file_is_reported_by_name_and_so_is_a_ragged_partition(
    change: dict[str, Any] | None, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = {"title": "digits: iid", "classes": ["a", "b"], "counts": [[3, 0], [1, 2]], "clients": []}
    write_run(tmp_path / "run", "FedBN", files={"partition.json": whole | change if change else {}})
    file = tmp_path / "run" / "partition.json"
    file.write_text(file.read_text() if change else "{")
    error = refusal(capsys, "report", "--html", tmp_path, "--out", tmp_path / "out")
    assert f"partition.json': {reason}" in error


def test_a_picture_has_a_limit_of_classes() -> None:
    bars = (
        partitions_plot([PartitionCounts(title="few", classes=("a", "b"), counts=((3, 4), (1, 2)))]).axes[0].containers
    )
    assert [[(bar.get_y(), bar.get_height()) for bar in of_class] for of_class in bars] == [
        [(0, 3), (0, 1)],
        [(3, 4), (1, 2)],
    ]
    many = PartitionCounts(title="many", classes=tuple(map(str, range(200_000))), counts=((1,) * 200_000,))
    bars = partitions_plot([many]).axes[0].containers
    assert [bars[-1][0].get_height(), len(bars)] == [199_900, 101]


# --- hostile text -----------------------------------------------------------


def write_hostile(folder: Path) -> None:
    for number, label in enumerate(HOSTILE):
        files = {
            "partition.json": {"title": label, "classes": [label, "b"], "counts": [[1, number]], "clients": [label]},
            "clients.jsonl": [{"round": 3, "clients": {label: {"own_accuracy": 0.5}, "1": {"own_accuracy": 0.2}}}],
        }
        config = {"model": {"name": label}}
        write_run(folder / str(number), label, number, config=config, files=files, **{f"accuracy_{label}": 0.5})


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report on runs with hostile names."""
    folder = tmp_path_factory.mktemp("hostile")
    write_hostile(folder / "runs")
    with drawing():
        write_report([folder / "runs"], folder / "out")
    return folder


@pytest.mark.slow
def test_hostile_text_is_text_in_the_page(tmp_path: Path, hostile: Path) -> None:
    write_run(tmp_path / "plain", "FedAvg")
    known = {tag for tag, _ in page_of(tmp_path).tags}
    page = Page(hostile / "out" / "report.html")
    new = {tag for tag, _ in page.tags} - known
    assert not {"script", "img", "iframe", "object", "embed", "a"} & new
    assert "script" not in known
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
    links = [
        each for tag, of in page.tags if tag != "link" for name, each in of.items() if name.endswith(("src", "href"))
    ]
    assert not [each for each in links if not str(each).startswith(("#", "data:image/png;"))]
    labels = page.texts["bdi"]
    assert "<script>alert(1)</script>" in labels
    assert "{{data}} | \N{REPLACEMENT CHARACTER}[31m line" in labels


def test_markdown_and_terminal_show_text(hostile: Path) -> None:
    lines = table(rows_of(hostile / "runs"))
    marked = as_markdown(lines)
    assert len(marked.splitlines()) == 2 + len(HOSTILE), "a line break in a label would begin another row"
    assert all(len(re.findall(r"(?<!\\)\|", line)) == len(lines[0]) + 1 for line in marked.splitlines())
    assert not re.search(r"(?<!\\)[<$`]", marked)
    assert all(line.isprintable() for line in as_text(lines).splitlines())


# --- files ----------------------------------------------------------------------


@pytest.mark.slow
def test_the_page_has_a_limited_number_of_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of single domains, whose number clients decide, are the last ones."""
    monkeypatch.setattr("fedbn_flwr.results.report.pictures._CURVES", 2)
    domains = {f"clients_own_accuracy_{number}": 0.5 for number in range(3)}
    write_run(tmp_path / "one", "one", lines=[{**domains, "accuracy": 0.5, "loss": 1.0}])
    write_report([tmp_path], tmp_path / "page.html", only_page=True)
    named = page_of(tmp_path).texts["summary"]
    assert named[:2] == ["accuracy", "loss"]
    assert not [name for name in named if "domain" in name]


@pytest.mark.slow
def test_only_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "run", "FedAvg")
    assert cli.main(["report", "--html", str(tmp_path / "run"), "--out", str(tmp_path / "new" / "page.html")]) == 0
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["page.html"]
    assert f"page:  {tmp_path / 'new' / 'page.html'}" in capsys.readouterr().out
    assert cli.main(["report", "--html", str(tmp_path / "run"), "--out", str(tmp_path / "folder")]) == 0
    assert [file.name for file in (tmp_path / "folder").iterdir()] == ["report.html"]


@pytest.mark.slow
def test_equal_runs_give_equal_plots(tmp_path: Path) -> None:
    write_run(tmp_path / "run", "FedAvg")
    for name in ("one", "two"):
        write_report([tmp_path / "run"], tmp_path / name)
    assert (tmp_path / "one" / "report.svg").read_bytes() == (tmp_path / "two" / "report.svg").read_bytes()


@pytest.mark.slow
def test_ten_thousand_rounds_of_twenty_runs_fit_in_a_page(tmp_path: Path) -> None:
    write_run(tmp_path / "0", "0", lines=[{"accuracy": 0.5 + 1 / (i + 3), "loss": 1 / (i + 7)} for i in range(10_000)])
    text = (tmp_path / "0" / "summary.json").read_text()
    for number in range(1, 20):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "history.jsonl").hardlink_to(tmp_path / "0" / "history.jsonl")
        (folder / "summary.json").write_text(text.replace('"label": "0"', f'"label": "{number}"'))
    write_report([tmp_path], tmp_path / "page.html", only_page=True)
    assert (tmp_path / "page.html").stat().st_size < 10e6
    labels = Page(tmp_path / "page.html").texts["bdi"]
    assert {str(number) for number in range(20)} <= set(labels)
