"""The page of a report in Chromium, at the widths of a computer and a phone, light and dark, open, closed and printed.

axe-core looks for what keeps people with a screen reader or without a mouse from reading it. Node drives Chromium with
packages that npm installs into a temporary folder.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from fedbn_flwr.commands import cli
from tests.support.command import PATIENCE, ROOT

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3600), pytest.mark.usefixtures("pictures")]

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PACKAGES = ("puppeteer-core@24", "axe-core@4")

# Fifteen curves, names that are long or have other scripts, and a strategy that diverges after the first round.
SWEEP = """
rounds: 3
clients: 3
data: {name: digits, partition: {kind: dirichlet, alpha: 0.5}}
model: {name: mlp, norm: bn}
train: {lr: 0.05, batch_size: 32, steps: 1}
evaluate: {clients: true}
sweep: {data.partition.alpha: [0.1, 0.5, 5.0]}
runs:
  FedAvg: {strategy: {name: FedAvg}}
  FixBN: {strategy: {name: FixBN, freeze_round: 2}}
  FedBN: {strategy: {name: FedBN}}
  Größe, ein sehr langer Name eines Verfahrens mit vielen Wörtern (FedAvg+GN): {model: {norm: gn}}
  diverges: {model: {norm: none}, train: {lr: 1.0e+38}}
"""


def carry_out(experiment: str | Path, *words: str, out: Path) -> None:
    """With the code 1 if a run failed."""
    assert cli.main(["run", str(experiment), *words, "--out", str(out)]) in (0, 1)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the program that looks at a page, and its packages."""
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed")
    if shutil.which("npm") is None:
        pytest.skip("npm, which installs axe-core, is not installed")
    folder = tmp_path_factory.mktemp("node")
    (folder / "package.json").write_text("{}")
    done = subprocess.run(["npm", "install", *PACKAGES], cwd=folder, capture_output=True, text=True, timeout=PATIENCE)
    if done.returncode:
        pytest.skip(f"npm cannot install {', '.join(PACKAGES)}: {done.stderr[-300:]}")
    shutil.copy(ROOT / "tests" / "support" / "browser.cjs", folder)
    return folder


def faults(node: Path, page: Path) -> dict[str, list[str]]:
    command = ["node", str(node / "browser.cjs"), str(CHROMIUM), str(page)]
    done = subprocess.run(command, cwd=node, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    return {view: found for view, found in json.loads(done.stdout).items() if found}


def test_the_page_of_the_demo(node: Path, tmp_path: Path) -> None:
    carry_out("demo", "rounds=8", "seeds=[0, 1]", "evaluate.clients=true", out=tmp_path / "out")
    assert faults(node, tmp_path / "out" / "report.html") == {}


def test_the_page_of_a_sweep_with_fifteen_curves_some_of_which_diverged(node: Path, tmp_path: Path) -> None:
    assert len(yaml.safe_load(SWEEP)["runs"]) == 5
    (tmp_path / "sweep.yaml").write_text(SWEEP)
    carry_out(tmp_path / "sweep.yaml", out=tmp_path / "out")
    page = tmp_path / "out" / "report.html"
    assert "diverged in round 2" in page.read_text()
    assert faults(node, page) == {}


def test_a_fault_is_found(node: Path, tmp_path: Path) -> None:
    """A page without a title that is too wide, and a number that wraps."""
    (tmp_path / "page.html").write_text('<p style="width: 2000px">.<p style="width: 1em">78.55% ± 1.47')
    found = faults(node, tmp_path / "page.html")
    assert found.keys() == {"1280 light", "1280 dark", "390 light", "390 dark", "print"}
    assert {"wraps: 78.55% ± 1.47"} <= set(found["390 light"]) & set(found["print"])
    assert any(fault.startswith("document-title") for fault in found["1280 dark"])
