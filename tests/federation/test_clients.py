"""docs/clients.md: its experiments, and each figure computed from the files of their runs."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context, RecordDict
from torch import nn
from torch.nn import functional as F

from fedbn_flwr import BNClient
from fedbn_flwr.client.evaluation import evaluate
from fedbn_flwr.data.batches import ClientBatches, TestBatches
from fedbn_flwr.data.load import load
from fedbn_flwr.data.source import Source
from fedbn_flwr.errors import MessageError, SettingsError
from fedbn_flwr.experiment.data import own_test, partition_of
from fedbn_flwr.experiment.file.layers import load_experiment
from fedbn_flwr.experiment.prepare import make_rule, prepare
from fedbn_flwr.experiment.run.loop import carry_out
from fedbn_flwr.experiment.settings import Settings
from fedbn_flwr.messages import protocol
from fedbn_flwr.results.folder import RunFolder
from fedbn_flwr.results.result import Results
from tests.support.command import ROOT
from tests.support.experiments import fault
from tests.support.nets import net, some_batches
from tests.support.records import content
from tests.support.runs import saved_round
from tests.support.sessions import outcome, session

CPU = torch.device("cpu")
PAGE = re.findall(r"^```yaml\n(.*?)^```", (ROOT / "docs" / "clients.md").read_text(), re.DOTALL | re.MULTILINE)


def carried_out(text: str, out: Path, *changes: str) -> dict[str, Path]:
    carry_out(load_experiment(text, ["engine.device=cpu", *changes]), out, resume=False)
    return {path.name: path for path in out.iterdir() if path.is_dir()}


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The runs of the page's experiments: two with unseen clients, and the one that stops early."""
    unseen, early = PAGE
    out = tmp_path_factory.mktemp("runs")
    runs = carried_out(unseen, out / "unseen", "engine.workers=0")
    runs["early"] = carried_out(early, out / "early", "engine.workers=0", "train.steps=3", "evaluate.patience=2")[
        "FedAvg"
    ]
    return runs


def settings(folder: Path) -> Settings:
    return Settings.model_validate(RunFolder(folder).config())


def clients_of(folder: Path, server_round: int = -1) -> dict[str, dict[str, float]]:
    clients: dict[str, dict[str, float]] = RunFolder(folder).lines("clients.jsonl")[server_round]["clients"]
    return clients


def own_accuracy(model: nn.Module, folder: Path, client: int) -> float:
    run, data = settings(folder), load(Source(name="digits"))
    rows = own_test(run.data, run.clients, run.seed, "cpu")[client]
    return float(evaluate(model, TestBatches(data.test, data.moments, 100, rows), F.cross_entropy, CPU)["accuracy"])


def summary(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return found


# --- clients that never trained ----------------------------------------------


def test_unseen_clients_do_not_train(page: dict[str, Path]) -> None:
    for name in ("FedAvg", "SiloBN"):
        assert [line["clients"] for line in RunFolder(page[name]).history()] == [4] * 4
        assert clients_of(page[name], 0).keys() == {"0", "1", "2", "3"}
        checkpoint = RunFolder(page[name]).checkpoint
        assert sorted(checkpoint.read().trained) == [0, 1, 2, 3]


@pytest.mark.parametrize("name", ["FedAvg", "SiloBN"])
def test_unseen_clients_use_and_tune_the_whole_global_model(name: str, page: dict[str, Path]) -> None:
    """A twin in plain PyTorch: the model file, and ten steps of torch.optim.SGD."""
    (result,) = Results.read(page[name])
    run, data, values = settings(page[name]), load(Source(name="digits")), clients_of(page[name])
    accuracies = []
    for client in (4, 5):
        model = result.model()
        plain = own_accuracy(model, page[name], client)
        rows = partition_of(run.data, run.clients, run.seed, "cpu")[client]
        batches = ClientBatches(data.train, rows, data.moments, batch_size=32, client=client, seed=run.seed)
        tune(model, batches, steps=10, lr=0.05, server_round=4)
        accuracies.append((plain, own_accuracy(model, page[name], client)))
        found = values[str(client)]
        assert (found["unseen_accuracy"], found["unseen_accuracy_tuned"]) == accuracies[-1]
    means = [sum(column) / 2 for column in zip(*accuracies, strict=True)]
    found = summary(page[name])
    assert [found["unseen_accuracy"], found["unseen_accuracy_tuned"]] == pytest.approx(means, rel=1e-14)
    assert means[1] > means[0]


def tune(model: nn.Module, batches: ClientBatches, *, steps: int, lr: float, server_round: int) -> None:
    model.train()
    optimizer, epoch = torch.optim.SGD(model.parameters(), lr=lr), 0
    while steps:
        for inputs, labels in batches.epoch(server_round, epoch):
            if not steps:
                break
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            steps -= 1
        epoch += 1


def test_fine_tuning_changes_neither_the_model_nor_any_stored_state() -> None:
    batches: list[Any] = some_batches()
    context = Context(1, 7, {"partition-id": 2}, RecordDict(), {})
    client = BNClient(net(), batches, batches, lr=0.1, momentum=0.9, keep_momentum=True, context=context)
    arrays = {key: value.numpy().copy() for key, value in net().state_dict().items()}
    client.train_round(arrays, {})
    before, stored = copy.deepcopy(client.model.state_dict()), content(context.state)
    random = torch.get_rng_state()
    plain = client.evaluate_round({}, {})
    tuned = client.evaluate_round({}, {protocol.TUNE_STEPS: 5, protocol.TUNE_LR: 0.5})
    assert {key: tuned[key] for key in plain} == plain
    assert tuned["tuned-loss"] != plain["loss"]
    assert content(context.state) == stored
    assert all(value.equal(before[key]) for key, value in client.model.state_dict().items())
    assert torch.get_rng_state().equal(random)


def test_a_client_that_cannot_tune_says_so() -> None:
    client = BNClient(net(), some_batches(), some_batches())
    with pytest.raises(MessageError, match=r"fedbn\.tune-step' .*did you mean 'fedbn\.tune-steps'"):
        client.evaluate_round({}, {"fedbn.tune-step": 5})


# --- the best round ----------------------------------------------------------


def test_the_best_round_is_that_of_the_validation_images(page: dict[str, Path]) -> None:
    lines, found = RunFolder(page["early"]).history(), summary(page["early"])
    accuracies = [line["validation_accuracy"] for line in lines]
    best = accuracies.index(max(accuracies))
    assert (found["best_round"], found["best_validation_accuracy"]) == (best + 1, accuracies[best])
    assert found["best_round_accuracy"] == lines[best]["accuracy"]
    (result,) = Results.read(page["early"])
    data = load(Source(name="digits"))
    for file, line in (("model-best.safetensors", lines[best]), ("model.safetensors", lines[-1])):
        test = TestBatches(data.test, data.moments, 100)
        assert evaluate(result.model(file=file), test, F.cross_entropy, CPU)["accuracy"] == line["accuracy"]


def test_a_run_ends_after_evaluations_that_are_not_better(page: dict[str, Path]) -> None:
    accuracies = [line["validation_accuracy"] for line in RunFolder(page["early"]).history()]
    reference, waited, ends = 0.0, 0, []
    for accuracy in accuracies:
        waited = 0 if accuracy > reference + 0.001 else waited + 1
        reference = accuracy if waited == 0 else reference
        ends.append(waited == 2)
    assert ends == [False] * (len(accuracies) - 1) + [True]
    found = summary(page["early"])
    assert found["rounds"] == len(accuracies) < 30
    assert found["status"] == "finished"
    assert found["stopped_early"].startswith("validation accuracy has not improved by more than 0.001 in 2 evaluations")
    assert saved_round(page["early"]) == found["rounds"]


def test_clients_hold_out_a_tenth_of_their_images(page: dict[str, Path]) -> None:
    run = settings(page["early"])
    parts = partition_of(run.data, run.clients, run.seed, "cpu")
    assert [client["examples"] for client in clients_of(page["early"]).values()] == [
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


@pytest.mark.parametrize("workers", [0, 2])
def test_a_resumed_run_ends_in_the_same_round_with_the_same_files(workers: int, tmp_path: Path) -> None:
    session("early end", tmp_path / "straight")
    for stop in (1, 3, 0):
        session("early end", tmp_path / "run", stop, workers=workers)
    assert outcome(tmp_path / "run") == outcome(tmp_path / "straight")
    assert summary(tmp_path / "run")["rounds"] == 4, "of five"
    best = [(tmp_path / name / "model-best.safetensors").read_bytes() for name in ("run", "straight")]
    assert best[0] == best[1]


# --- settings ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("evaluate: {patience: 5}", "evaluate: patience is 5, but validation is 0"),
        ("evaluate: {finetune_lr: 0.1}", "finetune_lr has no effect without unseen clients"),
        ("evaluate: {validation: 0.6}", "evaluate.validation is 0.6: expected less than or equal to 0.5"),
        ("clients: 3\nevaluate: {unseen: 3}", "evaluate.unseen is 3, but there are 3 clients; expected at most 2"),
    ],
)
def test_settings_without_effect_are_refused(text: str, words: str) -> None:
    assert words in fault(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("strategy: {name: Standalone}\nevaluate: {unseen: 1}", "Standalone trains no global model"),
        (
            "clients: 3\nstrategy: {name: FedAvg, min_train_nodes: 3}\nevaluate: {unseen: 1}",
            "min_train_nodes of FedAvg is 3, but 2 clients train",
        ),
    ],
)
def test_strategies_that_cannot_are_refused(text: str, words: str) -> None:
    (run,) = load_experiment(text).runs
    with pytest.raises(SettingsError, match=re.escape(words)):
        make_rule(run)


def test_a_share_that_holds_out_no_image_is_refused() -> None:
    with pytest.raises(SettingsError, match="less than half an example for each of the 5 clients"):
        prepare(load_experiment("{clients: 5, evaluate: {validation: 0.001}, engine: {device: cpu}}"))
