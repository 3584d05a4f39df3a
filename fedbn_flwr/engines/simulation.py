"""Flower's simulation with a SuperLink for each run: `fedbn flwr run`.

`flwr run` uses a SuperLink on this machine that it starts once and leaves running: it keeps the environment and the
working folder of its first start, installs each app's dependencies again, and reports a failed run with exit code 0.
Here each run has its own SuperLink, on free ports, with its own FLWR_HOME, in an empty folder (Ray imports from there
first), without installing anything; the SuperLink stops when the run ends, and the exit code is the run's.
"""

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
import tempfile
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedbn_flwr import named
from fedbn_flwr.cores import cores
from fedbn_flwr.errors import RunFailed, SettingsError

from .ray_settings import set_ray_defaults
from .temporary import temporary_folder

_EXAMPLE = {  # for the options of `flwr run` that have a value
    "--run-config": "--run-config \"set='rounds=10'\"",
    "--federation-config": "--federation-config num-supernodes=5",
    "--federation": "--federation @account/name",
    "--format": "--format json",
}
_START_TIMEOUT = 60  # seconds until the SuperLink answers
_PAIR = re.compile(r"""(\S+?)=('[^']*'|"[^"]*"|\S+)""")  # Flower's, of --run-config
_STOP_TIMEOUT = 20  # seconds until its processes have ended


def run_app(app: Path, run_config: Mapping[str, Any], federation_config: str, options: Sequence[str] = ()) -> int:
    """`flwr run APP` on a SuperLink of its own; raises RunFailed if the run did not complete."""
    with temporary_folder("flwr") as home, _superlink(home) as environment:
        config = home / "run-config.toml"
        config.write_text(_toml_lines(run_config), encoding="utf-8")
        command = [tool("flwr"), "run", str(app), "--stream", "--federation-config", federation_config]
        if run_config:
            command += ["--run-config", str(config)]
        # In our process group, so that Ctrl-C reaches it; _superlink() stops the SuperLink's processes.
        code = subprocess.call([*command, *options], env=environment, cwd=home)
        # The app's working folder is deleted: copy the files that it wrote (a template saves final_model.pt there).
        if written := sorted(file.name for file in (home / "empty").iterdir()):
            shutil.copytree(home / "empty", Path.cwd(), dirs_exist_ok=True)
            print(f"written here by the app: {', '.join(written)}")
        status, details = _status(environment, home)
        if code or status != "finished:completed":
            raise RunFailed(
                f"the Flower run ended as {status or f'exit code {code}'}{f': {details}' if details else ''}"
            )
    return 0


def federation_config(clients: int) -> str:
    """One node per client, one core each, and as many at a time as there are cores, here or on the Ray cluster."""
    nodes = f"num-supernodes={clients} client-resources-num-cpus=1 init-args-log-to-driver=false"
    if (
        os.environ.get("RAY_ADDRESS", "local") != "local"
    ):  # Ray refuses a number of cores for a cluster that is running already
        return nodes
    return f"{nodes} init-args-num-cpus={min(clients, cores())}"


@dataclass(frozen=True)
class FlwrRun:
    """A command line of `flwr run`; `options` are the arguments that are only passed on."""

    app: Path
    project: dict[str, Any]  # the app's pyproject.toml
    run_config: dict[str, Any]
    federation_config: str  # empty if not given
    options: list[str]

    @classmethod
    def parse(cls, arguments: Sequence[str]) -> FlwrRun:
        words = list(arguments)
        if not words or words.pop(0) != "run":
            raise SettingsError(
                f"fedbn flwr has only one command, `run`; found {' '.join(arguments) or 'nothing'!r}. Call flwr itself "
                "for Flower's other commands"
            )
        values: dict[str, list[str]] = {name: [] for name in _EXAMPLE}
        places, options = [], []
        while words:
            word = words.pop(0)
            if word.startswith("-c"):
                word = f"--run-config={word[2:].removeprefix('=')}" if word[2:] else "--run-config"
            name, equals, value = word.partition("=")
            if name in values:
                if not equals and not words:
                    raise SettingsError(f"{name} needs a value, for instance {_EXAMPLE[name]}")
                values[name].append(value if equals else words.pop(0))
            elif word.startswith("-"):
                options += [word] if word != "--stream" else []
            else:
                places.append(word)
        if len(places) > 1:
            raise SettingsError(
                f"fedbn flwr run starts a SuperLink of its own; for the connection {places[1]!r} call "
                f"flwr run {places[0]} {places[1]} --stream"
            )
        app = Path(places[0] if places else ".").expanduser().resolve()
        run_config = parse_pairs(values.pop("--run-config"), "--run-config")
        federation_config = " ".join(values.pop("--federation-config"))
        options += [word for name, each in values.items() for value in each for word in (name, value)]
        return cls(app, _read_project(app), run_config, federation_config, options)


def _read_project(app: Path) -> dict[str, Any]:
    file = app / "pyproject.toml"
    try:
        project = tomllib.loads(file.read_text(encoding="utf-8"))
        project["project"]["name"], project["tool"]["flwr"]["app"]["components"]
    except (OSError, KeyError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(
            f"{str(app)!r} is not a Flower app: its pyproject.toml with [project] name and [tool.flwr.app.components] "
            f"is missing or incomplete ({type(error).__name__}: {error})"
        ) from None
    return project


def parse_pairs(values: Sequence[str], option: str) -> dict[str, Any]:
    """The pairs key=value of an option, as Flower reads them."""
    from flwr.common.config import parse_config_args

    for value in values:  # Flower leaves out what is not of this form
        if not value.endswith(".toml") and (rest := _PAIR.sub("", value).split()):
            raise SettingsError(
                f"{option} {value!r}: {rest[0]!r} is not of the form key=value; expected pairs separated by blanks, "
                "with text in quotes, or one file ending in .toml"
            )
    try:
        return dict(parse_config_args(list(values)))
    except Exception as error:  # any error of Flower's TOML parser
        raise SettingsError(f"{option} {' '.join(values)!r} cannot be read: {error}") from None


# --- the SuperLink -----------------------------------------------------------


@contextlib.contextmanager
def _superlink(home: Path) -> Iterator[dict[str, str]]:
    """A SuperLink for one run; yields the environment in which `flwr` finds it."""
    port, control = _free_ports(2)
    environment = os.environ | {
        "FLWR_HOME": str(home),
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(port),
        "FLWR_LOCAL_CONTROL_API_PORT": str(control),
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
    }
    environment.setdefault(named.FOLDER, os.getcwd())
    environment.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    environment.setdefault("RAY_ADDRESS", "local")  # otherwise Ray uses a cluster that was last started here
    set_ray_defaults(environment)
    (home / "config.toml").write_text('[superlink]\ndefault = "local"\n\n[superlink.local]\naddress = ":local:"\n')
    if environment.pop("PYTHONDONTWRITEBYTECODE", None):
        # Flower starts many processes; without bytecode files each would compile torch again.
        environment.setdefault("PYTHONPYCACHEPREFIX", str(Path(tempfile.gettempdir()) / "fedbn-pycache"))
    if "site-packages" not in Path(__file__).parts:  # a checkout that is not installed
        root = str(Path(__file__).resolve().parent.parent.parent)
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    neutral = home / "empty"
    neutral.mkdir()
    log = home / "superlink.log"
    command = [
        tool("flower-superlink"), "--insecure", "--simulation", "--isolation", "subprocess",
        "--control-api-address", f"127.0.0.1:{control}", "--host", "127.0.0.1", "--port", str(port),
        "--log-file", str(log),
    ]  # fmt: skip
    with subprocess.Popen(
        command,
        env=environment,
        cwd=neutral,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        try:
            with _stopped_after_us(home):
                _wait_until_healthy(process, port, log)
                yield environment
        finally:
            _stop(home)


@contextlib.contextmanager
def _stopped_after_us(home: Path) -> Iterator[None]:
    """Have a shell end the run's processes when this process was killed and could not: its input ends then."""
    shell = subprocess.Popen(
        ["/bin/sh", "-c", _STOP_SCRIPT, "sh", str(home)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C and the end of the terminal do not reach it
    )
    try:
        yield
    finally:
        os.killpg(shell.pid, signal.SIGKILL)
        shell.communicate()


def tool(name: str) -> str:
    """Flower's command in this environment, not in another one earlier on PATH."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise RunFailed(f"the command {name!r} is not installed; pip install 'flwr[simulation]>=1.41,<1.42'")
    return found


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for unbound in sockets:
            unbound.bind(("127.0.0.1", 0))
        return [int(bound.getsockname()[1]) for bound in sockets]


def _wait_until_healthy(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + _START_TIMEOUT
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        with contextlib.suppress(urllib.error.URLError, OSError):
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2):
                return
        time.sleep(0.1)
    ending = log.read_text(encoding="utf-8", errors="replace")[-1500:] if log.exists() else "(it wrote no log)"
    raise RunFailed(f"Flower's SuperLink did not start within {_START_TIMEOUT} s; its log ends:\n{ending}")


def _stop(home: Path) -> None:
    """End the SuperLink and the other processes of its run: SIGTERM, then SIGKILL."""
    for sent, patience in ((signal.SIGTERM, _STOP_TIMEOUT), (signal.SIGKILL, 5)):
        for each in _of_run(home):
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, sent)
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            if not _of_run(home):
                return
            time.sleep(0.1)


def _of_run(home: Path) -> list[int]:
    """The processes with this FLWR_HOME. Flower starts the app's in sessions of their own, so a group has not all."""
    mark, found = f"FLWR_HOME={home}\0".encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if mark in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found


# As `_stop`, after this process was killed.
_STOP_SCRIPT = f"""
cat >/dev/null
for sent in TERM KILL; do
    for folder in /proc/[0-9]*; do
        tr '\\0' '\\n' <"$folder/environ" 2>/dev/null | grep -qxF "FLWR_HOME=$1" && kill -$sent "${{folder#/proc/}}"
    done
    [ $sent = KILL ] || sleep {_STOP_TIMEOUT}
done
"""


def _status(environment: Mapping[str, str], home: Path) -> tuple[str, str]:
    """Status and details of the newest run, because `flwr run --stream` exits with 0 even if the run failed."""
    listed = subprocess.run(
        [tool("flwr"), "ls", "--format", "json"], env=environment, cwd=home, capture_output=True, text=True, timeout=60
    )
    try:
        newest = json.loads(listed.stdout)["runs"][0]
    except (json.JSONDecodeError, KeyError, IndexError):
        return "", " ".join(listed.stderr.split())[-300:]
    return str(newest.get("status", "")), str(newest.get("status-details") or "").strip()


def _toml_lines(run_config: Mapping[str, Any]) -> str:
    return "".join(f"{key} = {_toml(value)}\n" for key, value in run_config.items())


def _toml(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
