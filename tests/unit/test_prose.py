"""The check of the prose finds what it claims to find; tools/prose.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command import ROOT


def hits(file: Path, text: str) -> list[str]:
    file.write_text(text, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "prose.py"), str(file)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == (1 if done.stdout else 0), done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("a.py", '"""A module."""\n\n\ndef f() -> None:\n    """Whoever calls it."""\n', 5),
        ("a.py", "x = 1  # kept at home\n", 1),
        ("a.py", 'raise ValueError(f"{1} is\\n told")\n', 1),
        ("a.md", "One.\n\nTwo lies\nin a file.\n", 3),
        ("a.yaml", "a: 1  # anew\n", 1),
    ],
)
def test_prose_is_checked(tmp_path: Path, name: str, text: str, line: int) -> None:
    (hit,) = hits(tmp_path / name, text)
    assert f"{name}:{line}:" in hit


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.py", "alone = told = 1\n"),
        ("a.md", "Use `alone`.\n\n```\nnobody\n```\n"),
        ("a.yaml", "alone: 1\n"),
    ],
)
def test_code_is_not_prose(tmp_path: Path, name: str, text: str) -> None:
    assert hits(tmp_path / name, text) == []
