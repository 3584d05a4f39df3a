"""`evaluate.domains`: each client tests its own model on the examples of every domain."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedbn_flwr.commands import cli
from fedbn_flwr.results.folder.writer import RunFolder

EXPERIMENT = """
rounds: 2
clients: 3
data:
  {name: digits_five, random: true, examples: 90, test_examples: 60, domains: [mnist, usps, svhn], partition: domain}
model: lenet
train: {lr: 0.01, batch_size: 8, steps: 1}
evaluate: {every: 2, domains: true}
engine: {workers: 0, device: cpu}
runs: {one: {strategy: FedBN}}
"""
DOMAINS = ("mnist", "svhn", "usps")


def test_each_client_s_model_is_tested_on_every_domain(tmp_path: Path) -> None:
    """Of 20 test examples each, so that the mean over the domains is the figure of all, and that of the client's domain
    the figure of its own examples."""
    file = tmp_path / "experiment.yaml"
    file.write_text(EXPERIMENT)
    assert cli.main(["run", str(file), "--out", str(tmp_path / "out")]) == 0
    folder = RunFolder(tmp_path / "out" / "one")
    clients = folder.lines("clients.jsonl")[-1]["clients"]
    assert len({each["loss_mnist"] for each in clients.values()}) == 3, "each client has its own model"
    for each in clients.values():
        (own,) = (domain for domain in DOMAINS if f"own_loss_{domain}" in each)
        for name in ("loss", "accuracy"):
            assert sum(each[f"{name}_{domain}"] for domain in DOMAINS) / 3 == pytest.approx(each[name])
            assert each[f"{name}_{own}"] == pytest.approx(each[f"own_{name}"])
    line = folder.lines("history.jsonl")[-1]
    for domain in DOMAINS:
        mean = sum(each[f"accuracy_{domain}"] for each in clients.values()) / 3
        assert line[f"clients_accuracy_{domain}"] == pytest.approx(mean)
    assert "clients' accuracy, by domain" in (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
