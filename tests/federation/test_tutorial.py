"""The tutorial's commands and programs, in its order, in one folder."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.support.command import ROOT, fedbn

BLOCK = re.compile(r"^```(bash|yaml|python)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def test_the_tutorial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
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
                done = fedbn(*words, cwd=tmp_path)
                assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
                ran += 1
    assert ran == 9
    assert (tmp_path / "runs" / "python").is_dir()
