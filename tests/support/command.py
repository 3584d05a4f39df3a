"""Runs the command `fedbn` and other programs as a user does, in a separate process."""

from __future__ import annotations

import atexit
import functools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fedbn_flwr.extensions import declared

# Seconds after which a test gives up on a program. Only one that hangs needs them: a machine that is shared can be many
# times slower at times.
PATIENCE = 900

ROOT = Path(__file__).resolve().parent.parent.parent

UNDRAWN = Path(__file__).with_name("undrawn.py")
PROGRAM = [sys.executable, str(UNDRAWN)]  # `fedbn`; its reports have no pictures
FEDBN = UNDRAWN.read_text(encoding="utf-8")  # for `python`


def environment(**more: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("FEDBN_OUT")}
    return kept | {"FLWR_TELEMETRY_ENABLED": "0", "PYTHONUNBUFFERED": "1"} | more


def fedbn(*words: str | Path, cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    options: dict[str, Any] = {"cwd": cwd, "env": environment(**more), "stdin": subprocess.DEVNULL}
    command = [*PROGRAM, *map(str, words)]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, **options)
    except subprocess.TimeoutExpired as hung:
        raise AssertionError(f"{hung}\n{hung.stdout!r}\n{hung.stderr!r}") from hung


@functools.cache
def _forks() -> subprocess.Popen[str]:
    """It ends with this process, which holds the other end of its input."""
    words = [sys.executable, str(Path(__file__).with_name("forks.py"))]
    server = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment())
    atexit.register(server.__exit__, None, None, None)
    atexit.register(server.kill)  # first, as other processes may hold its input too
    return server


def python(code: str, *words: str | Path, cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """`python -c` in a process that has imported PyTorch and Flower already, and has no matplotlib."""
    with tempfile.TemporaryDirectory() as folder:
        output, error = Path(folder, "output"), Path(folder, "error")
        files = {"folder": str(cwd), "output": str(output), "error": str(error)}
        request = {"code": code, "words": list(map(str, words)), "environment": environment(**more), **files}
        server = _forks()
        assert server.stdin is not None
        assert server.stdout is not None
        print(json.dumps(request), file=server.stdin, flush=True)
        status = int(server.stdout.readline())
        return subprocess.CompletedProcess(request["words"], status, output.read_text(), error.read_text())


def signalled(
    sent: signal.Signals, when: Callable[[], Any], code: str, *words: str | Path, cwd: Path, **more: str
) -> subprocess.CompletedProcess[str]:
    """As `python`, with a signal as soon as `when()` is true; the processes that it started have ended too."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as pool:
        fifo = Path(folder, "alive")
        os.mkfifo(fifo)
        begin = f"import os; os.write(os.open({str(fifo)!r}, os.O_WRONLY), b'%d\\n' % os.getpid())\n"
        running = pool.submit(python, begin + code, *words, cwd=cwd, **more)
        with fifo.open("rb") as alive:  # its processes inherit the other end
            process = int(alive.readline())
            deadline = time.monotonic() + PATIENCE
            while not when():
                assert time.monotonic() < deadline, "it is not true"
                assert not running.done(), running.result()
                time.sleep(0.005)
            os.kill(process, sent)
            alive.read()
        return running.result()


def commands_of(page: str) -> list[list[str]]:
    """The words of the commands of a page, without those of an extension that is not installed."""
    blocks = re.findall(r"^```sh\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    found = [shlex.split(line) for block in blocks for line in block.splitlines()]
    absent = {"check", "model", "predict", "export", "adapt"} - declared("commands").keys()
    return [words for words in found if words[1] not in absent]


def python_blocks(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
