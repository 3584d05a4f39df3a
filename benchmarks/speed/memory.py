"""The memory of a run, with all of its processes, beside that of a plain PyTorch loop."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from .common import BATCH, Figure, Options, figure

_CLIENTS, _SHARE = 100, 0.1  # of which a tenth train in a round
_IMAGES, _TEST, _STEPS = 50_000, 400, 2
_EVERY = 0.02  # seconds between samples


def memory(options: Options) -> Iterator[Figure]:
    """The peak memory of two rounds with ResNet-18, 10 of 100 clients in each, relative to a bare loop."""
    if not Path("/proc/self/smaps_rollup").exists():
        return
    sizes = [_IMAGES, _TEST, _STEPS, BATCH]
    images = (_IMAGES + _TEST) * 3 * 32 * 32
    n = options.workers
    experiment = {
        "clients": _CLIENTS,
        "rounds": 2,
        "data": {"name": "cifar10", "random": True, "examples": _IMAGES, "test_examples": _TEST, "augment": []},
        "model": {"name": "resnet18"},
        "strategy": {"name": "FedAvg", "fraction_train": _SHARE},
        "train": {"steps": _STEPS, "batch_size": BATCH, "momentum": 0.9, "lr": 0.01},
        "engine": {"workers": n, "device": "cpu"},
    }
    bare, federated = [], []
    for _ in range(options.repeats):
        bare.append(peak([sys.executable, "-m", "benchmarks.speed.bare", *map(str, sizes)]))
        with tempfile.TemporaryDirectory() as folder:
            run = [
                sys.executable,
                "-m",
                "fedbn_flwr.commands.cli",
                "run",
                json.dumps(experiment),
                "--out",
                f"{folder}/out",
            ]
            federated.append(peak(run))
    yield figure("bare loop, with its images", [each / 2**20 for each in bare], "MiB")
    yield figure(f"run with {n} workers", [each / 2**20 for each in federated], "MiB")
    yield figure("images", [images / 2**20], "MiB")
    pairs = list(zip(federated, bare, strict=True))
    yield figure("(run - images) / bare loop", [(f - images) / b for f, b in pairs], "x", most=1.5)
    # a loop on each core that works on the same images
    alike = [(f - images) / (max(1, n) * (b - images)) for f, b in pairs]
    yield figure(f"(run - images) / {n} bare loops without images", alike, "x")


def peak(command: Sequence[str]) -> int:
    """The largest sum, over a process and its descendants, of the memory that is no part of a file, in bytes.

    The kernel divides each page by the number of processes that share it (PSS), so that what forked processes share
    counts once. Program files are left out, which other programs on the machine may share too.
    """
    most = 0
    with tempfile.TemporaryFile() as errors:  # a pipe that is not read could fill
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors)
        try:
            while process.poll() is None:
                most = max(most, sum(map(_memory, _descendants(process.pid))))
                time.sleep(_EVERY)
        finally:
            process.kill()
            process.wait()
        if process.returncode:
            errors.seek(0)
            raise RuntimeError(f"{' '.join(command)} failed: {errors.read().decode()}")
    return most


def _memory(process: int) -> int:
    try:
        text = Path(f"/proc/{process}/smaps_rollup").read_text()
    except OSError:  # it has ended
        return 0
    return 1024 * sum(map(int, re.findall(r"^Pss_(?:Anon|Shmem):\s+(\d+) kB$", text, re.MULTILINE)))


def _descendants(first: int) -> list[int]:
    """A process and all that it and its descendants have started."""
    children: dict[int, list[int]] = {}
    for number in filter(str.isdigit, os.listdir("/proc")):
        try:
            status = Path(f"/proc/{number}/stat").read_text()
        except OSError:
            continue
        parent = int(status.rpartition(")")[2].split()[1])  # after the name, which may contain anything
        children.setdefault(parent, []).append(int(number))
    found = [first]
    for each in found:
        found += children.get(each, [])
    return found
