"""What `evaluate.dynamics` records, and where it records nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedbn_flwr.commands import cli
from fedbn_flwr.experiment.listeners.dynamics import SPREAD
from fedbn_flwr.results.folder.writer import RunFolder
from tests.support.runs import change_summary

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
