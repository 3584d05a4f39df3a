"""The experiments and commands of the guides, and the experiments of results; other tests carry out single pages."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from fedbn_flwr.commands import cli
from fedbn_flwr.experiment.file.content import shipped_experiments
from fedbn_flwr.experiment.file.layers import load_experiment
from fedbn_flwr.experiment.run.launch import carry_out
from fedbn_flwr.experiment.settings import name_in
from fedbn_flwr.results.folder.writer import RunFolder
from fedbn_flwr.results.several import Results
from tests.support.command import ROOT
from tests.support.pages import BLOCK, Page

GUIDES = ("experiments", "sweeps", "clients", "watching", "report", "run-folder", "data")
BLOCKS = [
    (guide, kind, text)
    for guide in GUIDES
    for kind, text in BLOCK.findall((ROOT / "docs" / f"{guide}.md").read_text(encoding="utf-8"))
]


RESULTS = ROOT / "docs" / "results"


@pytest.mark.parametrize(("guide", "text"), [(guide, text) for guide, kind, text in BLOCKS if kind == "yaml"])
def test_the_experiments_of_a_guide_are_valid(guide: str, text: str) -> None:
    first, *others = load_experiment(text).runs
    assert {name_in(each) for run in (first, *others) for each in run.track} <= {"tensorboard", "trackers:WandB"}


@pytest.mark.parametrize("file", sorted(RESULTS.glob("*/**/*.yaml")), ids=lambda file: str(file.relative_to(RESULTS)))
def test_an_experiment_kept_beside_its_results_is_accepted(file: Path) -> None:
    assert load_experiment(str(file)).runs


@pytest.mark.parametrize(
    ("guide", "line"),
    [
        (guide, line)
        for guide, kind, text in BLOCKS
        if kind == "bash"
        for line in text.splitlines()
        if line.startswith("fedbn ")
    ],
)
def test_the_commands_of_a_guide_are_understood(guide: str, line: str) -> None:
    """Those that name an experiment also with their changes; a file is the page's first block of YAML."""
    arguments = cli.parser().parse_args(shlex.split(line, comments=True)[1:])
    assert callable(arguments.command)
    experiment = getattr(arguments, "experiment", None)
    if str(experiment).endswith(".yaml"):
        experiment = next(text for page, kind, text in BLOCKS if (page, kind) == (guide, "yaml"))
    if experiment is None or "model.nrm" in line:  # the page shows its error, see below
        return
    assert experiment in shipped_experiments() or "\n" in experiment
    assert load_experiment(experiment, arguments.overrides).runs


def test_data_shows_what_becomes_of_the_columns_of_its_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [f"{40 + n},{120.5 + n},{'fm'[n % 2]},{'abcd'[n % 4]},{('no', 'yes')[n % 3 % 2]}" for n in range(60)]
    Path("patients.csv").write_text("\n".join(["age,bp,sex,site,diagnosis", *rows]) + "\n")
    page = Page(ROOT / "docs" / "data.md")
    ((text, shown),) = [(text, shown) for kind, text, shown in page.blocks() if kind == "yaml" and shown]
    Path("patients.yaml").write_text(text)
    page.command("fedbn explain patients.yaml", shown)


@pytest.mark.slow
def test_a_lower_rate_after_the_freeze_costs_fixbn_two_points_on_the_page_of_experiments(tmp_path: Path) -> None:
    text = next(text for guide, kind, text in BLOCKS if (guide, kind) == ("experiments", "yaml"))
    (change,) = (line.split()[4] for _, _, line in BLOCKS if "schedule.switch" in line)
    for name, changes in (("kept", []), ("lower", [change])):
        carry_out(load_experiment(text, ["only=FixBN", "engine.device=cpu", *changes]), tmp_path / name, resume=False)
    kept, lower = (Results.read(tmp_path / name)[0].summary.accuracy or 0 for name in ("kept", "lower"))
    assert 0.01 < kept - lower < 0.04


def test_watching_shows_the_figures_that_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = Page(ROOT / "docs" / "watching.md").text
    (line,) = re.findall(r"^fedbn (run .*dynamics.*)$", page, re.MULTILINE)
    assert cli.main([*shlex.split(line), "engine.workers=0"]) == 0
    (folder,) = re.findall(r"^tail -n 1 (.*)/norms.jsonl$", page, re.MULTILINE)
    found = RunFolder(Path(folder)).lines("norms.jsonl")[-1]
    (shown,) = (json.loads(text) for guide, kind, text in BLOCKS if (guide, kind) == ("watching", "json"))
    assert shown.keys() == found.keys()
    pairs = [(each["layers"]["bn1"], each["clients"]["0"]["bn1"]) for each in (found, shown)]
    for now, then in zip(*pairs, strict=True):
        assert now == pytest.approx(then, rel=0.3)
        assert all(f"| `{figure}` |" in page for figure in then)


@pytest.mark.slow
@pytest.mark.parametrize(("guide", "count"), [("experiments", 2), ("sweeps", 1)])
def test_a_guide_prints_what_it_shows(guide: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page says under which name its first experiment is saved."""
    monkeypatch.chdir(tmp_path)
    page, ran = Page(ROOT / "docs" / f"{guide}.md"), 0
    (name,) = re.findall(r"Save this (?:one )?as `(\w+\.yaml)`", " ".join(page.text.split()))
    for kind, text, shown in page.blocks():
        if kind == "yaml" and not Path(name).exists():
            Path(name).write_text(text)
        elif kind == "bash" and shown:
            ran += page.command(text, shown)
    assert ran == count
