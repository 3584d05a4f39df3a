"""The plug-in part works with every minor version of Flower that pyproject.toml allows, and gives the same models."""

from __future__ import annotations

import json
import re
import sys
import tomllib
from pathlib import Path

import pytest

from fedbn_flwr.internals import FOR_CLIENTS, FOR_EXPERIMENTS
from tests.support import other_flower
from tests.support.command import ROOT
from tests.support.packages import CLEAN, UV, needs_uv, run

# Otherwise the versions in constraints.txt
PYTORCH = {
    FOR_CLIENTS[0]: ("torch==2.6.*", "torchvision==0.21.*"),
    FOR_CLIENTS[1]: ("torch==2.8.*", "torchvision==0.23.*"),
    FOR_CLIENTS[-1]: ("torch", "torchvision"),
}


def test_what_may_be_installed_was_tested() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    page = (ROOT / "docs" / "versions.md").read_text(encoding="utf-8")
    assert f"flwr>=1.{FOR_CLIENTS[0]},<2" in project["dependencies"]
    assert f"flwr[simulation]>=1.{FOR_EXPERIMENTS[0]},<1.{FOR_EXPERIMENTS[-1] + 1}" in extras["run"]
    tested = f"1.{FOR_CLIENTS[0]} to 1.{FOR_CLIENTS[-1]} | 1.{FOR_EXPERIMENTS[0]} and 1.{FOR_EXPERIMENTS[-1]} |"
    assert f"| Flower | {tested}" in page
    assert {*re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)} == {*extras}


@pytest.mark.slow
def test_flowers_simulation_gives_the_model_of_the_local_engine_here(tmp_path: Path) -> None:
    expected = other_flower.on_the_local_engine()
    assert len({*expected.values()}) == len(other_flower.STRATEGIES)
    printed = run(sys.executable, Path(other_flower.__file__), cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert json.loads(re.findall(r"^{.*}$", printed, re.MULTILINE)[0]) == expected


@pytest.mark.nightly
@needs_uv
@pytest.mark.parametrize("minor", FOR_CLIENTS)
def test_flowers_simulation_gives_the_model_of_the_local_engine(minor: int, wheel: Path, tmp_path: Path) -> None:
    python = tmp_path / "env" / "bin" / "python"
    run(str(UV), "venv", "--python", sys.executable, tmp_path / "env", cwd=tmp_path)
    torch = PYTORCH.get(minor, re.findall(r"^torch.*", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    run(str(UV), "pip", "install", "-p", python, f"flwr[simulation]==1.{minor}.*", *torch, wheel, cwd=tmp_path)

    def digests(*options: str) -> dict[str, str]:
        program = [python, Path(other_flower.__file__), *options]
        printed = run(*program, cwd=tmp_path, FLWR_HOME=str(tmp_path / "home"), **CLEAN)
        (found,) = re.findall(r"^{.*}$", printed, re.MULTILINE)
        return dict(json.loads(found))

    # The newest PyTorch rounds otherwise than this environment's.
    assert digests() == (digests("--local") if minor in FOR_EXPERIMENTS else other_flower.on_the_local_engine())
