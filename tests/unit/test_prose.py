"""The check of the prose finds what it claims to find; tools/prose.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command import PATIENCE, ROOT

# In pieces, as this file is checked too.
WORD = "".join(("lever", "aged"))
PHRASE = "-".join(("state", "of", "the", "art"))


def hits(file: Path, text: str) -> list[str]:
    file.write_text(text, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "prose.py"), str(file)], capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == (1 if done.stdout else 0), done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("a.py", '"""A module."""\n\n\ndef f() -> None:\n    """Begin ' + WORD + '."""\n', 5),
        ("a.py", f"x = 1  # kept {PHRASE}\n", 1),
        ("a.py", 'raise ValueError(f"{1} is\\n ' + WORD + '")\n', 1),
        ("a.md", "One.\n\nTwo are " + PHRASE + ".\n", 3),
        ("a.yaml", f"a: 1  # {WORD}\n", 1),
    ],
)
def test_prose_is_checked(tmp_path: Path, name: str, text: str, line: int) -> None:
    (hit,) = hits(tmp_path / name, text)
    assert f"{name}:{line}:" in hit


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.py", f"{WORD} = 1\n"),
        ("a.md", f"Use `{WORD}`.\n\n```\n{WORD}\n```\n"),
        ("a.yaml", f"{WORD}: 1\n"),
    ],
)
def test_code_is_not_prose(tmp_path: Path, name: str, text: str) -> None:
    assert hits(tmp_path / name, text) == []
