"""examples/flower_app under Flower's own `flwr run`, in an environment with our wheel, as docs/flower.md says."""

from __future__ import annotations

import contextlib
import json
import os
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tomllib
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from flwr.app import Context, RecordDict

from fedbn_flwr import LocalGrid
from tests.support.command import ROOT, environment, fedbn, python_blocks
from tests.support.network import wait_for
from tests.support.packages import CLEAN, UV, needs_uv, run

EXAMPLE = ROOT / "examples" / "flower_app"
PAGE = (ROOT / "docs" / "flower.md").read_text(encoding="utf-8")
NODES = 4
FEDERATION = ("--federation-config", f"num-supernodes={NODES} client-resources-num-cpus=1")
CLIENT, SERVER = "client_app", "server_app"


def accuracies(printed: str) -> dict[int, float]:
    """The lines of the app's server by round, in percent."""
    found = re.findall(r"^round (\d+): accuracy ([\d.]+)%$", printed, re.MULTILINE)
    return {int(number): float(accuracy) for number, accuracy in found}


@contextlib.contextmanager
def imported(folder: Path) -> Iterator[tuple[ModuleType, ModuleType]]:
    """The app's two modules, unloaded afterwards: other projects have modules of these names."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        try:
            yield __import__(CLIENT), __import__(SERVER)
        finally:
            for name in (CLIENT, SERVER, "task"):
                sys.modules.pop(name, None)


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the app with its images, which is the current folder."""
    folder = Path(shutil.copytree(EXAMPLE, tmp_path / "flower_app", ignore=shutil.ignore_patterns("__pycache__")))
    monkeypatch.chdir(folder)
    runpy.run_path("make_images.py")
    return folder


def here(capsys: pytest.CaptureFixture[str], **changes: object) -> dict[int, float]:
    """What the app in the current folder prints on the local engine."""
    config = tomllib.loads(Path("pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"] | changes
    capsys.readouterr()
    with imported(Path.cwd()) as (client, server), LocalGrid(client.app, NODES, threads=1, run_config=config) as grid:
        server.app(grid, Context(1, 0, {}, RecordDict(), config))
    return accuracies(capsys.readouterr().out)


def test_the_guide_prints_the_example_s_files() -> None:
    blocks = python_blocks(PAGE)
    assert [(EXAMPLE / name).read_text().strip() for name in ("task.py", "client_app.py", "server_app.py")] == [
        block.strip() for block in blocks[:3]
    ]


@pytest.mark.slow
def test_the_guide_shows_what_the_example_prints(app: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found, shown = here(capsys), accuracies(PAGE)
    assert len(shown) == 5
    # Other processors round differently, and what a round amplifies.
    assert {number: found[number] for number in shown} == pytest.approx(shown, abs=5)
    stated = {name: float(value) for name, value in re.findall(r"^\| `(\w+)` \| ([\d.]+)% \|", PAGE, re.MULTILINE)}
    ends = {name: here(capsys, strategy=name)[20] for name in ("FedAvg", "FixBN")} | {"FedBN": found[20]}
    assert ends == pytest.approx(stated, abs=6)
    (few,) = re.findall(r"it takes 24, and ends at ([\d.]+)%", PAGE)
    assert here(capsys, strategy="FixBN", **{"num-server-rounds": 4})[4] == pytest.approx(float(few), abs=6)
    server = app / "server_app.py"
    server.write_text(server.read_text().replace(", lr_factor=0.1", ""))
    (high,) = re.findall(r"without it this\s+run ends at ([\d.]+)%", PAGE)
    assert here(capsys, strategy="FixBN")[20] == pytest.approx(float(high), abs=8)


@pytest.mark.slow
def test_the_guide_s_other_code_runs(app: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with imported(app) as (client, _):
        names: dict[str, Any] = {"make_client": client.make_client}
        for block in python_blocks(PAGE)[3:]:
            exec(block, names)
    assert 2 in accuracies(capsys.readouterr().out), "of the script with a LocalGrid"


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]


@contextlib.contextmanager
def superlink(bin: Path, folder: Path, installs: bool) -> Iterator[dict[str, str]]:
    """A SuperLink such as `flwr run` starts and leaves running, which ends with the test; the variables that find it.

    It starts in an empty folder: Ray imports modules from there first.
    """
    http, control = free_ports(2)
    variables = {
        "FLWR_HOME": str(folder / "home"),
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(http),
        "FLWR_LOCAL_CONTROL_API_PORT": str(control),
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "0" if installs else "1",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "PATH": os.pathsep.join([str(bin), os.environ["PATH"]]),
        **CLEAN,
    }
    (folder / "empty").mkdir()
    command = [bin / "flower-superlink", "--insecure", "--simulation", "--host", "127.0.0.1", "--port", str(http)]
    with (
        (folder / "superlink.txt").open("wb") as log,
        subprocess.Popen(
            command,
            cwd=folder / "empty",
            env=environment(**variables),
            stdout=log,
            stderr=log,
            start_new_session=True,
        ) as process,
    ):
        try:
            wait_for("the SuperLink", lambda: is_healthy(http) or process.poll() is not None)
            assert process.poll() is None, (folder / "superlink.txt").read_text()
            yield variables
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def is_healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


@pytest.mark.slow
@needs_uv
@pytest.mark.parametrize("installs", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_flwr_run_carries_out_the_example(
    installs: bool, clean_environment: Path, wheel: Path, app: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the installation, which is a part of the run, Flower may lose the heartbeat of one longer than 90 s."""
    changes = {"num-server-rounds": 3, "images": str(app / "images")}
    expected = here(capsys, **changes)
    project = app / "pyproject.toml"
    text = project.read_text()
    assert text.count("file:///PATH/TO/CLONE") == 1
    project.write_text(text.replace("file:///PATH/TO/CLONE", wheel.as_uri()))
    run(str(UV), "pip", "install", "-p", clean_environment / "python", "scikit-learn", cwd=tmp_path)
    flwr = clean_environment / "flwr"
    config = f"num-server-rounds=3 images={json.dumps(changes['images'])}"
    with superlink(clean_environment, tmp_path, installs) as variables:
        printed = run(flwr, "run", ".", "--stream", *FEDERATION, "--run-config", config, cwd=app, **variables)
        (listed,) = json.loads(run(flwr, "ls", "--format", "json", cwd=app, **variables))["runs"]
    assert installs or listed["status"] == "finished:completed", printed
    found = accuracies(printed)
    assert found.keys() == expected.keys()
    # The app's loader shuffles, and actors draw in another order; a newer PyTorch may round differently.
    assert found == pytest.approx(expected, abs=25)


@pytest.mark.slow
def test_fedbn_flwr_run_carries_out_the_example(app: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = here(capsys, **{"num-server-rounds": 2})
    words = ("--workers", "0", "--federation-config", f"num-supernodes={NODES}")
    done = fedbn("flwr", "run", ".", *words, "--run-config", "num-server-rounds=2", cwd=app)
    assert done.returncode == 0, done.stdout + done.stderr
    assert accuracies(done.stdout) == expected
