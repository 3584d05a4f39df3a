"""The examples of docs/watching.md, as they are in the page."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from fedbn_flwr import cli
from fedbn_flwr.experiment.settings import name_in
from fedbn_flwr.results.folder.writer import RunFolder
from tests.support.command import ROOT
from tests.support.experiments import read

PAGE = (ROOT / "docs" / "watching.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)


COMMANDS = [line for block in blocks("bash") for line in block.splitlines() if line.startswith("fedbn run ")]


@pytest.mark.parametrize("text", blocks("yaml"))
def test_the_settings_are_read(text: str) -> None:
    assert {*map(name_in, read(text).track)} <= {"tensorboard", "trackers:WandB"}


def test_the_line_has_the_figures_that_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (line,) = (each for each in COMMANDS if "dynamics" in each)
    assert cli.main([*shlex.split(line)[1:], "engine.workers=0"]) == 0
    (folder,) = re.findall(r"^tail -n 1 (.*)/norms.jsonl$", PAGE, re.MULTILINE)
    found = RunFolder(Path(folder)).lines("norms.jsonl")[-1]
    (shown,) = map(json.loads, blocks("json"))
    assert shown.keys() == found.keys()
    pairs = [(each["layers"]["bn1"], each["clients"]["0"]["bn1"]) for each in (found, shown)]
    for now, then in zip(*pairs, strict=True):
        assert now == pytest.approx(then, rel=0.3)
        assert all(f"| `{figure}` |" in PAGE for figure in then)
