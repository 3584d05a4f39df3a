"""Our wheel, and a clean environment that has it installed; used by fixtures.py."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command import PATIENCE, ROOT, environment

UV = shutil.which("uv", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))

needs_uv = pytest.mark.skipif(UV is None, reason="uv is not installed (pip install uv)")

CLEAN = {"PYTHONPATH": ""}  # the environment's own packages, not this checkout


def run(*words: str | Path, cwd: Path, **more: str) -> str:
    done = subprocess.run(
        list(map(str, words)), cwd=cwd, env=environment(**more), capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(str(UV), "build", "--wheel", "--out-dir", folder, ROOT, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def clean_environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of an environment that has only our wheel with its extra `run`."""
    folder = tmp_path_factory.mktemp("clean") / "env"
    run(str(UV), "venv", "--python", sys.executable, folder, cwd=folder.parent)
    run(str(UV), "pip", "install", "-p", folder / "bin" / "python", f"{wheel}[run]", cwd=folder.parent)
    return folder / "bin"
