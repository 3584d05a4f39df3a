"""The cost of `evaluate.dynamics`: seconds of its listener in a round, relative to the round's training.

    python benchmarks/dynamics.py

Both are measured in each of ten rounds of one run, without the first. Prints median, minimum and maximum in percent.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path

from fedbn_flwr import LocalGrid, client_app
from fedbn_flwr.engines.metered import MeteredGrid
from fedbn_flwr.experiment.file.layers import load_experiment
from fedbn_flwr.experiment.listeners.dynamics import Dynamics
from fedbn_flwr.experiment.listeners.listener import FinishedRound, Running
from fedbn_flwr.experiment.node import ClientMaker
from fedbn_flwr.experiment.prepare import prepare
from fedbn_flwr.experiment.run.loop import train_round
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.arrays import pack
from fedbn_flwr.models.tensors import initial_arrays
from fedbn_flwr.results.folder import RunFolder

CASES = {
    "cnn, 5 clients, 1 step": "{clients: 5, model: {name: cnn}, train: {steps: 1}}",
    "cnn, 5 clients, 20 steps": "{clients: 5, model: {name: cnn}, train: {steps: 20}}",
    "resnet20, 5 clients, 5 steps": "{clients: 5, model: {name: resnet20}, train: {steps: 5}}",
    "resnet20, 100 clients, 1 step": "{clients: 100, model: {name: resnet20}, train: {steps: 1}}",
}
ROUNDS = 10


class Timed(Dynamics):
    seconds = 0.0

    def on_round(self, running: Running, finished: FinishedRound) -> FinishedRound:
        start = time.perf_counter()
        finished = super().on_round(running, finished)
        self.seconds = time.perf_counter() - start
        return finished


def percentages(text: str, folder: Path) -> list[float]:
    words = ["evaluate.dynamics=true", f"rounds={ROUNDS}", "train.lr=0.02", "train.batch_size=20", "engine.device=cpu"]
    experiment = load_experiment(text, words)
    (prepared,) = prepare(experiment)
    workers = os.cpu_count() or 1
    app = client_app(ClientMaker(experiment))
    with LocalGrid(app, prepared.run.clients, workers=workers, threads=1) as grid:
        arrays = pack(initial_arrays(prepared.model))
        prepared.rule.begin(ROUNDS, arrays)
        identity = {protocol.RUN: prepared.name, protocol.TOKEN: "0" * 32}
        running = Running(prepared, MeteredGrid(grid), RunFolder(folder), identity)
        listener = Timed()
        finished = FinishedRound(0, arrays, arrays)
        listener.on_start(running, finished)
        shares = []
        for _ in range(ROUNDS):
            start = time.perf_counter()
            finished = listener.on_round(running, train_round(running, finished))
            shares.append(100 * listener.seconds / (time.perf_counter() - start - listener.seconds))
    return shares[1:]


if __name__ == "__main__":
    for name, text in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            values = percentages(text, Path(folder))
        print(f"{name}: {statistics.median(values):.2f} % ({min(values):.2f} to {max(values):.2f})", flush=True)
