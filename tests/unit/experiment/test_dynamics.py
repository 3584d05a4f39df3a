"""The figures of the training dynamics, beside the same figures computed channel by channel."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from torch import nn

from fedbn_flwr.experiment.listeners.dynamics import DEVIATION, DRIFT, Window, by_layer
from fedbn_flwr.models.tensors import initial_arrays
from fedbn_flwr.norms.distances import EPS, statistics_in

Arrays = dict[str, np.ndarray]


def model(seed: int) -> Arrays:
    """The arrays of two batch norms in float32, with random statistics."""
    module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5)))
    random = np.random.default_rng(seed)
    arrays = {key: np.array(value) for key, value in initial_arrays(module).items()}
    for key, value in arrays.items():
        if key.endswith("running_mean"):
            arrays[key] = random.normal(size=value.shape).astype(np.float32)
        elif key.endswith("running_var"):
            arrays[key] = random.uniform(0.1, 3, value.shape).astype(np.float32)
    return arrays


def rms(values: list[float]) -> float:
    return math.sqrt(statistics.fmean(value**2 for value in values))


def differences(one: Arrays, other: Arrays, scale: Arrays, layer: str) -> tuple[list[float], list[float]]:
    """Mean differences and variance log-ratios, one for each channel, in Python's floats."""
    mean, var = f"{layer}.running_mean", f"{layer}.running_var"
    channels = range(len(one[mean]))
    return (
        [(float(one[mean][c]) - float(other[mean][c])) / math.sqrt(float(scale[var][c]) + EPS) for c in channels],
        [math.log((float(one[var][c]) + EPS) / (float(other[var][c]) + EPS)) for c in channels],
    )


def compared(one: Arrays, other: Arrays, names: tuple[str, ...]) -> dict[str, dict[str, float]]:
    return by_layer(statistics_in(one), statistics_in(other), names)


def test_drift_is_the_twins() -> None:
    before, after = model(0), model(1)
    found = compared(before, after, DRIFT)
    assert list(found) == ["1", "2.1"]
    for layer in found:
        means, logs = differences(after, before, after, layer)
        assert found[layer] == pytest.approx({"mean_drift": rms(means), "variance_drift": rms(logs)}, rel=1e-5)


def test_deviation_is_the_twins() -> None:
    client, overall = model(0), model(1)
    for layer, figures in compared(client, overall, DEVIATION).items():
        means, logs = differences(client, overall, overall, layer)
        expected = {
            "mean_deviation": rms(means),
            "variance_deviation": rms(logs),
            "variance_ratio": math.exp(statistics.fmean(logs)),
        }
        assert figures == pytest.approx(expected, rel=1e-5)


def test_the_spread_over_rounds_is_the_twins() -> None:
    """The deviation of the rounds' values, channel by channel, on the scale of the global statistics."""
    rounds, overall = [model(seed) for seed in range(5)], model(9)
    window = Window(statistics_in(rounds[0]))
    for each in rounds:
        window.add(statistics_in(each))
    for layer, (_, scale) in statistics_in(overall).items():
        mean, var = f"{layer}.running_mean", f"{layer}.running_var"
        means, logs = [], []
        for channel, s in enumerate(scale):
            means.append(statistics.pstdev([float(each[mean][channel]) for each in rounds]) / math.sqrt(s + EPS))
            logs.append(statistics.pstdev([math.log(float(each[var][channel]) + EPS) for each in rounds]))
        expected = {"mean_spread": rms(means), "variance_spread": rms(logs)}
        assert window.spreads(layer, scale) == pytest.approx(expected, rel=1e-5)


def test_a_client_with_four_times_the_variance_has_the_ratio_four() -> None:
    overall = model(0)
    client = {key: 4 * value if key.endswith("running_var") else value for key, value in overall.items()}
    figures = compared(client, overall, DEVIATION)["1"]
    assert figures["mean_deviation"] == 0
    assert figures["variance_deviation"] == pytest.approx(math.log(4), rel=1e-3)
    assert figures["variance_ratio"] == pytest.approx(4, rel=1e-3)


def test_a_model_with_group_norm_has_no_layers() -> None:
    assert not statistics_in(initial_arrays(nn.Sequential(nn.Conv2d(1, 4, 1), nn.GroupNorm(2, 4))))
