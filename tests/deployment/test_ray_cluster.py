"""An experiment on a Ray cluster that is running already."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.command import environment, fedbn

pytestmark = pytest.mark.deployment

START = 120  # seconds


def free_port() -> int:
    with socket.socket() as unbound:
        unbound.bind(("127.0.0.1", 0))
        return int(unbound.getsockname()[1])


def is_open(port: int) -> bool:
    with socket.socket() as attempt:
        return attempt.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def head(tmp_path: Path) -> Iterator[str]:
    """The address of a Ray cluster of one node on this machine, with two cores."""
    port = free_port()
    # Short, for the paths of sockets. Ray also notes the address there, where other runs do not look for it.
    folder = tempfile.mkdtemp(prefix="ray-")
    options = [
        "--node-ip-address=127.0.0.1", f"--port={port}", "--num-cpus=2", "--include-dashboard=false",
        "--disable-usage-stats",
    ]  # fmt: skip
    command = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", *options]
    log = tmp_path / "ray.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environment(RAY_TMPDIR=folder), stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        deadline = time.monotonic() + START
        while b"Ray runtime started" not in log.read_bytes():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, f"not started after {START} s\n{log.read_text()}"
            time.sleep(0.2)
        assert is_open(port)
        yield f"127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            shutil.rmtree(folder, ignore_errors=True)


def test_an_experiment_runs_on_an_existing_ray_cluster(head: str, tmp_path: Path) -> None:
    """Ray refuses a number of cores there: the cluster's count."""
    words = ["--engine", "ray", "--device", "cpu", "--out", tmp_path / "out"]
    done = fedbn("run", "quick", *words, cwd=tmp_path, RAY_ADDRESS=head)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "communication rounds" in done.stdout
    assert is_open(int(head.rpartition(":")[2])), "the cluster outlives the run"
