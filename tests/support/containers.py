"""docker-compose.yml in containers, from a copy of this checkout; the commands are those of docs/deployment.md."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import PATIENCE, ROOT, environment
from tests.support.network import copy_app, wait_for

PROJECT = "fedbn"  # the name in docker-compose.yml, the prefix of images and volumes


def docker(*words: str, cwd: Path | None = None) -> str:
    done = subprocess.run(["docker", *words], cwd=cwd, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, f"docker {' '.join(words)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def skip_without_an_engine() -> None:
    if shutil.which("docker") is None:
        pytest.skip("docker is not installed")
    if subprocess.run(["docker", "info"], capture_output=True, timeout=PATIENCE).returncode != 0:
        pytest.skip("no Docker engine is running")
    if docker("volume", "ls", "--quiet", "--filter", f"name=^{PROJECT}_"):
        pytest.skip(f"volumes of a deployment {PROJECT!r} exist here, which the test would delete")


class Containers:
    """A copy of the checkout in `folder`, whose services `up` starts and `down` removes with their volumes."""

    def __init__(self, folder: Path) -> None:
        self.checkout = folder / "fedbn-flwr"
        copy_app(self.checkout)
        shutil.copytree(ROOT / "deploy", self.checkout / "deploy", ignore=shutil.ignore_patterns("keys"))
        for file in ROOT.glob("docker-compose*.yml"):
            shutil.copy(file, self.checkout)
        self.home = folder / "user"
        self.home.mkdir()

    def script(self, *words: str) -> None:
        done = subprocess.run(["sh", *words], cwd=self.checkout, capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode == 0, done.stdout + done.stderr

    def compose(self, *words: str) -> str:
        return docker("compose", *words, cwd=self.checkout)

    def up(self) -> None:
        known = set(docker("image", "ls", "--format", "{{.Repository}}:{{.Tag}}").split())
        wanted = {name if ":" in name else f"{name}:latest" for name in self.compose("config", "--images").split()}
        if missing := wanted - known:
            pytest.skip(f"images are missing: {', '.join(sorted(missing))} (docker compose build)")
        (self.home / "config.toml").write_text(
            '[superlink.remote]\naddress = "localhost:8000"\n'
            f"root-certificates = {json.dumps(str(self.checkout / 'deploy' / 'keys' / 'ca.crt'))}\n"
        )
        self.compose("up", "--no-build", "--detach", "--quiet-pull")

    def down(self) -> None:
        self.compose("down", "--volumes", "--remove-orphans", "--timeout", "20")

    def inside(self, service: str, command: str) -> str:
        return self.compose("exec", "-T", service, "sh", "-c", command)

    def published(self, service: str, port: int) -> str:
        """The address of this machine at which others reach the port of a service."""
        return self.compose("port", service, str(port)).rpartition(":")[0]

    def networks(self, service: str) -> list[str]:
        container = self.compose("ps", "--quiet", service).strip()
        names = "{{range $name, $network := .NetworkSettings.Networks}}{{println $name}}{{end}}"
        return docker("inspect", "--format", names, container).split()

    def flwr(self, *words: str) -> Any:
        """The JSON that a command of `flwr` prints."""
        done = subprocess.run(
            [str(Path(sys.executable).parent / "flwr"), *words, "--format", "json"],
            cwd=self.checkout,
            env=environment(FLWR_HOME=str(self.home)),
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
        return json.loads(done.stdout)

    def user(self, command: str) -> str:
        """What a command prints in the user's shell, in the checkout."""
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        done = subprocess.run(
            ["sh", "-c", command],
            cwd=self.checkout,
            env=environment(FLWR_HOME=str(self.home), PATH=path),
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def wait_for(self, what: str, ready: Callable[[], Any]) -> None:
        try:
            wait_for(what, lambda: bool(ready()), PATIENCE, every=2)
        except TimeoutError as error:
            raise AssertionError(f"{error}\n{self.compose('logs', '--tail', '30')}") from error

    def wait_for_nodes(self, count: int) -> None:
        def online() -> int:
            nodes = self.flwr("supernode", "list", "remote").get("nodes", [])  # none while the server starts
            return sum(node["status"] == "online" for node in nodes)

        self.wait_for(f"{count} connected nodes", lambda: online() == count)

    def submit(self, out: str, experiment: Mapping[str, Any], resume: bool = False) -> str:
        settings = {"experiment": json.dumps(experiment), "out": f"/runs/{out}", "resume": resume}
        file = self.home / "run-config.toml"
        file.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items()))
        return str(self.flwr("run", ".", "remote", "--run-config", os.fspath(file))["run-id"])

    def wait_for_end(self, run_id: str, expected: str = "finished:completed") -> None:
        found: list[str] = []

        def ended() -> bool:
            found.append(str(self.flwr("ls", "remote", "--run-id", run_id)["runs"][0]["status"]))
            return found[-1].startswith("finished")

        self.wait_for(f"the end of run {run_id}", ended)
        assert found[-1] == expected, self.compose("logs", "--tail", "30")

    def history(self, out: str) -> list[dict[str, Any]]:
        """The lines of the one run in this folder of the volume; none before its first round has ended."""
        text = self.inside("superexec-serverapp", f"cat /runs/{out}/*/history.jsonl 2>/dev/null || true")
        return [json.loads(line) for line in text.splitlines() if line.endswith("}")]
