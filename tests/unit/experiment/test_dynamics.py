"""The figures of the training dynamics, beside the same figures computed channel by channel."""

from __future__ import annotations

import math
import statistics
from pathlib import Path

import numpy as np
import pytest
from torch import nn

from fedbn_flwr.commands import cli
from fedbn_flwr.experiment.listeners.dynamics import DEVIATION, DRIFT, SPREAD, Window, by_layer
from fedbn_flwr.models.tensors import initial_arrays
from fedbn_flwr.norms.distances import EPS, statistics_in
from fedbn_flwr.results.folder.writer import RunFolder
from tests.support.runs import change_summary

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


# --- What `evaluate.dynamics` records, and where it records nothing.


EXPERIMENT = """
rounds: 4
clients: 3
data: {{partition: {{kind: classes, classes_per_client: 4}}}}
train: {{lr: 0.05, batch_size: 16, steps: 2}}
evaluate: {{every: 2, dynamics: true}}
engine: {{workers: 0, device: cpu, checkpoint_every: 2}}
model: {{norm: {norm}}}
runs: {{one: {{strategy: {strategy}}}}}
"""


def run(folder: Path, *words: str, strategy: str = "{name: FedAvg}", norm: str = "bn") -> RunFolder:
    folder.mkdir(exist_ok=True)
    file = folder / "experiment.yaml"
    file.write_text(EXPERIMENT.format(strategy=strategy, norm=norm))
    assert cli.main(["run", str(file), *words, "--out", str(folder / "out")]) == 0
    return RunFolder(folder / "out" / "one")


def test_evaluated_rounds_have_every_layer_and_client(tmp_path: Path) -> None:
    folder = run(tmp_path)
    lines = folder.lines("norms.jsonl")
    assert [line["round"] for line in lines] == [2, 4]
    for line in lines:
        assert list(line["layers"]) == ["bn1", "bn2"]
        assert list(line["clients"]) == ["0", "1", "2"]
        for layer in ("bn1", "bn2"):
            assert 0 < line["layers"][layer]["mean_drift"] < 10
            for client in line["clients"].values():
                assert client[layer]["mean_deviation"] > 0, "clients have other classes"
                assert 0.1 < client[layer]["variance_ratio"] < 10


def test_frozen_statistics_neither_drift_nor_deviate(tmp_path: Path) -> None:
    first, last = run(tmp_path, strategy="{name: FixBN, freeze_round: 3}").lines("norms.jsonl")
    assert first["layers"]["bn1"]["mean_drift"] > 0
    assert set(last["layers"]["bn1"].values()) == {0}
    same = {"mean_deviation": 0, "variance_deviation": 0, "variance_ratio": 1}
    assert {key: last["clients"]["2"]["bn2"][key] for key in same} == same


def test_the_spread_is_over_the_rounds_since_the_line_before(tmp_path: Path) -> None:
    """Frozen after round 2: the clients' statistics vary in rounds 1 and 2, and not in rounds 3 and 4."""
    first, last = run(tmp_path, strategy="{name: FixBN, freeze_round: 2}").lines("norms.jsonl")
    for line, lowest in ((first, 1e-3), (last, 0)):
        spreads = [layer[key] for each in line["clients"].values() for layer in each.values() for key in SPREAD]
        assert len(spreads) == 3 * 2 * 2
        assert min(spreads) >= lowest
        assert max(spreads) <= 1000 * lowest
    single = run(tmp_path / "each", "evaluate.every=1")
    assert not {*single.lines("norms.jsonl")[0]["clients"]["0"]["bn1"]} & {*SPREAD}, "of a single round"


def test_a_resumed_run_has_the_lines_of_an_uninterrupted_one(tmp_path: Path) -> None:
    whole = run(tmp_path)
    expected = (whole.path / "norms.jsonl").read_bytes()
    change_summary(whole.path, status="interrupted")
    whole.add_line("norms.jsonl", {"round": 5, "layers": {}, "clients": {}})  # after the last checkpoint
    resumed = run(tmp_path, "--resume")
    assert (resumed.path / "norms.jsonl").read_bytes() == expected


def test_strategies_whose_clients_send_their_statistics_are_recorded(tmp_path: Path) -> None:
    assert len(run(tmp_path, strategy="{name: FedBN}").lines("norms.jsonl")) == 2


@pytest.mark.parametrize(
    ("strategy", "norm"),
    [("{name: FedAvg}", "gn"), ("{name: FedBN, global_norm: initial}", "bn"), ("{name: Standalone}", "bn")],
)
def test_where_nothing_can_be_recorded_the_log_says_why(
    strategy: str, norm: str, tmp_path: Path, flower_log: pytest.LogCaptureFixture
) -> None:
    folder = run(tmp_path, strategy=strategy, norm=norm)
    assert "one: evaluate.dynamics records nothing: with these settings, clients send no" in flower_log.text
    assert not (folder.path / "norms.jsonl").exists()
