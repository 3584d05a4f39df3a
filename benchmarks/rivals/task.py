"""What all candidates train, and how they are asked for a round. NumPy alone: rivals have environments of their own."""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

CLIENTS, EXAMPLES, BATCH, CLASSES, RATE = 10, 500, 20, 10, 0.05
STEPS = CLIENTS * EXAMPLES // BATCH  # of all clients in a round, which is one pass over their examples

Array = np.ndarray[Any, Any]


class Network(NamedTuple):
    title: str
    shape: tuple[int, ...]  # of an example


NETWORKS = {
    "mlp": Network("MLP 64-64-32-10", (64,)),
    "mlp-bn": Network("MLP with batch norm", (64,)),
    "cnn": Network("CNN, 28 pixels", (1, 28, 28)),
    "cnn-bn": Network("CNN with batch norm", (1, 28, 28)),
    "resnet20": Network("ResNet-20, 32 pixels", (3, 32, 32)),
}


def write(file: Path, network: str, initial: Mapping[str, Array]) -> None:
    """Random examples of each client, and the initial values of the network's parameters."""
    draw = np.random.RandomState(0)  # the same numbers with every version of NumPy
    inputs = draw.standard_normal((CLIENTS, EXAMPLES, *NETWORKS[network].shape)).astype(np.float32)
    targets = draw.randint(CLASSES, size=(CLIENTS, EXAMPLES))
    named: dict[str, Any] = {f"initial/{name}": value for name, value in initial.items()}
    np.savez(file, inputs=inputs, targets=targets, **named)


class Task:
    """In a candidate: what its command line asks for."""

    def __init__(self) -> None:
        file, self.network, processes, trained = sys.argv[1:]
        self.processes, self._trained = int(processes), trained
        with np.load(file) as stored:
            self.inputs, self.targets = stored["inputs"], stored["targets"]
            self.initial = {
                name.partition("/")[2]: stored[name] for name in stored.files if name.startswith("initial/")
            }

    def serve(
        self, one_round: Callable[[], object], parameters: Callable[[], Mapping[str, Array]], *packages: str
    ) -> None:
        """Train a round for each line of standard input and answer with its seconds; the first model is stored."""
        versions = {name: metadata.version(name) for name in (*packages, "numpy")}
        print(json.dumps({"python": platform.python_version(), **versions}), flush=True)
        for number, _ in enumerate(sys.stdin):
            start = time.perf_counter()
            one_round()
            seconds = time.perf_counter() - start
            if number == 0:
                named: dict[str, Any] = {**parameters()}
                np.savez(self._trained, **named)
            print(seconds, flush=True)
