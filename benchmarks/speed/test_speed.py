"""The measurements run, and measure what they say."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from fedbn_flwr.strategies import FedBN

from .common import random_images
from .memory import peak
from .sharing import Rounds


@pytest.mark.slow
def test_figures_are_printed_as_json() -> None:
    words = ["exchange", "overhead", "--json", "--repeats", "1", "--steps", "1", "--workers", "1"]
    command = [sys.executable, "-m", "benchmarks.speed", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    found = json.loads(done.stdout)
    assert found["options"]["steps"] == 1
    assert found["environment"]["python"]
    for name in ("exchange", "overhead"):
        for figure in found["figures"][name]:
            assert 0 < figure["low"] <= figure["value"] <= figure["high"]
            assert figure["name"]
            assert figure["goal"]


@pytest.mark.slow
def test_a_round_is_never_shorter_than_the_bound_that_it_is_measured_by() -> None:
    steps = np.repeat([1, 2], 50)
    images = random_images(40, torch.device("cpu"))
    rounds = Rounds(images, steps, FedBN, chosen=3, workers=2, how={"keep_momentum": True})
    with rounds.grid:
        ratios = [rounds.train(1), rounds.train(2), rounds.evaluate(2)]
    assert min(ratios) >= 1


def test_memory_that_processes_share_counts_once() -> None:
    """A process with 100 MiB forks two that write to 20 MiB of them."""
    program = """if True:
        import os, time
        held = bytearray(100 << 20)
        held[::4096] = b"x" * (len(held) // 4096)
        for _ in range(2):
            if os.fork() == 0:
                held[: 20 << 20 : 4096] = b"y" * 5120  # one byte of each page: a value of 20 MiB would count too
                break
        time.sleep(1)
    """
    found = peak([sys.executable, "-c", program]) / 2**20
    assert 140 <= found <= 220, "100 and twice 20 MiB, and the interpreters; 300 if shared pages counted three times"
    with pytest.raises(RuntimeError, match="ValueError: no"):
        peak([sys.executable, "-c", "raise ValueError('no')"])
