"""The process that compiles before workers begin."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time

import pytest

from fedbn_flwr.experiment.find import load_experiment
from fedbn_flwr.extensions.compiled import ahead
from tests.support.command import PATIENCE


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
