"""Format, lint and types, and what the README promises of its own commands."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command import PATIENCE, ROOT

HERE = Path(sys.executable).parent


CHECKS = [
    "ruff check .",
    "ruff format --check .",
    "mypy",
    "python tools/prose.py",
    "python tools/tables.py --check",
    "mkdocs build --strict",
    "check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/checks.yml "
    ".github/workflows/nightly.yml .github/workflows/publish.yml",
    "zizmor --offline --quiet .github/workflows",
    "check-jsonschema --builtin-schema vendor.citation-file-format CITATION.cff",
]


@pytest.mark.parametrize("command", CHECKS)
def test_sources_are_clean(command: str, tmp_path: Path) -> None:
    words = command.split()
    tool = shutil.which(words[0], path=str(HERE))
    if tool is None:
        pytest.skip(f"{words[0]} is not installed (pip install '.[dev]')")
    if words[0] == "mkdocs":
        words += ["--site-dir", str(tmp_path)]
    done = subprocess.run([tool, *words[1:]], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr


def test_quick_start_has_two_commands_of_one_line_each() -> None:
    section = (ROOT / "README.md").read_text().split("## Quick start", 1)[1].split("\n## ", 1)[0]
    blocks = re.findall(r"```\w*\n(.*?)```", section, flags=re.DOTALL)
    assert len(blocks) == 2
    assert all(block.strip().count("\n") == 0 for block in blocks)
    assert blocks[0].endswith(".venv/bin/fedbn run demo\n")
    assert "pytest" in blocks[1]


def test_every_promised_name_can_be_imported() -> None:
    import fedbn_flwr
    from fedbn_flwr import strategies
    from fedbn_flwr.extensions import declared

    assert sorted(set(fedbn_flwr.__all__)) == sorted(fedbn_flwr.__all__)
    for name in fedbn_flwr.__all__:
        assert getattr(fedbn_flwr, name) is not None
    assert set(strategies.STRATEGIES) == {
        "FedAvg", "FedProx", "Scaffold", "FedBN", "SiloBN", "FedBS", "FixBN", "FedTAN", "FedTANII",
        "FedAvgGlobalStats", "HeteroBN", "FedWon", "GlobalMomentum", "MeanStatistics", "Standalone",
        *declared("strategies"),
    }  # fmt: skip
    for name, rule in strategies.STRATEGIES.items():
        assert getattr(strategies, name) is rule


def test_strategies_have_one_identity_whichever_way_they_are_imported() -> None:
    from fedbn_flwr.strategies.fixbn import FixBN as Same  # type: ignore[import-untyped]

    from fedbn_flwr.strategies import FixBN

    assert FixBN is Same
