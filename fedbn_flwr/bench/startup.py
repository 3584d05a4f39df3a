"""The time that `fedbn` takes to start."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from .common import Figure, Options, figure, seconds


def start(options: Options) -> Iterator[Figure]:
    """From the command to its first answer, and to the first round of an experiment."""
    fedbn = [sys.executable, "-m", "fedbn_flwr.cli"]

    def ask_for_help() -> None:
        subprocess.run([*fedbn, "--help"], check=True, capture_output=True)

    def first_round() -> float:
        with tempfile.TemporaryDirectory() as folder:
            experiment = "{clients: 2, rounds: 1, model: {name: resnet20}, train: {steps: 1}, engine: {workers: 0}}"
            run = [*fedbn, "run", experiment, "--out", f"{folder}/out"]
            begun = time.perf_counter()
            process = subprocess.Popen(run, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
            try:
                while not any(file.stat().st_size for file in Path(folder).rglob("history.jsonl")):
                    if process.poll() is not None or time.perf_counter() - begun > 120:
                        assert process.stderr is not None
                        raise RuntimeError(f"{' '.join(run)} finished no round: {process.stderr.read().decode()}")
                    time.sleep(0.005)
                return time.perf_counter() - begun
            finally:
                process.communicate(timeout=120)

    ask_for_help()
    yield figure("fedbn --help", [seconds(ask_for_help) for _ in range(options.repeats)], "s", most=0.5)
    times = [first_round() for _ in range(options.repeats)]
    yield figure("fedbn run on digits, to the end of the first round", times, "s", most=3)
