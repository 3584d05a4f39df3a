"""Runs a program for as long as its parent runs: `python quick.py PARENT CLOCKS flower-supernode ...`. For tests only.

PARENT is the parent's process id. CLOCKS is `real`, or `quick` for one of Flower's programs with shorter waits:
Flower 1.41 polls every 3 s, notices a lost node after 60 s, and starts a Python process for each message, which
imports torch. Here it polls ten times as often, notices after 24 s, and a process that has imported torch forks the
apps of a SuperExec. That process has no connection of its own: in a copy of one that has, gRPC can wait forever. A
busy disk must not fail a test either: the SuperLink's database is written without waiting for the disk, and locked for
a minute, not 5 s, before a request fails.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import entry_points
from types import SimpleNamespace
from typing import TextIO

POLL = 0.3  # seconds
CONSTANTS = {
    "flwr.common.constant": {
        "HEARTBEAT_DEFAULT_INTERVAL": 12,  # for the first of a process; a node is offline when two have passed
        "HEARTBEAT_MIN_INTERVAL": 1,
        "HEARTBEAT_CALL_TIMEOUT": 5,
        "LOG_STREAM_INTERVAL": POLL,
    },
    "flwr.supercore.constant": {
        "PULL_INITIAL_BACKOFF": POLL,
        "PULL_BACKOFF_CAP": 1,
        "SQLITE_PRAGMAS": (
            ("busy_timeout", "60000"),
            ("journal_mode", "WAL"),
            ("synchronous", "OFF"),
            ("foreign_keys", "ON"),
        ),
    },
}
# The packages that an app imports besides its own code, which differs between runs.
PRELOADED = ("torch", "torch.utils.data", "numpy.random", "pydantic.main", "safetensors.torch", "yaml")
SET_DEATH_SIGNAL, SET_NAME = 1, 15  # PR_SET_PDEATHSIG and PR_SET_NAME of prctl(2)


def end_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, also where that is killed: pytest by a timeout."""
    ctypes.CDLL(None).prctl(SET_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended already
        os._exit(1)


def shorten() -> None:
    for module, values in CONSTANTS.items():
        importlib.import_module(module)
        for loaded in [each for name, each in sys.modules.items() if name.startswith("flwr.")]:
            for name in values.keys() & vars(loaded).keys():
                setattr(loaded, name, values[name])
    node = importlib.import_module("flwr.supernode.start_client_internal")
    node.time = SimpleNamespace(sleep=lambda seconds: time.sleep(seconds / 10))  # type: ignore[attr-defined]


def program(name: str) -> object:
    (script,) = entry_points(group="console_scripts", name=name)
    return script.load()


def run(name: str, arguments: Sequence[str]) -> None:
    sys.argv = [name, *arguments]
    main = program(name)
    assert callable(main)
    main()


def fork(command: Sequence[str], stdout: int | None) -> None:
    """Run an app's program in a copy of this process, under its own name."""
    parent = os.getpid()
    if os.fork():
        return
    end_with(parent)
    status = 1
    try:
        if stdout == subprocess.DEVNULL:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            os.dup2(null, 2)
        for number in (signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        ctypes.CDLL(None).prctl(SET_NAME, command[0].encode())
        run(command[0], command[1:])
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def forks() -> TextIO:
    """Where a new process, a copy of this one, reads the apps that it starts: a line of JSON each."""
    parent, (read, write) = os.getpid(), os.pipe()
    if os.fork():
        os.close(read)
        return os.fdopen(write, "w", buffering=1)
    end_with(parent)
    os.close(write)
    for line in os.fdopen(read):
        fork(*json.loads(line))
    os._exit(0)


def preload() -> None:
    """Import what apps need, and have a copy of this process start them; stands for subprocess.Popen."""
    gc.disable()
    for name in PRELOADED:
        importlib.import_module(name)
    for name in ("flwr-clientapp", "flwr-serverapp"):
        program(name)
    gc.freeze()  # apps share the memory of these modules
    gc.enable()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the apps
    executor = importlib.import_module("flwr.supercore.superexec.executor.subprocess_executor")
    requests = forks()

    def start(command: Sequence[str], stdout: int | None = None, stderr: int | None = None) -> None:
        print(json.dumps([command, stdout]), file=requests)

    executor.subprocess = SimpleNamespace(Popen=start, DEVNULL=subprocess.DEVNULL)  # type: ignore[attr-defined]


if __name__ == "__main__":
    parent, clocks, *command = sys.argv[1:]
    end_with(int(parent))
    if clocks == "real":
        os.execvp(command[0], command)
    shorten()
    if command[0] == "flower-superexec":
        os.environ["FLWR_SUPEREXEC_TASK_POLL_INTERVAL"] = str(POLL)
        preload()
    if command[0] == "python":
        sys.argv = command[1:]
        runpy.run_path(command[1], run_name="__main__")
    else:
        run(command[0], command[1:])
