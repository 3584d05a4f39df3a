"""Completion on TAB in real shells, on a terminal."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fedbn_flwr import cli
from tests.support.command import PATIENCE

# What is typed, and the line after TAB.
LINES = {
    "fedbn compl": "fedbn completion ",
    "fedbn run dem": "fedbn run demo ",
    "fedbn run --engi": "fedbn run --engine ",
    "fedbn run --engine r": "fedbn run --engine ray ",
    "fedbn run --engine ray qu": "fedbn run --engine ray quick ",
    "fedbn run mine.ya": "fedbn run mine.yaml ",
    "fedbn run quick train.batch_s": "fedbn run quick train.batch_size=",
    "fedbn run quick rounds=1 engine.device=cu": "fedbn run quick rounds=1 engine.device=cuda ",
    "fedbn explain quick strategy.name=FedTANI": "fedbn explain quick strategy.name=FedTANII ",
    "fedbn list strategies Scaf": "fedbn list strategies Scaffold ",
}
START = {
    "bash": (["bash", "--norc", "--noprofile", "-i"], "bind 'set enable-bracketed-paste off'; . {}"),
    "zsh": (["zsh", "-f", "-i"], "unsetopt prompt_cr; autoload -U compinit; compinit -u -D; . {}"),
}


@pytest.fixture
def script(request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[str, Path]:
    shell: str = request.param
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    assert cli.main(["completion", shell]) == 0
    file = tmp_path / f"completion.{shell}"
    file.write_text(capsys.readouterr().out)
    (tmp_path / "mine.yaml").touch()
    return shell, file


@contextmanager
def terminal(shell: str, file: Path) -> Iterator[int]:
    command, setup = START[shell]
    child, screen = pty.fork()
    if child == 0:
        os.chdir(file.parent)
        os.execvpe(
            command[0], command, {"PATH": os.environ["PATH"], "HOME": str(file.parent), "TERM": "dumb", "PS1": "$ "}
        )
    try:
        os.write(screen, f"{setup.format(file)}; echo re''ady\n".encode())
        read_until(screen, "ready\r\n$ ")
        yield screen
    finally:
        os.close(screen)  # ends the shell
        os.waitpid(child, 0)


def read_until(screen: int, text: str) -> str:
    """What appears on a terminal, up to `text`."""
    found, deadline = "", time.monotonic() + PATIENCE
    while text not in found:
        assert select.select([screen], [], [], deadline - time.monotonic())[0], f"no {text!r} in {found!r}"
        found += re.sub(r"\x1b\[[?\d;]*[a-zA-Z]|\x07", "", os.read(screen, 4096).decode())
    return found


@pytest.mark.parametrize("script", ["bash", "zsh"], indirect=True)
def test_tab_completes_the_line(script: tuple[str, Path]) -> None:
    with terminal(*script) as screen:
        for typed, expected in LINES.items():
            os.write(screen, f"{typed}\t".encode())
            line = read_until(screen, expected)
            assert line.endswith(expected), line
            # The shell discards what is typed before it prompts.
            os.write(screen, b"\x15echo re''ady\n")
            read_until(screen, "ready\r\n$ ")


@pytest.mark.parametrize("script", ["fish"], indirect=True)
def test_fish_completes_the_line(script: tuple[str, Path]) -> None:
    for typed, expected in LINES.items():
        command = f"source {script[1]}; complete -C '{typed}'"
        fish = ["fish", "--no-config", "-c", command]
        done = subprocess.run(fish, cwd=script[1].parent, capture_output=True, text=True, timeout=PATIENCE)
        words = [line.split("\t")[0] for line in done.stdout.splitlines()]
        assert words == [expected.split()[-1]], (typed, words, done.stderr)
