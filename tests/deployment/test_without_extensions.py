"""The core's tests pass in a checkout from which an extension is deleted, whichever it is."""

from __future__ import annotations

import pkgutil
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fedbn_flwr import extensions
from tests.support.command import ROOT, environment

PATIENCE = 5400  # seconds: all unit and federation tests


@pytest.mark.nightly
@pytest.mark.timeout(PATIENCE + 60)
@pytest.mark.parametrize("name", [module.name for module in pkgutil.iter_modules(extensions.__path__)])
def test_the_core_works_without(name: str, tmp_path: Path) -> None:
    copy = tmp_path / "checkout"
    ignored = shutil.ignore_patterns(".git", ".venv", "__pycache__", "runs", ".mypy_cache", ".ruff_cache")
    shutil.copytree(ROOT, copy, ignore=ignored)
    if (shared := ROOT.parent / "shared").is_dir():
        (tmp_path / "shared").symlink_to(shared)
    shutil.rmtree(copy / "fedbn_flwr" / "extensions" / name)
    words = [sys.executable, "-m", "pytest", "-q", "-n", "2", "tests/unit", "tests/federation"]
    # The pages of an extension's strategies and the tables of its keys go with it.
    for documented in (
        "tests/unit/test_checks.py",
        "tests/unit/test_strategy_pages.py",
        "tests/federation/test_foreign.py::test_the_documented_keys_are_those_of_the_protocol",
    ):
        words += ["--deselect", documented]
    done = subprocess.run(words, cwd=copy, env=environment(), capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout[-5000:]
