"""The time that `fedbn` takes to start."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from .common import Figure, Options, figure, seconds

LIBRARIES = "import torch, flwr.app, flwr.clientapp, flwr.serverapp"
AT_ONCE = "--help", "list strategies", "run quick rounds=x"  # answered without importing PyTorch or Flower
EXPERIMENT = "{clients: 2, rounds: 1, model: {name: resnet20}, train: {steps: 1}, engine: {workers: 0}}"


def start(options: Options) -> Iterator[Figure]:
    """From the command to its first answer, and to the first round of an experiment."""
    with tempfile.TemporaryDirectory() as folder:
        # As on a user's machine: an environment that writes no compiled files would compile PyTorch at each start.
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
        if sys.dont_write_bytecode:
            environment["PYTHONPYCACHEPREFIX"] = f"{folder}/compiled"

        def answer(words: str) -> float:
            """Its processor time."""
            before = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
            command = [sys.executable, "-m", "fedbn_flwr.commands.cli", *words.split()]
            subprocess.run(command, capture_output=True, env=environment, check=False)
            return sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]) - before

        def load_libraries() -> None:
            subprocess.run([sys.executable, "-c", LIBRARIES], check=True, capture_output=True, env=environment)

        def first_round() -> float:
            with tempfile.TemporaryDirectory(dir=folder) as out:
                return _first_round(Path(out), environment)

        first_round()
        for words in AT_ONCE:
            answer(words)
            times = [answer(words) for _ in range(options.repeats)]
            yield figure(f"fedbn {words}, processor time", times, "s", most=1.0)
        times, ratios = [], []
        for _ in range(options.repeats):
            libraries = seconds(load_libraries)
            times.append(first_round())
            ratios.append(times[-1] / libraries)
        yield figure("fedbn run on digits, to the end of the first round", times, "s", most=2.5)
        yield figure("the same / importing PyTorch and Flower", ratios, "", most=1.25)


def _first_round(out: Path, environment: dict[str, str]) -> float:
    run = [sys.executable, "-m", "fedbn_flwr.commands.cli", "run", EXPERIMENT, "--out", str(out / "runs")]
    begun = time.perf_counter()
    process = subprocess.Popen(run, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment)
    try:
        while not any(file.stat().st_size for file in out.rglob("history.jsonl")):
            if process.poll() is not None or time.perf_counter() - begun > 120:
                assert process.stderr is not None
                raise RuntimeError(f"{' '.join(run)} finished no round: {process.stderr.read().decode()}")
            time.sleep(0.005)
        return time.perf_counter() - begun
    finally:
        process.communicate(timeout=120)
