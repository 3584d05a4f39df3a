"""A feature whose package is not installed names the extra that installs it."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import yaml

from fedbn_flwr import internals
from fedbn_flwr.errors import MissingPackage, install
from tests.support.command import PATIENCE, ROOT, environment, python
from tests.support.marks import slow_except
from tests.support.runs import write_run

# Makes `import NAME` fail as if the package were not installed, then runs the command.
PROGRAM = """
import sys

package = sys.argv[1]
for name in [package, *(name for name in sys.modules if name.startswith(package + "."))]:
    sys.modules[name] = None
from fedbn_flwr.commands.cli import main
sys.exit(main(sys.argv[2:]))
"""

# The commands that need a package, with its extra and what they print before they end.
CASES = [
    ("datasets", "data", "", ["run", "quick", "data=mnist"]),
    ("matplotlib", "report", "\nclient  examples  classes", ["partition", "quick", "data.partition=iid"]),
    ("scipy", "report", "", ["report", "runs", "--baseline", "a"]),
    ("ray", "run", "", ["run", "quick", "--engine", "ray"]),
    ("ray", "run", "", ["flwr", "run", str(ROOT), "--engine", "ray"]),
    ("tensorboard", "tensorboard", "", ["run", "quick", "track=tensorboard"]),
    ("segmentation_models_pytorch", "segmentation", "", ["explain", "quick", "model=deeplabv3plus_resnet50"]),
]


def fedbn_without(package: str, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return python(PROGRAM, package, *words, cwd=cwd)


@pytest.mark.parametrize(("package", "extra", "printed", "words"), slow_except(["matplotlib"], CASES))
def test_a_missing_package(package: str, extra: str, printed: str, words: list[str], tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "train.parquet").touch()
    for seed in range(3):
        for label in "ab":
            lines = [{"accuracy": 0.1 * seed**2 + 0.1 * (label == "b") * seed, "loss": 1.0}]
            write_run(tmp_path / "runs" / f"{label}-{seed}", label, seed, lines=lines, config={"rounds": 1})
    done = fedbn_without(package, *words, cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    reason = f"needs the package '{package}[a-z.]*', which is not installed: {re.escape(install(extra))}"
    assert re.fullmatch(f"fedbn: error: [^(]+ {reason}\n", done.stderr), done.stderr
    assert printed in done.stdout  # a plot comes after its table


def test_no_optional_package_is_left_out() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = {
        re.match(r"[\w-]+(\[simulation\])?", requirement)[0].replace("-", "_")  # type: ignore[index]
        for requirements in project["optional-dependencies"].values()
        for requirement in requirements
    }
    own = {"fedbn_flwr", *(re.match(r"[\w-]+", text)[0] for text in project["dependencies"])}  # type: ignore[index]
    # These in tests/unit/results/test_result.py, and of deploy/monitoring.
    tested = {case[0] for case in CASES} | {"onnx", "onnxscript", "prometheus_client"}
    assert {"ray" if name == "flwr[simulation]" else name for name in names} - own == tested


@pytest.mark.slow
def test_a_folder_that_does_not_exist_is_reported_before_a_missing_package(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / ".git").mkdir()
    done = fedbn_without("datasets", "explain", "quick", "data.name=./pictures", cwd=tmp_path)
    assert done.returncode == 2
    assert "data.name='pictures': there is no such file or folder" in done.stderr
    assert done.stderr.endswith(" contains photos\n")


# As PROGRAM, for every package that `fedbn-flwr[EXTRAS]` does not install.
ONLY_EXTRAS = """
import sys
import tomllib
from importlib import metadata
from packaging.requirements import Requirement

installed, wanted = set(), [Requirement("fedbn-flwr" + sys.argv[1])]
while wanted:
    requirement = wanted.pop()
    for extra in {"", *requirement.extras}:
        if (requirement.name.lower().replace("_", "-"), extra) in installed:
            continue
        installed.add((requirement.name.lower().replace("_", "-"), extra))
        found = map(Requirement, metadata.requires(requirement.name) or ())
        wanted += [each for each in found if each.marker is None or each.marker.evaluate({"extra": extra})]
names = {name for name, _ in installed}
for package, owners in metadata.packages_distributions().items():
    if not any(owner.lower().replace("_", "-") in names for owner in owners):
        sys.modules[package] = None
assert not {"ray", "flwr_datasets", "tensorboard"} - {name for name, module in sys.modules.items() if module is None}
from fedbn_flwr.commands.cli import main
sys.exit(main(sys.argv[2:]))
"""


def extras_of_images() -> dict[str, str]:
    dockerfile = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")
    (base,) = re.findall(r"--torch-backend .*\n +((?:--extra \w+ )+)-r /tmp/build/pyproject.toml\n", dockerfile)
    added = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))["services"]["superexec-serverapp"]
    words = {"site": base, "server": f"{base} {added['build']['args']['EXTRAS']}"}
    return {image: f"[{','.join(re.findall(r'--extra (.+?) ', text + ' '))}]" for image, text in words.items()}


@pytest.mark.slow
@pytest.mark.parametrize("image", ["site", "server"])
def test_the_default_experiment_runs_with_the_packages_of_an_image(image: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", ONLY_EXTRAS, extras_of_images()[image], "run", "quick", "--out", "out"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len((tmp_path / "out/FixBN/history.jsonl").read_text(encoding="utf-8").splitlines()) == 3


@pytest.mark.slow
def test_a_run_without_matplotlib_has_a_table_and_a_page(tmp_path: Path) -> None:
    experiment = ["quick", "rounds=2", "strategy={name: FedBN}", "data.partition={kind: iid}"]
    options = ["evaluate.dynamics=true", "--out", str(tmp_path / "out")]
    done = fedbn_without("matplotlib", "run", *experiment, *options, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("no plots"))
    assert line == f"no plots: a plot needs the package 'matplotlib', which is not installed: {install('report')}"
    names = {file.name for file in (tmp_path / "out").rglob("*.*")}
    assert names >= {"report.md", "report.html", "report.json", "norms.jsonl", "model.safetensors"}
    assert not any(name.endswith((".png", ".svg")) for name in names)
    again = fedbn_without("matplotlib", "report", "--html", "out", "--out", "page.html", cwd=tmp_path)
    assert line in again.stdout.splitlines(), again.stderr


@pytest.mark.parametrize("name", internals._MODULES)
def test_flower_has_the_internal_names(name: str) -> None:
    assert getattr(internals, name) is not None


@pytest.mark.parametrize("module", ["flwr.supercore", "flwr.supercore.moved"])
def test_an_internal_name_that_flower_lacks_is_an_error_with_versions(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(internals._MODULES, "Run", module)  # as if it were there
    with pytest.raises(MissingPackage) as caught:
        from fedbn_flwr.internals import Run  # noqa: F401
    assert re.fullmatch(
        rf"Flower {re.escape(metadata.version('flwr'))} has no {module}\.Run \(.+\), .* tested with Flower 1\.41 to "
        r"1\.42, strategies and clients with 1\.26 to 1\.42\. To install .*: pip install 'PATH/TO/CLONE\[run\]', .*",
        str(caught.value),
    )
