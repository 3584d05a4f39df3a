"""Accuracy, re-estimated statistics, and the figures of a run for its clients' own models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

from fedbn_flwr import BNClient, build_model
from fedbn_flwr.client.evaluation import evaluate
from fedbn_flwr.data.batches import TestBatches
from fedbn_flwr.data.load import load
from fedbn_flwr.data.partitions import share_test
from fedbn_flwr.data.source import Source
from fedbn_flwr.errors import SettingsError
from fedbn_flwr.experiment.file.layers import load_experiment
from fedbn_flwr.experiment.listeners.evaluate import own_means, values_in
from fedbn_flwr.experiment.prepare import make_rule
from fedbn_flwr.experiment.registry import STRATEGIES, build_strategy
from fedbn_flwr.experiment.run.launch import carry_out
from fedbn_flwr.norms.statistics import reestimate
from fedbn_flwr.strategies import as_rule
from fedbn_flwr.tasks import TASKS
from tests.support.nets import net, some_batches

CPU = torch.device("cpu")


# --- evaluate ----------------------------------------------------------------


def test_a_batch_whose_pixels_are_all_ignored_does_not_count() -> None:
    """PyTorch's mean over no pixel is NaN."""
    model, loss = nn.Conv2d(1, 3, 1), nn.CrossEntropyLoss(ignore_index=255)
    images, masks = torch.randn(4, 1, 5, 5), torch.randint(3, (4, 5, 5))
    ignored = images, torch.full_like(masks, 255)
    found, expected = (
        evaluate(model, batches, loss, torch.device("cpu"))
        for batches in ([(images, masks), ignored, (images, masks)], [(images, masks)])
    )
    assert found["loss"] == pytest.approx(expected["loss"])
    assert found["accuracy"] == expected["accuracy"]


@pytest.mark.parametrize("empty", [[], [(inputs[:0], labels[:0]) for inputs, labels in some_batches()]])
def test_no_batch_and_batches_without_examples_are_not_called_masked(empty: list[Any]) -> None:
    with pytest.raises(ValueError, match="there are no examples to evaluate on"):
        evaluate(net(), empty, F.cross_entropy, CPU)


# --- several sets ------------------------------------------------------------


def test_a_client_names_the_figures_of_its_second_set() -> None:
    model, every = net(), some_batches()
    client = BNClient(model, every, {"": every, "own": every[:1]})
    arrays = {key: value.numpy() for key, value in model.state_dict().items()}
    metrics = client.evaluate_round(arrays, {})
    whole, own = (evaluate(net(), data, F.cross_entropy, CPU) for data in (every, every[:1]))
    assert metrics == {**whole, **{f"own-{key}": value for key, value in own.items()}}
    assert metrics["num-examples"] == 13, "the weight: the size of the first set, which all clients share"


def test_batches_of_some_indices_hold_these_images() -> None:
    data = load(Source(name="digits"))
    rows = torch.tensor([3, 5, 8, 13, 21])
    some = TestBatches(data.test, data.moments, 2, rows)
    images = torch.cat([images for images, _ in TestBatches(data.test, data.moments, 100)])
    assert some.num_examples == 5
    assert [len(labels) for _, labels in some] == [2, 3], "a single image is evaluated with the batch before"
    assert torch.cat([x for x, _ in some]).equal(images[rows])
    assert torch.cat([y for _, y in some]).equal(data.test.labels[rows])


# --- runs --------------------------------------------------------------------

RUNS = """
rounds: 2
clients: 3
data: {name: digits, partition: {kind: classes, classes_per_client: 4}}
model: {name: cnn}
train: {lr: 0.05, batch_size: 64, steps: 6}
evaluate: {every: 2}
engine: {workers: 0, device: cpu}
runs:
  FedAvg: {strategy: {name: FedAvg}}
  FedBN: {strategy: {name: FedBN}}
  Reestimated: {strategy: {name: SiloBN}, evaluate: {statistics: reestimated, clients: false}}
  Static: {strategy: {name: HeteroBN}, model: {norm: sbn}}
  Queried: {strategy: {name: HeteroBN, statistics: query}, model: {norm: sbn}}
  Standalone: {strategy: {name: Standalone}}
  Centralized: {clients: 1, data: {partition: {kind: iid}}}
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    out = tmp_path_factory.mktemp("runs") / "out"
    carry_out(load_experiment(RUNS), out, resume=False)
    return {path.name: path for path in out.iterdir() if path.is_dir()}


def summary(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return found


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_clients_of_rules_that_personalise_are_evaluated_on_all_examples_the_others_on_own(
    runs: dict[str, Path],
) -> None:
    reported = {name for name, folder in runs.items() if "clients_accuracy" in summary(folder)}
    assert reported == {"FedBN", "Standalone"}
    asked = {name for name, folder in runs.items() if "clients_own_accuracy" in summary(folder)}
    assert asked == runs.keys() - {"Reestimated"}, "for which the file says false"
    first, last = lines(runs["FedBN"])
    assert "clients_accuracy" not in first
    assert summary(runs["FedBN"])["clients_accuracy"] == last["clients_accuracy"]
    assert summary(runs["FedBN"])["clients_own_accuracy"] == last["clients_own_accuracy"]
    assert summary(runs["FedBN"])["accuracy"] == last["accuracy"] != last["clients_accuracy"]
    # Clients that hold four classes of ten know these best.
    assert last["clients_own_accuracy"] > last["clients_accuracy"]


def values(folder: Path, server_round: int) -> dict[str, dict[str, float]]:
    found = [json.loads(line) for line in (folder / "clients.jsonl").read_text().splitlines()]
    assert [line["round"] for line in found] == [1, 2]
    clients: dict[str, dict[str, float]] = found[server_round - 1]["clients"]
    return clients


def test_the_history_has_the_spread_of_the_clients_values(runs: dict[str, Path]) -> None:
    """The means are those over test examples for all clients' examples, and over clients for their own."""
    clients, last = values(runs["FedBN"], 2), lines(runs["FedBN"])[1]
    assert list(clients) == ["0", "1", "2"]
    for metric in ("accuracy", "loss", "own_accuracy", "own_loss"):
        each = np.array([client[metric] for client in clients.values()])
        assert last[f"clients_{metric}"] == pytest.approx(each.mean(), rel=1e-13), "all have 360 test examples"
        assert last[f"clients_{metric}_std"] == pytest.approx(each.std(), rel=1e-12)
        worst = each.max() if "loss" in metric else each.min()
        assert last[f"clients_{metric}_worst_tenth"] == worst, "one of three"
        assert summary(runs["FedBN"])[f"clients_{metric}_std"] == last[f"clients_{metric}_std"]
    assert {client["test_examples"] for client in clients.values()} == {len(load(Source(name="digits")).test.labels)}


def test_every_round_has_the_clients_training_values(runs: dict[str, Path]) -> None:
    for name in ("FedAvg", "Standalone"):
        clients = values(runs[name], 1)
        assert all(client.keys() == {"examples", "train_loss"} for client in clients.values())
        total = sum(client["examples"] for client in clients.values())
        assert total == len(load(Source(name="digits")).train.labels)
        mean = sum(client["examples"] * client["train_loss"] for client in clients.values()) / total
        assert lines(runs[name])[0]["train_loss"] == pytest.approx(mean, rel=1e-13)


def test_a_client_without_own_test_images_is_left_out_of_their_mean() -> None:
    """Flower's mean has only what all clients sent; sizes of 100 and 300 do not weigh: (0.5 + 0.7) / 2."""
    sent: list[dict[str, float | int]] = [
        {"own-accuracy": 0.5, "num-examples": 100, "partition-id": 0},
        {"own-accuracy": 0.7, "num-examples": 300, "partition-id": 1},
        {"num-examples": 9, "partition-id": 2},
    ]
    values = {each["partition-id"]: values_in({"accuracy": 0.1, "loss": 1.0, **each}, "test_examples") for each in sent}
    assert own_means(values) == {"own_accuracy": pytest.approx(0.6, rel=1e-15)}  # type: ignore[arg-type]


def test_a_summary_says_whose_accuracy_and_which_statistics(runs: dict[str, Path]) -> None:
    found = {name: summary(folder) for name, folder in runs.items()}
    alone = found["Standalone"]
    assert alone["accuracy"] == alone["best_test_accuracy"] == alone["clients_accuracy"]
    assert alone["bytes_down"] == alone["bytes_up"] == 0
    assert {name: (each.get("evaluated_with"), each["accuracy_of"]) for name, each in found.items()} == {
        **dict.fromkeys(("FedAvg", "FedBN", "Centralized"), ("model", "the global model")),
        "Reestimated": ("reestimated", "the global model"),
        "Static": ("batch", "the global model"),
        "Queried": ("query", "the global model"),
        "Standalone": (None, "the clients' models, mean"),
    }
    assert found["FedBN"]["global_norm"] == "average"


def test_the_accuracy_of_a_run_is_that_of_its_model_file(runs: dict[str, Path]) -> None:
    data = load(Source(name="digits"))
    test = TestBatches(data.test, data.moments, 100)
    for name, norm in (("FedAvg", "bn"), ("Reestimated", "bn"), ("Static", "sbn"), ("Queried", "sbn")):
        state = load_file(runs[name] / "model.safetensors")
        model = build_model("cnn", 10, norm, input_shape=(1, 8, 8))
        model.load_state_dict(state, strict=False)
        assert ("bn1.running_mean" in state) == (name != "Static")
        if name == "Reestimated":
            model.load_state_dict(reestimate(model, test, CPU, pooled=True)[0], strict=False)
        assert evaluate(model, test, F.cross_entropy, CPU)["accuracy"] == summary(runs[name])["accuracy"], name
        if name != "Static":  # and a plain batch norm with them gives the same
            plain = build_model("cnn", 10, input_shape=(1, 8, 8))
            plain.load_state_dict(state | {k: v for k, v in model.state_dict().items() if "run" in k}, strict=False)
            assert evaluate(plain, test, F.cross_entropy, CPU)["accuracy"] == summary(runs[name])["accuracy"], name


def test_training_is_the_same_whether_statistics_are_queried_or_not(runs: dict[str, Path]) -> None:
    static, queried = (load_file(runs[name] / "model.safetensors") for name in ("Static", "Queried"))
    assert {key for key in queried if key not in static} == {
        f"{layer}.running_{what}" for layer in ("bn1", "bn2") for what in ("mean", "var")
    }
    assert all(queried[key].equal(value) for key, value in static.items())


def test_the_query_is_asked_in_evaluated_rounds_and_counted_apart(runs: dict[str, Path]) -> None:
    (first, last), (_, plain) = lines(runs["Queried"]), lines(runs["Static"])
    assert first["other_messages"] == 6, "before the first round each node is asked for its partition"
    assert plain["other_messages"] == 6, "its clients evaluate, since those of other runs do"
    assert last["other_messages"] == 6 + plain["other_messages"]
    assert (last["bytes_down"], last["bytes_up"]) == (plain["bytes_down"], plain["bytes_up"])


def test_standalone_without_clients_evaluation_is_refused() -> None:
    (run,) = load_experiment("strategy: {name: Standalone}\nevaluate: {clients: false}").runs
    with pytest.raises(
        SettingsError, match=r"evaluate\.clients is false, but strategy Standalone trains no global model"
    ):
        make_rule(run)


def test_only_personalising_strategies_evaluate_clients_by_default() -> None:
    assert {name for name in STRATEGIES if as_rule(build_strategy({"name": name})).traits.local} == {
        "FedBN", "FedRep", "SiloBN", "Standalone",
    }  # fmt: skip


# --- own test images ---------------------------------------------------------


def test_own_test_images_are_shared_as_the_training_images_are() -> None:
    """Class 0: three quarters and one quarter of 10, which is 7.5 and 2.5; class 1: all for client 1; class 2: none."""
    labels = torch.tensor([0] * 8 + [1] * 4)
    parts = [torch.arange(6), torch.arange(6, 12)]
    test_labels = torch.tensor([0, 1, 2] * 10)
    (first, second), again, other = (share_test(parts, labels, test_labels, seed) for seed in (5, 5, 6))
    assert first.equal(again[0])
    assert not first.equal(other[0])
    assert np.bincount(test_labels[first], minlength=3).tolist() == [8, 0, 0]
    assert np.bincount(test_labels[second], minlength=3).tolist() == [2, 10, 0]
    assert not set(first.tolist()) & set(second.tolist())
    assert first.tolist() == sorted(first.tolist())


def test_many_clients_may_leave_one_without_and_lose_no_image() -> None:
    generator = np.random.default_rng(0)
    labels = torch.from_numpy(generator.integers(0, 5, 400))
    parts = [torch.from_numpy(rows) for rows in np.array_split(generator.permutation(400), 40)]
    test_labels = torch.arange(20) % 6  # class 5 is in no training set
    shares = share_test(parts, labels, test_labels, seed=0)
    together = torch.cat(shares)
    assert sorted(together.tolist()) == [i for i in range(20) if test_labels[i] < 5]
    assert min(len(share) for share in shares) == 0
    for part, share in zip(parts, shares, strict=True):
        for label in range(5):
            exact = (
                int((labels[part] == label).sum()) / int((labels == label).sum()) * int((test_labels == label).sum())
            )
            assert abs(int((test_labels[share] == label).sum()) - exact) < 1


def test_a_metric_receives_what_a_model_returns_if_it_is_a_tuple() -> None:
    class Spread(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x[:, 0], x[:, 1].exp()

    def error(outputs: Any, targets: torch.Tensor) -> float:
        return float((outputs[0] - targets).abs().mean())

    x, y = torch.randn(6, 2), torch.randn(6)
    batches = [(x[:4], y[:4]), (x[4:], y[4:])]
    found = evaluate(Spread(), batches, lambda o, t: F.gaussian_nll_loss(o[0], t, o[1]), torch.device("cpu"), [error])
    assert found["error"] == pytest.approx(float((x[:, 0] - y).abs().mean()))


@pytest.mark.parametrize("last", [nn.Sigmoid(), nn.Identity()], ids=["sigmoid", "logits"])
def test_a_binary_model_that_ends_in_a_sigmoid_gets_a_hint(
    last: nn.Module, flower_log: pytest.LogCaptureFixture
) -> None:
    inputs = torch.linspace(-3, 3, 40)[:, None]
    evaluate(last, [(inputs, (inputs > 0).float())], nn.MSELoss(), torch.device("cpu"), task=TASKS["binary"])
    assert ("remove the sigmoid" in flower_log.text) == isinstance(last, nn.Sigmoid)
