"""The commands of a results page repeat the runs of its sets; a comment names the sets."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import measured
import pytest
import results

from fedbn_flwr.commands import cli
from fedbn_flwr.commands.common import overrides_of
from fedbn_flwr.experiment.file.layers import load_experiment
from fedbn_flwr.experiment.settings import Settings
from tests.support.command import ROOT
from tests.support.pages import BLOCK

NOT_EXPERIMENTS = {"fixbn/lenet-rate": "begins from the models of another set"}
REFUSED = {"domains/batches": "FedAvg+BRN"}  # is batch norm there, which is an error by now, and in no table
GONE = "FedAP"  # pages name the last commit that has it


class Command(NamedTuple):
    folder: Path
    line: str
    sets: tuple[str, ...]


def commands(page: Path) -> Iterator[Command]:
    """Those of the page's blocks, and one for each linked file of settings."""
    content = page.read_text(encoding="utf-8")
    places = ["", *(f"{name}/" for name in re.findall(r"<!-- table: sets (\w+) -->", content))]
    for kind, text in BLOCK.findall(content):
        folder = ROOT
        for line in re.sub(r" *\\\n *", " ", text).splitlines() if kind == "bash" else ():
            where, _, line = line.rpartition(" && ")
            folder = ROOT / where.removeprefix("cd ") if where else folder
            if line.startswith("fedbn run "):
                words = re.findall(r"[^\s,:]+", line.partition(" # ")[2])
                named = (f"{place}{word}" for word in words for place in places)
                found = tuple(each for each in named if (results.RESULTS / each / "report.json").is_file())
                yield Command(folder, line, found)
    for name, file in re.findall(r"\]\(([\w/.-]+)/(settings[\w-]*\.yaml)\)", content):
        yield Command(results.RESULTS / name, f"fedbn run {file}", (name,))


COMMANDS = [command for page in sorted(results.RESULTS.glob("*.md")) for command in commands(page)]
SETS = sorted(file.parent.relative_to(results.RESULTS).as_posix() for file in results.RESULTS.rglob("report.json"))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SETS if name not in NOT_EXPERIMENTS])
def test_the_commands_for_a_set_repeat_its_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With their settings, rounds and seeds. Rows that weren't measured may be trained too, but no other conditions."""
    papers: dict[tuple[str, int], Settings] = {}
    for command in (each for each in COMMANDS if name in each.sets):
        monkeypatch.chdir(command.folder)
        arguments = cli._parsed(shlex.split(command.line, comments=True)[1:])
        papers |= {
            (run.label, run.seed): run for run in load_experiment(arguments.experiment, overrides_of(arguments)).runs
        }
    raw = {(run.label, run.seed): run.settings for run in results.read(name)}
    raw = {key: settings for key, settings in raw.items() if key[0].partition(", ")[0] not in (REFUSED.get(name), GONE)}
    assert sorted(raw.keys() - papers.keys()) == [], f"say in a comment which command repeats them: # {name}"
    for key, settings in raw.items():
        assert (key, measured.differing(papers[key], settings)) == (key, set())
        assert papers[key].rounds == settings["rounds"]
    rows, labels = {label.partition(", ")[0] for label, _ in raw}, {label for label, _ in raw}
    assert {label for label, _ in papers if label.partition(", ")[0] in rows} <= labels
    assert {seed for _, seed in papers} == {seed for _, seed in raw}
