"""Which runs `train.compile: auto` compiles, and the process that does it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time

import pytest

from fedbn_flwr.experiment.find import load_experiment
from fedbn_flwr.extensions.compiled import ahead
from fedbn_flwr.extensions.compiled.ahead import decided
from tests.support.command import PATIENCE
from tests.support.experiments import read

# An MLP on the embedded digits: 2 * (64 * 32 + 32 * 10) operations per image and forward pass, three times as many per
# training pass, 1,437 images per epoch: 20 million operations per epoch.
DIGITS = """
clients: 4
data: {name: digits}
model: {name: mlp, norm: bn}
train: {epochs: 10, compile: auto}
"""


@pytest.mark.parametrize(("rounds", "expected"), [(10, False), (1_000_000, True)])
def test_auto_compiles_long_runs(rounds: int, expected: bool) -> None:
    run = decided(read(DIGITS, f"rounds={rounds}"))
    assert run.train.compile is expected


def test_other_values_stay() -> None:
    for value in (True, False):
        assert decided(read(DIGITS, f"train.compile={str(value).lower()}")).train.compile is value


def test_auto_does_not_compile_without_data_in_this_process() -> None:
    run = decided(read(DIGITS, "rounds=1000000", "evaluate.server=false"))
    assert run.train.compile is False


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_process_that_compiles_prints_nothing(
    stop: signal.Signals, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C in a terminal reaches it too, with the handlers of the process that it is a copy of."""
    ready, compiles = multiprocessing.Pipe(duplex=False)

    def client_of(*_: object) -> None:
        compiles.send(None)
        time.sleep(PATIENCE)

    monkeypatch.setattr(ahead, "client_of", client_of)
    experiment = load_experiment("quick")
    previous = signal.signal(stop, signal.default_int_handler)
    process = multiprocessing.get_context("fork").Process(
        target=ahead._compile, args=(experiment, experiment.runs[0], [])
    )
    process.start()
    signal.signal(stop, previous)
    assert ready.poll(PATIENCE)
    assert process.pid is not None
    os.kill(process.pid, stop)
    process.join(PATIENCE)
    assert process.exitcode == -stop
    assert capfd.readouterr().err == ""
