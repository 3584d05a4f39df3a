"""The examples of docs/watching.md, as they are in the page."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from fedbn_flwr import cli
from fedbn_flwr.experiment.file.layers import load_experiment
from fedbn_flwr.experiment.file.types import name_in
from fedbn_flwr.results.folder import RunFolder
from tests.support.command import ROOT
from tests.support.experiments import read

PAGE = (ROOT / "docs" / "watching.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)


COMMANDS = [line for block in blocks("bash") for line in block.splitlines() if line.startswith("fedbn run ")]


@pytest.mark.parametrize("text", blocks("yaml"))
def test_the_settings_are_read(text: str) -> None:
    assert {*map(name_in, read(text).track)} <= {"tensorboard", "trackers:WandB"}


@pytest.mark.parametrize("line", COMMANDS)
def test_the_commands_are_understood(line: str) -> None:
    arguments = cli.parser().parse_args(shlex.split(line)[1:])
    (run,) = load_experiment(arguments.experiment, arguments.overrides).runs
    assert run.evaluate.dynamics or run.track


def test_the_line_has_the_figures_that_are_recorded(tmp_path: Path) -> None:
    words = ["rounds=3", "clients=2", "strategy={name: FedAvg}", "engine.workers=0", "evaluate.dynamics=true"]
    assert cli.main(["run", "quick", *words, "--out", str(tmp_path)]) == 0
    found = RunFolder(tmp_path / "FedAvg").lines("norms.jsonl")[-1]
    (shown,) = map(json.loads, blocks("json"))
    assert shown.keys() == found.keys()
    assert shown["layers"]["bn1"].keys() == found["layers"]["bn1"].keys()
    assert shown["clients"]["0"]["bn1"].keys() == found["clients"]["0"]["bn1"].keys()
    for figure in (*shown["layers"]["bn1"], *shown["clients"]["0"]["bn1"]):
        assert f"| `{figure}` |" in PAGE
