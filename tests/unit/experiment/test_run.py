"""A run's file is read once and its strategies are built once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import fedbn_flwr.experiment.find as experiment_find
import fedbn_flwr.experiment.prepare as experiment_prepare
from fedbn_flwr import cli

EXPERIMENT = """
rounds: 1
clients: 2
train: {steps: 1}
engine: {workers: 0, device: cpu}
runs:
  FedAvg: {strategy: {name: FedAvg}}
  FixBN: {strategy: {name: FixBN, freeze_round: 1, base: {name: FedProx, proximal_mu: 0.1}}}
"""


def test_a_file_is_read_and_parsed_once_and_each_strategy_built_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "experiment.yaml"
    file.write_text(EXPERIMENT)
    count: Counter[str] = Counter()
    read, parse, build = Path.read_text, experiment_find.parse_yaml, experiment_prepare.build_strategy

    def counted_read(path: Path, *args: Any, **kwargs: Any) -> str:
        count["read"] += path == file
        return read(path, *args, **kwargs)

    def counted_parse(text: str) -> Any:
        content = parse(text)
        count["parsed"] += isinstance(content, dict) and "runs" in content
        return content

    def counted_build(spec: Any, **arguments: Any) -> Any:
        count[spec["name"]] += 1
        return build(spec, **arguments)

    monkeypatch.setattr(Path, "read_text", counted_read)
    monkeypatch.setattr(experiment_find, "parse_yaml", counted_parse)
    monkeypatch.setattr(experiment_prepare, "build_strategy", counted_build)
    assert cli.main(["run", str(file), "train.lr=0.05", "--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "FixBN" / "model.safetensors").exists()
    assert count == {"read": 1, "parsed": 1, "FedAvg": 1, "FixBN": 1}
