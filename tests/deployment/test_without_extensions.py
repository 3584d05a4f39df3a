"""The core's tests pass in a checkout from which all extensions are deleted."""

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
def test_the_core_works_without_extensions(tmp_path: Path) -> None:
    copy = tmp_path / "checkout"
    ignored = shutil.ignore_patterns(".git", ".venv", "__pycache__", "runs", ".mypy_cache", ".ruff_cache")
    shutil.copytree(ROOT, copy, ignore=ignored)
    if (shared := ROOT.parent / "shared").is_dir():
        (tmp_path / "shared").symlink_to(shared)
    for extension in pkgutil.iter_modules(extensions.__path__):
        shutil.rmtree(copy / "fedbn_flwr" / "extensions" / extension.name)
    words = [sys.executable, "-m", "pytest", "-q", "-n", "2", "tests/unit", "tests/federation"]
    # The pages of the extensions' strategies, the tables of their keys and the bundle's pattern for their tests go too.
    for documented in (
        "tests/unit/test_checks.py",
        "tests/unit/test_metadata.py::test_an_app_bundle_has_all_files_of_the_packages",
        "tests/unit/test_strategy_pages.py",
        "tests/federation/test_foreign.py::test_the_documented_keys_are_those_of_the_protocol",
    ):
        words += ["--deselect", documented]
    alone = environment(PYTHONPATH=str(copy))  # commands that the tests start import the copy too
    done = subprocess.run(words, cwd=copy, env=alone, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout[-5000:]
