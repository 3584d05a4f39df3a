"""Which runs `train.compile: auto` compiles."""

from __future__ import annotations

import pytest

from fedbn_flwr.experiment.compiling import decided
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
