"""The plug-in part works with every minor version of Flower that pyproject.toml allows, and gives the same models."""

from __future__ import annotations

import json
import re
import sys
import tomllib
from pathlib import Path

import pytest

from tests.support import other_flower
from tests.support.command import ROOT
from tests.support.packages import CLEAN, UV, needs_uv, run

OLDEST, NEWEST = 26, 42
LOCAL = (41, 42)  # those of the local engine
# The oldest versions of PyTorch are tried with the oldest Flower, and the newest ones with the newest.
PYTORCH = {
    OLDEST: ("torch==2.6.*", "torchvision==0.21.*"),
    OLDEST + 1: ("torch==2.8.*", "torchvision==0.23.*"),
    NEWEST: ("torch>=2.15", "torchvision>=0.29"),
}


def test_the_range_is_that_of_the_package() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'"flwr>=1.{OLDEST},<2"' in text
    assert '"torch>=2.6"' in text
    page = (ROOT / "docs" / "versions.md").read_text(encoding="utf-8")
    assert (
        f"| Flower | 1.{OLDEST} to 1.{NEWEST} tested; later ones install too | "
        f"1.{LOCAL[0]} and 1.{LOCAL[1]}; the extra `run` "
    ) in page
    assert "| PyTorch | 2.6 or later |" in page
    extras = tomllib.loads(text)["project"]["optional-dependencies"]
    assert '"flwr[simulation]>=1.41,<1.42"' in text
    assert {*re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)} == {*extras}


def test_the_program_trains_here() -> None:
    assert len({*other_flower.on_the_local_engine().values()}) == len(other_flower.STRATEGIES)


@pytest.mark.nightly
@needs_uv
@pytest.mark.parametrize("minor", range(OLDEST, NEWEST + 1))
def test_flowers_simulation_gives_the_model_of_the_local_engine(minor: int, wheel: Path, tmp_path: Path) -> None:
    python = tmp_path / "env" / "bin" / "python"
    run(str(UV), "venv", "--python", sys.executable, tmp_path / "env", cwd=tmp_path)
    torch = PYTORCH.get(minor, ("torch>=2.11,<2.13", "torchvision>=0.26,<0.28"))
    run(str(UV), "pip", "install", "-p", python, f"flwr[simulation]==1.{minor}.*", *torch, wheel, cwd=tmp_path)

    def digests(*options: str) -> dict[str, str]:
        program = [python, Path(other_flower.__file__), *options]
        printed = run(*program, cwd=tmp_path, FLWR_HOME=str(tmp_path / "home"), **CLEAN)
        (found,) = re.findall(r"^{.*}$", printed, re.MULTILINE)
        return dict(json.loads(found))

    # The newest PyTorch rounds otherwise than this environment's.
    assert digests() == (digests("--local") if minor in LOCAL else other_flower.on_the_local_engine())
