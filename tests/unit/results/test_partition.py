"""The images of each client: their counts, the table, the picture, and the command that shows them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedbn_flwr.commands import cli
from fedbn_flwr.experiment.file.layers import load_experiment, parse_yaml, read_experiment
from fedbn_flwr.experiment.preview import count_partitions
from fedbn_flwr.results.folder.clients import PartitionCounts
from fedbn_flwr.results.report.pictures import class_colours, partitions_plot
from fedbn_flwr.results.report.tables import partition_table
from tests.support.refusals import refusal

SMALL = PartitionCounts(
    title="mine: iid, clients=2, seed=0", classes=("cat", "dog", "owl"), counts=((3, 0, 1), (0, 12, 0))
)


def test_the_table_counts_clients_and_classes() -> None:
    lines = [line.split() for line in partition_table(SMALL).splitlines()]
    assert lines[2] == ["client", "examples", "classes", "cat", "dog", "owl"]
    assert lines[4] == ["0", "4", "2", "3", ".", "1"]
    assert lines[5] == ["1", "12", "1", ".", "12", "."]
    assert lines[6] == ["all", "16", "3", "3", "12", "1"]
    assert "examples per client: 4 to 12, median 8" in partition_table(SMALL)


def test_many_classes_and_clients_are_summed_up() -> None:
    counts = tuple(tuple(100 + i if label == i else 1 for label in range(30)) for i in range(50))
    text = partition_table(PartitionCounts(title="many", classes=tuple(f"c{i}" for i in range(30)), counts=counts))
    assert text.splitlines()[2].split() == ["client", "examples", "classes"]
    assert "... and 10 more clients" in text
    assert max(map(len, text.splitlines())) < 80


@pytest.mark.parametrize("classes", [3, 10, 24, 25, 100])
def test_each_class_has_a_colour_of_its_own(classes: int) -> None:
    colours = np.array([colour[:3] for colour in class_colours(classes)])
    assert len(colours) == classes
    apart = np.abs(colours[:, None] - colours[None]).sum(2) + np.eye(classes)
    assert apart.min() > (0.1 if classes <= 24 else 0.005)


def test_a_bar_is_as_high_as_what_its_client_holds(tmp_path: Path) -> None:
    """Read from the picture: the second client's bar, all of the second class, is three times the first's."""
    partitions_plot([SMALL]).write(tmp_path / "held.png")
    picture = np.asarray(Image.open(tmp_path / "held.png").convert("RGB")).astype(int)
    colours = [np.rint(np.array(colour) * 255) for colour in class_colours(3)]
    # Columns of pixels that are bars: the legend's patches are far lower.
    heights = [np.sort((np.abs(picture - colour).sum(2) < 6).sum(0))[-20] for colour in colours]
    assert heights[1] == pytest.approx(4 * heights[0], rel=0.05)
    assert heights[0] == pytest.approx(3 * heights[2], rel=0.15)


def test_the_legend_has_every_class() -> None:
    figure = partitions_plot([SMALL.model_copy(update={"classes": ("_background", "cat", "dog")})])
    legend = figure.axes[0].get_legend()
    assert [text.get_text() for text in legend.get_texts()] == ["dog", "cat", "_background"]
    colours = [patch.get_facecolor() for patch in legend.get_patches()]
    assert colours == [(*colour, 1) for colour in reversed(class_colours(3))]


def test_runs_that_split_alike_share_a_table() -> None:
    held = count_partitions(load_experiment("demo"))
    assert len({item.title for item in held}) == len(held)
    text = "{clients: 3, runs: {a: {rounds: 1}, b: {data: {augment: [flip]}}, c: {clients: 2}}}"
    split_alike = count_partitions(read_experiment(parse_yaml(text)))
    assert [len(item.counts) for item in split_alike] == [3, 2]


def test_the_command_prints_the_table_and_writes_the_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plots" / "held.png"
    words = ["clients=5", "data.partition={kind: classes, classes_per_client: 2}"]
    assert cli.main(["partition", "quick", *words, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "digits: classes, classes_per_client=2, clients=5, seed=0" in printed
    rows = [line.split() for line in printed.splitlines() if line[:1].isdigit()]
    assert [row[2] for row in rows] == ["2"] * 5
    assert sum(int(row[1]) for row in rows) == 1438
    assert str(out) in printed
    assert Image.open(out).size[0] > 400


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["clients=2000"], "clients is 2000"),
        (["data.partition={kind: domain}"], "the data has no domains"),
        (["--out", "held.nosuchformat"], "the plot 'held.nosuchformat' has no known format"),
    ],
)
def test_what_cannot_be_shown_is_one_message(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert says in refusal(capsys, "partition", "quick", *words)
