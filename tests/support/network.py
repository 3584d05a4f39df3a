"""docker-compose.yml as plain processes on loopback, where there is no Docker.

Every service runs the entrypoint, command, environment and health check of the shipped file. Only the parts that a
container provides are rewritten: mounted folders, host names, and its own network (so ports become free ones).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any
from unittest import mock

import pytest
import yaml
from typer.testing import CliRunner

from tests.support.command import PATIENCE, ROOT

COMPOSE = ROOT / "docker-compose.yml"
KEYS = "./deploy/keys"
HOME = "/app"  # home and working folder in Flower's images
QUICK = Path(__file__).with_name("quick.py")


def missing_tools() -> list[str]:
    return [tool for tool in ("openssl", "ssh-keygen") if shutil.which(tool) is None]


needs_tools = pytest.mark.skipif(bool(missing_tools()), reason=f"not installed: {', '.join(missing_tools())}")


def make_keys(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", str(ROOT / "deploy" / "keys.sh"), "--out", str(folder), *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


def read_compose(variables: Mapping[str, str] | None = None, file: Path = COMPOSE) -> dict[str, Any]:
    """The file as Compose reads it: `${NAME:-default}` and `${NAME:+given}` filled in, anchors and merges resolved."""
    given = variables or {}
    text = re.sub(r"\$\{(\w+):-([^}]*)\}", lambda m: given.get(m[1]) or m[2], file.read_text(encoding="utf-8"))
    text = re.sub(r"\$\{(\w+):\+([^}]*)\}", lambda m: m[2] if given.get(m[1]) else "", text)
    assert "$" not in text, "the compose file uses an interpolation that this reader does not know"
    content = yaml.safe_load(text)
    assert isinstance(content, dict)
    return content


def _always_started(services: Mapping[str, Any]) -> dict[str, Any]:
    """Without those that only a profile starts."""
    return {name: service for name, service in services.items() if "profiles" not in service}


def copy_app(folder: Path) -> None:
    """The Flower app of this checkout without the environment beside it, which `flwr run` would search each time."""
    for name in ("apps", "fedbn_flwr", "strategies"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, folder)


def wait_for(what: str, ready: Callable[[], bool], seconds: float = PATIENCE, every: float = 0.2) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {seconds:g} s")
        time.sleep(every)


class Service:
    """One process, in its own process group, which all processes that it starts belong to."""

    def __init__(self, name: str, command: list[str], environment: dict[str, str], folder: Path, stop: str) -> None:
        self.name = name
        self.log = folder / "output.txt"
        self._stop = signal.Signals[stop]
        with self.log.open("ab") as output:  # after the output of earlier processes of this name
            self._process = subprocess.Popen(
                command,
                cwd=folder / HOME[1:],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def has_ended(self) -> bool:
        # It is not reaped, so that no other process gets its id before `kill`.
        return (
            not self.is_ours()
            or os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        )

    def is_ours(self) -> bool:
        """Whether its process id is still its own: it has not been reaped."""
        return self._process.returncode is None

    def ask_to_stop(self) -> None:
        os.killpg(self._process.pid, self._stop)

    def kill(self) -> int:
        """End the rest of the group, and return the exit status."""
        if self.is_ours():
            os.killpg(self._process.pid, signal.SIGKILL)
        return self._process.wait(timeout=PATIENCE)

    def exit_status(self) -> int:
        """Wait for its end."""
        wait_for(f"the end of {self.name}", self.has_ended)
        return self.kill()

    def apps(self) -> list[int]:
        """Its processes that run an app, which it starts for each message or run."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                words = [folder.joinpath("comm").read_text().strip()]
                words += folder.joinpath("cmdline").read_text(errors="replace").split("\0")[:3]
                if folder.joinpath("stat").read_text().rpartition(")")[2].split()[0] == "Z":
                    continue  # it has ended
                is_app = any(Path(word).name in ("flwr-clientapp", "flwr-serverapp") for word in words)
                if is_app and os.getsid(int(folder.name)) == self._process.pid:
                    found.append(int(folder.name))
        return found

    def output(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")


class Deployment:
    """All services of the file. Use as a context manager, or call `start` and `stop`.

    `folder` gets the keys, the volumes, and one folder per service with its output. Flower's programs keep their own
    intervals only with `real_clocks`.
    """

    def __init__(
        self,
        folder: Path,
        file: Path = COMPOSE,
        variables: Mapping[str, str] | None = None,
        *,
        real_clocks: bool = False,
    ) -> None:
        self.folder = folder
        self.real_clocks = real_clocks
        self.keys = folder / "keys"
        compose = read_compose(variables, file)
        self.services: dict[str, Any] = _always_started(compose["services"])
        self.secrets: dict[str, Any] = compose["secrets"]
        self.running: dict[str, Service] = {}
        self._ports: dict[tuple[str, int], int] = {}

    # --- a container's environment ---

    def mounts(self, service: str) -> dict[str, Path]:
        """The folder or file on this host for each one inside the container."""
        folders = {HOME: self.folder / service / HOME[1:]}
        if service.startswith("supernode-"):
            # Its --node-config names folders of the container that runs the app.
            app = self.mounts(service.replace("supernode", "superexec-clientapp"))
            folders |= {target: app[target] for target in ("/data", "/state")}
        for volume in self.services[service].get("volumes", []):
            if isinstance(volume, str):
                source, target = volume.split(":")[:2]
            else:
                source, target = volume["source"], volume["target"]
            if source == KEYS or source.startswith(KEYS + "/"):
                folders[target] = self.keys / source[len(KEYS) :].lstrip("/")
            elif source.startswith("/"):
                folders[target] = Path(source)
            elif source.startswith("."):
                folders[target] = ROOT / source
            else:
                folders[target] = self.folder / "volumes" / source
        for secret in self.services[service].get("secrets", []):
            file = self.secrets[secret["source"]]["file"]
            assert file.startswith(KEYS + "/")
            folders[secret["target"]] = self.keys / file[len(KEYS) + 1 :]
        return folders

    def port(self, host: str, port: int) -> int:
        if (host, port) not in self._ports:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                self._ports[host, port] = probe.getsockname()[1]
        return self._ports[host, port]

    def rewrite(self, text: str, service: str, mounts: Mapping[str, Path], name: str) -> str:
        """`text` of the compose file, for a process `name` on this host."""
        hosts, own = "|".join(map(re.escape, self.services)), (service, "localhost", "0.0.0.0")
        text = re.sub(
            rf"(?<![\w.-])({hosts}|localhost|0\.0\.0\.0):(\d+)",
            lambda m: f"127.0.0.1:{self.port(name if m[1] in own else m[1], int(m[2]))}",
            text,
        )
        text = re.sub(r"--port=(\d+)", lambda m: f"--port={self.port(name, int(m[1]))}", text)
        text = text.replace("0.0.0.0", "127.0.0.1")
        targets = "|".join(map(re.escape, mounts))
        return re.sub(rf"(?<![\w./:-])({targets})(?![\w.-])", lambda m: str(mounts[m[1]]), text)

    def environment(self, given: Mapping[str, str], home: Path) -> dict[str, str]:
        """A container's environment: none of the caller's variables, but for Python and the processor of the tests."""
        processor = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA")  # other instructions would give other bits
        environment = {key: os.environ[key] for key in processor if key in os.environ} | {
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
            "HOME": str(home),
            "PYTHONUNBUFFERED": "1",
            "LANG": "C.UTF-8",
        }
        # Every message starts a Python process: without bytecode each would take seconds more.
        if "PYTHONPYCACHEPREFIX" in os.environ or "PYTHONDONTWRITEBYTECODE" in os.environ:
            environment["PYTHONPYCACHEPREFIX"] = os.environ.get("PYTHONPYCACHEPREFIX", str(self.folder / "bytecode"))
        return environment | {key: str(value) for key, value in given.items()}

    # --- services ---

    def launch(self, service: str, name: str | None = None, mounts: Mapping[str, Path] | None = None) -> Service:
        """Start a service, or another process `name` like it, for which `mounts` replaces folders."""
        name = name or service
        given = self.services[service]
        where = self.mounts(service) | {HOME: self.folder / name / HOME[1:]} | dict(mounts or {})
        for target, path in where.items():
            if path.is_relative_to(self.folder / "volumes") or target == HOME:
                path.mkdir(parents=True, exist_ok=True)
            assert path.exists(), f"{service} mounts {path}, which is not there"
        folder = self.folder / name
        folder.joinpath(HOME[1:]).mkdir(parents=True, exist_ok=True)
        words = [*given["entrypoint"], *given.get("command", [])]
        self.running[name] = Service(
            name,
            self.bound([self.rewrite(word, service, where, name) for word in words]),
            self.environment(
                {key: self.rewrite(value, service, where, name) for key, value in given["environment"].items()},
                where[HOME],
            ),
            folder,
            given.get("stop_signal", "SIGTERM"),
        )
        return self.running[name]

    def bound(self, command: list[str]) -> list[str]:
        """`command` as a program that ends with this process."""
        flower = command[0].startswith("flower-") or "--isolation=process" in command
        clocks = "quick" if flower and not self.real_clocks else "real"
        return [sys.executable, str(QUICK), str(os.getpid()), clocks, *command]

    def is_healthy(self, service: str) -> bool:
        if self.running[service].has_ended():
            raise RuntimeError(f"{service} has ended\n{self.outputs()}")
        kind, *words = self.services[service]["healthcheck"]["test"]
        assert kind == "CMD"
        mounts = self.mounts(service)
        check = subprocess.run(
            [self.rewrite(word, service, mounts, service) for word in words],
            env=self.environment({}, mounts[HOME]),
            capture_output=True,
            timeout=PATIENCE,
        )
        return check.returncode == 0

    def start(self) -> None:
        """Start every service once the services it depends on satisfy the file's conditions."""
        if missing_tools():
            pytest.skip(f"not installed: {', '.join(missing_tools())}")
        made = make_keys(self.keys, "--nodes", str(sum(name.startswith("supernode-") for name in self.services)))
        assert made.returncode == 0, made.stderr
        for names in self._levels():
            self._wait_for_conditions(names)
            for name in names:
                self.launch(name)
        for name in [name for name in self.services if "healthcheck" in self.services[name]]:
            wait_for(f"{name} healthy", functools.partial(self.is_healthy, name))

    def _demands(self, name: str) -> dict[str, str]:
        """The services that it depends on, each with its condition."""
        needed = self.services[name].get("depends_on", {})
        if isinstance(needed, list):
            return dict.fromkeys(needed, "service_started")
        return {other: demand["condition"] for other, demand in needed.items()}

    def _wait_for_conditions(self, names: list[str]) -> None:
        for needed, condition in sorted({demand for name in names for demand in self._demands(name).items()}):
            if condition == "service_healthy":
                wait_for(f"{needed} healthy", functools.partial(self.is_healthy, needed))
            elif condition == "service_completed_successfully":
                status = self.running[needed].exit_status()
                assert status == 0, f"{needed} ended with {status}\n{self.outputs()}"

    def _levels(self) -> list[list[str]]:
        """The services by the length of their chain of dependencies."""

        def depth(name: str) -> int:
            return 1 + max(map(depth, self._demands(name)), default=-1)

        depths = {name: depth(name) for name in self.services}
        return [[name for name in depths if depths[name] == d] for d in range(1 + max(depths.values()))]

    def stop(self) -> None:
        """End all services, each before those that it depends on."""
        levels = self._levels()
        others = [name for name in self.running if name not in self.services]
        for names in [others, *reversed(levels)]:
            alive = [self.running[name] for name in names if name in self.running and self.running[name].is_ours()]
            for service in alive:
                service.ask_to_stop()
            deadline = time.monotonic() + 15
            while time.monotonic() < deadline and not all(service.has_ended() for service in alive):
                time.sleep(0.1)
            for service in alive:
                service.kill()

    def __enter__(self) -> Deployment:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def outputs(self, lines: int = 40) -> str:
        """The last lines of every service's output, for the message of a failure."""
        parts = [
            f"--- {name} ---\n" + "\n".join(service.output().splitlines()[-lines:])
            for name, service in self.running.items()
        ]
        return "\n".join(parts)

    # --- a user's commands ---

    def flwr(self, *words: str) -> str:
        """The `flwr` command on the user's side, with the link `remote`."""
        home = self.folder / "user"
        home.mkdir(exist_ok=True)
        (home / "config.toml").write_text(
            f'[superlink.remote]\naddress = "127.0.0.1:{self.port("superlink", 8000)}"\n'
            f"root-certificates = {json.dumps(str(self.keys / 'ca.crt'))}\n",
            encoding="utf-8",
        )
        given = self.services["superlink"]["environment"] | {"FLWR_HOME": str(home)}
        # In this process: a new one would spend more than a second on imports.
        printed = io.StringIO()
        with warnings.catch_warnings(), mock.patch.object(sys, "__stdout__", printed):  # it writes JSON there
            warnings.simplefilter("ignore")  # it uses deprecated functions of typer
            app = importlib.import_module("flwr.cli.app").app
            done = CliRunner().invoke(app, words, env=given)
        assert done.exit_code == 0, f"{shlex.join(['flwr', *words])}\n{done.output}\n{self.outputs()}"
        return printed.getvalue() or done.stdout

    def submit(self, run_config: Mapping[str, Any]) -> str:
        """Have this checkout's app run with `run_config`, and return the run's id."""
        app = self.folder / "fedbn-flwr"
        if not app.exists():
            copy_app(app)
        settings = self.folder / "run-config.toml"
        # JSON's strings, numbers and booleans are TOML's.
        settings.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in run_config.items()))
        answer = json.loads(self.flwr("run", str(app), "remote", "--run-config", str(settings), "--format", "json"))
        assert "run-id" in answer, answer
        return str(answer["run-id"])

    def status(self, run_id: str) -> str:
        listed = json.loads(self.flwr("ls", "remote", "--run-id", run_id, "--format", "json"))
        return str(listed["runs"][0]["status"])

    def log(self, run_id: str) -> str:
        """The output of the ServerApp, which the SuperLink stores."""
        return self.flwr("log", run_id, "remote", "--show")

    def wait_for_end(self, run_id: str) -> str:
        """The status of the run when it has ended, or after PATIENCE seconds."""
        deadline = time.monotonic() + PATIENCE
        while not (last := self.status(run_id)).startswith("finished") and time.monotonic() < deadline:
            ended = [name for name, service in self.running.items() if service.is_ours() and service.has_ended()]
            assert not ended, f"{', '.join(ended)} ended\n{self.outputs()}"
            time.sleep(0.2)
        return last

    def run_app(self, run_config: Mapping[str, Any]) -> Path:
        """Run this checkout with `run_config`, and return the folder of its one training run."""
        out = Path(run_config["out"]) if "out" in run_config else self.mounts("superexec-serverapp")["/runs"]
        before = set(out.glob("**/config.yaml"))
        run_id = self.submit(run_config)
        if (last := self.wait_for_end(run_id)) != "finished:completed":
            raise AssertionError(
                f"the run is {last!r} after at most {PATIENCE:g} s\n{self.log(run_id)}\n{self.outputs()}"
            )
        (config,) = set(out.glob("**/config.yaml")) - before
        return config.parent
