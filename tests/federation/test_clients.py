"""docs/clients.md: its experiments, and each figure computed from the files of their runs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from fedbn_flwr.client.evaluation import evaluate
from fedbn_flwr.data.batches import TestBatches
from fedbn_flwr.data.load import load
from fedbn_flwr.data.source import Source
from fedbn_flwr.experiment.data import shares_of
from fedbn_flwr.experiment.file.layers import load_experiment
from fedbn_flwr.experiment.run.launch import carry_out
from fedbn_flwr.experiment.settings import Settings
from fedbn_flwr.results.folder.writer import RunFolder
from fedbn_flwr.results.several import Results
from tests.support.command import ROOT
from tests.support.marks import slow_except
from tests.support.sessions import outcome, session

CPU = torch.device("cpu")
PAGE = re.findall(r"^```yaml\n(.*?)^```", (ROOT / "docs" / "clients.md").read_text(), re.DOTALL | re.MULTILINE)


def carried_out(text: str, out: Path, *changes: str) -> dict[str, Path]:
    carry_out(load_experiment(text, ["engine.device=cpu", *changes]), out, resume=False)
    return {path.name: path for path in out.iterdir() if path.is_dir()}


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page's run with what it holds out instead of new clients."""
    (text,) = (block for block in PAGE if "unseen" in block)
    (held_out,) = (block for block in PAGE if "validation" in block)
    text = re.sub("^evaluate: .*\n", held_out, text, flags=re.MULTILINE)
    changes = ("only=FedAvg", "engine.workers=0", "rounds=8", "train.steps=3")
    return carried_out(text, tmp_path_factory.mktemp("runs"), *changes)["FedAvg"]


def settings(folder: Path) -> Settings:
    return Settings.model_validate(RunFolder(folder).config())


def clients_of(folder: Path, server_round: int = -1) -> dict[str, dict[str, float]]:
    clients: dict[str, dict[str, float]] = RunFolder(folder).lines("clients.jsonl")[server_round]["clients"]
    return clients


def summary(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return found


# --- the best round ----------------------------------------------------------


@pytest.mark.slow
def test_the_best_round_is_that_of_the_validation_images(page: Path) -> None:
    lines, found = RunFolder(page).history(), summary(page)
    accuracies = [line["validation_accuracy"] for line in lines]
    best = accuracies.index(max(accuracies))
    assert (found["best_round"], found["best_validation_accuracy"]) == (best + 1, accuracies[best])
    assert found["best_round_accuracy"] == lines[best]["accuracy"]
    (result,) = Results.read(page)
    data = load(Source(name="digits"))
    for file, line in (("model-best.safetensors", lines[best]), ("model.safetensors", lines[-1])):
        test = TestBatches(data.test, data.moments, 100)
        assert evaluate(result.model(file=file), test, F.cross_entropy, CPU)["accuracy"] == line["accuracy"]


@pytest.mark.slow
def test_clients_hold_out_a_tenth_of_their_images(page: Path) -> None:
    run = settings(page)
    parts = shares_of(run.data, run.clients, run.seed, "cpu")[0]
    assert [client["examples"] for client in clients_of(page).values()] == [
        len(part) - int(0.1 * len(part) + 0.5) for part in parts
    ]


SMALL = """
rounds: 2
clients: 3
data: {name: digits, partition: {kind: dirichlet, alpha: 0.5}}
train: {lr: 0.05, steps: 4}
evaluate: {validation: 0.2, every: 2}
engine: {workers: 0}
runs:
  server: {}
  clients: {evaluate: {clients: true}}
"""


def test_server_and_clients_measure_the_same_validation_accuracy(tmp_path: Path) -> None:
    """The clients' mean is weighted by their examples: it is the accuracy on the examples of all clients together."""
    runs = carried_out(SMALL, tmp_path)
    (_, server), (_, clients) = (RunFolder(runs[name]).history() for name in ("server", "clients"))
    assert server["validation_accuracy"] == pytest.approx(clients["validation_accuracy"], rel=1e-14)
    assert server["validation_loss"] == pytest.approx(clients["validation_loss"], rel=1e-6)
    assert (runs["server"] / "model.safetensors").read_bytes() == (runs["clients"] / "model.safetensors").read_bytes()
    values = clients_of(runs["clients"]).values()
    assert len({client["validation_examples"] for client in values}) > 1, "clients of different sizes"
    total = sum(client["validation_examples"] for client in values)
    mean = sum(client["validation_examples"] * client["validation_accuracy"] for client in values) / total
    assert clients["validation_accuracy"] == pytest.approx(mean, rel=1e-14)
    assert not [key for key in clients if key.startswith("clients_validation") or "examples" in key]


@pytest.mark.parametrize("workers", slow_except({0}, [0, 2]))
def test_a_resumed_run_has_the_same_best_round_and_files(workers: int, tmp_path: Path) -> None:
    session("best round", tmp_path / "straight")
    for stop in (1, 3, 0):
        session("best round", tmp_path / "run", stop, workers=workers)
    assert outcome(tmp_path / "run") == outcome(tmp_path / "straight")
    best = [(tmp_path / name / "model-best.safetensors").read_bytes() for name in ("run", "straight")]
    assert best[0] == best[1]


# --- new clients -------------------------------------------------------------


@pytest.mark.slow
def test_the_newcomer_s_accuracies_are_those_of_the_page(tmp_path: Path) -> None:
    (text,) = (block for block in PAGE if "unseen" in block)
    found = summary(carried_out(text, tmp_path, "only=FedBN", "engine.workers=0")["FedBN"])
    rows = re.findall(
        r"^\| `(unseen_\w+)` .* (\d+\.\d+)% \|$", (ROOT / "docs" / "clients.md").read_text(), re.MULTILINE
    )
    assert len(rows) == 3
    for key, accuracy in rows:
        assert 100 * found[key] == pytest.approx(float(accuracy), abs=4), key
    assert found["unseen_own_accuracy"] < min(found["unseen_mean_accuracy"], found["unseen_batch_accuracy"]) - 0.04


# --- settings ----------------------------------------------------------------
