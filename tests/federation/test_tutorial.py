"""The tutorial's commands and programs, in its order, in one folder."""

from __future__ import annotations

import re
import shlex
import statistics
from pathlib import Path

import pytest

from fedbn_flwr import cli
from fedbn_flwr.results.result import Results
from tests.support.command import ROOT

BLOCK = re.compile(r"^```(bash|yaml|python)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def test_the_tutorial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDBN_OUT", raising=False)
    ran = 0
    for kind, text in BLOCK.findall((ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")):
        if kind == "yaml":
            (tmp_path / "compare.yaml").write_text(text)
        elif kind == "python":
            exec(compile(text, "tutorial.md", "exec"), {"__name__": "tutorial"})
        else:
            for line in text.splitlines():
                command, *words = shlex.split(line)
                assert command == "fedbn"
                assert cli.main(words) == 0, line
                ran += 1
    assert ran == 9
    rows: dict[str, list[float]] = {}
    for result in Results.read("runs/compare"):
        rows.setdefault(result.label, []).append(result.summary.accuracy or 0.0)
    found = {label: statistics.mean(each) for label, each in rows.items()}
    # The page's figures; last bits, and so single images, depend on the processor.
    assert found == pytest.approx({"FedAvg+BN": 0.78, "FixBN": 0.93, "FedTAN": 0.92}, abs=0.03)
    assert (tmp_path / "runs" / "python").is_dir()
