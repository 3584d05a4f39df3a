"""Environments for the rivals, whose requirements fit neither one another nor this library's."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

PYTHON = "3.11"  # the newest that JAX 0.4.25, fedjax's, and all the others were tried with
HERE = Path(__file__).parent


def python_of(rival: str, folder: Path) -> Path:
    """The interpreter of a rival's environment in `folder`, which is made where it is absent or not current."""
    environment, requirements = (folder / rival).absolute(), HERE / f"{rival}.txt"
    python, installed = environment / "bin" / "python", environment / "requirements.txt"
    if not installed.exists() or installed.read_bytes() != requirements.read_bytes():
        print(f"installing {rival} in {folder / rival}", file=sys.stderr, flush=True)
        _install(environment, python, requirements)
        shutil.copy(requirements, installed)  # last: it says that all are installed
    return python


def _install(environment: Path, python: Path, requirements: Path) -> None:
    shutil.rmtree(environment, ignore_errors=True)
    places = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    if uv := shutil.which("uv", path=places):
        commands = [
            [uv, "venv", "--quiet", "--python", PYTHON, environment],
            [uv, "pip", "install", "--quiet", "--python", python, "-r", requirements],
        ]
    else:
        found = shutil.which(f"python{PYTHON}") or sys.executable
        commands = [
            [found, "-m", "venv", environment],
            [python, "-m", "pip", "install", "--quiet", "-r", requirements],
        ]
    for command in commands:
        subprocess.run([str(word) for word in command], check=True)
