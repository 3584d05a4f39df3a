"""A feature whose package is not installed names the extra that installs it."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from fedbn_flwr.engines import grid
from tests.support.command import PATIENCE, environment

# Makes `import NAME` fail as if the package were not installed, then runs the command.
PROGRAM = "import sys; sys.modules[sys.argv[1]] = None; from fedbn_flwr.cli import main; sys.exit(main(sys.argv[2:]))"


def fedbn_without(package: str, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM, package, *words]
    return subprocess.run(command, cwd=cwd, env=environment(), capture_output=True, text=True, timeout=PATIENCE)


@pytest.mark.parametrize(
    ("package", "arguments", "extra"),
    [
        ("datasets", ("run", "quick", "data.name={folder}"), "data"),
        ("flwr_datasets", ("partition", "quick", "data.partition={{kind: dirichlet, alpha: 0.5}}"), "hub"),
        ("matplotlib", ("partition", "quick", "data.partition={{kind: iid}}", "--out", "{folder}/plot.png"), "report"),
    ],
)
def test_a_missing_package(package: str, arguments: tuple[str, ...], extra: str, tmp_path: Path) -> None:
    words = [word.format(folder=tmp_path) for word in arguments]
    done = fedbn_without(package, *words, cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    reason = f"needs the package '{package}[a-z.]*', which is not installed: pip install 'fedbn-flwr\\[{extra}\\]'"
    assert re.fullmatch(f"fedbn: error: [^(]+ {reason}\n", done.stderr), done.stderr


def test_a_run_without_matplotlib_has_a_table_and_a_page(tmp_path: Path) -> None:
    experiment = ["quick", "rounds=2", "strategy={name: FedBN}", "data.partition={kind: iid}"]
    options = ["evaluate.matrix=true", "evaluate.dynamics=true", "--out", str(tmp_path / "out")]
    done = fedbn_without("matplotlib", "run", *experiment, *options, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("no plots"))
    assert line == (
        "no plots: a plot needs the package 'matplotlib', which is not installed: pip install 'fedbn-flwr[report]'"
    )
    names = {file.name for file in (tmp_path / "out").rglob("*.*")}
    assert names >= {"report.md", "report.html", "report.json", "matrix.json", "norms.jsonl", "model.safetensors"}
    assert not any(name.endswith((".png", ".svg")) for name in names)


def test_the_local_engine_names_the_version_of_flower_that_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Path(grid.__file__).read_text(encoding="utf-8")
    version = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "1.38.0" if name == "flwr" else version(name))
    with pytest.raises(
        ImportError, match=r"internals of Flower 1\.41, found 1\.38\.0: pip install 'fedbn-flwr\[run\]'"
    ):
        exec(compile(source, grid.__file__, "exec"), {"__name__": grid.__name__, "__package__": grid.__package__})
