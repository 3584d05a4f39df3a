"""examples/flower_app under Flower's own `flwr run`, in an environment with our wheel, as docs/flower.md says."""

from __future__ import annotations

import contextlib
import json
import os
import re
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

import pytest
from flwr.app import Context, RecordDict

from fedbn_flwr import LocalGrid
from tests.support.command import ROOT, environment, fedbn
from tests.support.network import wait_for
from tests.support.packages import CLEAN, UV, needs_uv, run

EXAMPLE = ROOT / "examples" / "flower_app"
PAGE = (ROOT / "docs" / "flower.md").read_text(encoding="utf-8")
NODES = 5
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
            for name in (CLIENT, SERVER):
                sys.modules.pop(name, None)


def here(folder: Path, **changes: float) -> None:
    """The app on the local engine; it prints."""
    config = tomllib.loads((folder / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"] | changes
    with imported(folder) as (client, server), LocalGrid(client.app, NODES, threads=1, run_config=config) as grid:
        server.app(grid, Context(1, 0, {}, RecordDict(), config))


@pytest.mark.slow
def test_the_guide_shows_what_the_example_prints(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(EXAMPLE, tmp_path / "app"))
    here(folder)
    found, shown = accuracies(capsys.readouterr().out), accuracies(PAGE)
    assert shown.keys() <= found.keys()
    assert len(shown) == 5
    # Other processors round differently, and what a round amplifies.
    assert found[0] == shown[0]
    assert {number: found[number] for number in shown} == pytest.approx(shown, abs=5)
    assert found[60] == pytest.approx(shown[60], abs=2)
    here(folder, **{"num-server-rounds": 3, "freeze-round": 0.5})
    (few,) = re.findall(r"`num-server-rounds=3 freeze-round=0\.5` it has five, and ends at ([\d.]+)%", PAGE)
    assert accuracies(capsys.readouterr().out)[3] == pytest.approx(float(few), abs=2)
    server = folder / "server_app.py"
    bare = re.sub(r"FixBN\((FedAvg\(.*?\)), freeze_round=.*\)", r"\1", server.read_text())
    assert bare != server.read_text()
    server.write_text(bare)
    here(folder)
    (without,) = re.findall(r"With `FedAvg` instead the app ends at ([\d.]+)%", PAGE)
    assert accuracies(capsys.readouterr().out)[60] == pytest.approx(float(without), abs=2)


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
    installs: bool, clean_environment: Path, wheel: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the installation Flower may lose the heartbeat of a run longer than 90 s, so this one is short."""
    folder = Path(shutil.copytree(EXAMPLE, tmp_path / "flower_app", ignore=shutil.ignore_patterns("__pycache__")))
    changes = {"num-server-rounds": 3 if installs else 20, "freeze-round": 0.5}
    here(folder, **changes)
    expected = accuracies(capsys.readouterr().out)
    project = folder / "pyproject.toml"
    text = project.read_text()
    assert text.count("file:///PATH/TO/CLONE") == 1
    project.write_text(text.replace("file:///PATH/TO/CLONE", wheel.as_uri()))
    run(str(UV), "pip", "install", "-p", clean_environment / "python", "scikit-learn", cwd=tmp_path)
    flwr, config = clean_environment / "flwr", " ".join(f"{key}={value}" for key, value in changes.items())
    with superlink(clean_environment, tmp_path, installs) as variables:
        printed = run(flwr, "run", ".", "--stream", *FEDERATION, "--run-config", config, cwd=folder, **variables)
        (listed,) = json.loads(run(flwr, "ls", "--format", "json", cwd=folder, **variables))["runs"]
    assert listed["status"] == "finished:completed", printed
    found = accuracies(printed)
    assert found.keys() == expected.keys()
    # A newer PyTorch, which the app's own dependencies allow, may round differently.
    assert found == (pytest.approx(expected, abs=5) if installs else expected)
    assert installs or found[20] > 65, "FixBN's first ten rounds are ordinary batch norm"


@pytest.mark.slow
def test_fedbn_flwr_run_carries_out_the_example(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(shutil.copytree(EXAMPLE, tmp_path / "flower_app", ignore=shutil.ignore_patterns("__pycache__")))
    here(folder, **{"num-server-rounds": 2})
    expected = accuracies(capsys.readouterr().out)
    done = fedbn("flwr", "run", folder, *FEDERATION, "--run-config", "num-server-rounds=2", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert accuracies(done.stdout) == expected
