"""Optimiser, loss, schedule and metrics of an experiment, and what is refused before training."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch
from flwr.app import Context, RecordDict

from fedbn_flwr.client.losses import cross_entropy
from fedbn_flwr.errors import SettingsError
from fedbn_flwr.experiment.node import make_client
from fedbn_flwr.experiment.parts import learning_rate
from fedbn_flwr.experiment.prepare import make_rule, prepare_run
from tests.support.experiments import read

PARTS = """
import numpy as np
import torch

def single(server_round, rounds, lr):
    return np.float32(lr)

def halved(server_round, rounds, lr):
    return lr / 2**server_round + rounds / 1000

def negative(server_round, rounds, lr):
    return -lr

def margin(logits, labels, width=1.0):
    return torch.nn.functional.multi_margin_loss(logits, labels, margin=width)

def per_image(logits, labels):
    return torch.nn.functional.cross_entropy(logits, labels, reduction="none")

def broken(logits, labels):
    raise RuntimeError("no such thing")

def loss(logits, labels):
    return 0.5

error, seconds, clients, accuracy, accuracy_top3, f1_std, own_score, freeze_round = [
    type("Named", (), {"__name__": name, "__call__": lambda self, logits, labels: 0.5})()
    for name in "error seconds clients accuracy accuracy_top3 f1_std own_score freeze_round".split()
]
"""


@pytest.fixture(autouse=True)
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "training_parts.py").write_text(PARTS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "training_parts", raising=False)


BN = "model: {name: cnn}\nclients: 2\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "{strategy: {name: FedTAN}, train: {optimizer: adamw}}",
            r"train.optimizer is 'adamw', but strategy FedTAN needs sgd: the mean of its clients' first steps",
        ),
        (
            "{strategy: {name: FedTANII}, train: {optimizer: {name: Adam, eps: 0.1}}}",
            r"train.optimizer is {'name': 'Adam', 'eps': 0\.1}, but strategy FedTANII needs sgd",
        ),
        (
            "{strategy: {name: FedTAN}, train: {batch_size: 32, of_clients: [{client: 1, batch_size: 8}]}}",
            "train.of_clients has batch_size 8, but strategy FedTAN doesn't exchange the statistics of batches",
        ),
        (
            "{strategy: {name: FedTAN}, train: {clip: 1.0}}",
            "train.clip is 1.0, but strategy FedTAN needs whole gradients: in its first step",
        ),
        (
            "{strategy: {name: GlobalMomentum}, train: {optimizer: adam}}",
            r"train.optimizer is 'adam', but strategy GlobalMomentum averages the momentum of SGD",
        ),
        (
            "{strategy: {name: FixBN, base: {name: GlobalMomentum}}}",
            r"train.momentum is 0.0, but strategy FixBN\(GlobalMomentum.* averages the momentum of SGD",
        ),
        ("train: {optimizer: Muon}", "train.optimizer Muon"),
        (
            "train: {optimizer: adam, momentum: 0.9}",
            "train.momentum is 0.9, but the optimizer adam has none",
        ),
        ("train: {optimizer: 'training_parts:nothing'}", "optimizer='training_parts:nothing'"),
        ("train: {class_weights: [1, 2]}", "train.class_weights has 2 weights, but the data have 10 classes"),
        ("train: {schedule: 'training_parts:negative'}", "train.schedule.kind='training_parts:negative' returned -0.1"),
        (
            "train: {schedule: 'training_parts:broken'}",
            "train.schedule.kind='training_parts:broken' failed: TypeError: broken",
        ),
        (
            "train: {loss: 'training_parts:per_image'}",
            r"returned a tensor of shape \[2\]; expected a diff",
        ),
        (
            "train: {loss: 'training_parts:loss'}",
            "train.loss='training_parts:loss', .* returned float; expected a diff",
        ),
        (
            "train: {loss: 'training_parts:broken'}",
            "train.loss='training_parts:broken', .* failed: .*no such thing",
        ),
        ("train: {loss: {name: 'training_parts:margin', wide: 2}}", "unexpected keyword argument 'wide'"),
        (
            "evaluate: {metrics: ['training_parts:broken']}",
            "a metric of broken failed .*no such thing",
        ),
        (
            "evaluate: {metrics: ['training_parts:loss']}",
            "evaluate.metrics: a function is called 'loss', and a run reports another metric under this name",
        ),
        *(
            (f"evaluate: {{metrics: ['training_parts:{name}']}}", f"a function is called '{name}'")
            for name in ("error", "seconds", "clients", "accuracy", "accuracy_top3", "f1_std", "own_score")
        ),
        (
            "{strategy: {name: FixBN}, evaluate: {metrics: ['training_parts:freeze_round']}}",
            "a function is called 'freeze_round', and a run reports another metric under this name",
        ),
        ("evaluate: {validation: 1.0e-4}", "is 0.0001, which is less than half an example for each of the 2 clients"),
        ("track: tensorbord", "track='tensorbord' is not a tracker; did you mean 'tensorboard'"),
        ("track: 'no_module:here'", "track='no_module:here': cannot import 'no_module'"),
        ("evaluate: {metrics: [auc, auc]}", "evaluate.metrics has the name 'auc' twice"),
    ],
)
def test_what_cannot_train_is_refused_before_training(text: str, words: str) -> None:
    run = read(text, "model.name=cnn", "clients=2")
    with pytest.raises(SettingsError, match=words):
        prepare_run(run, "run", make_rule(run))


@pytest.mark.parametrize(
    "text",
    [
        "{strategy: {name: Scaffold}, train: {optimizer: adamw, clip: 1.0}}",
        "{strategy: {name: FedTAN}, train: {optimizer: {name: sgd, nesterov: true}, momentum: 0.9}}",
        "{strategy: {name: FedAvgGlobalStats}, train: {optimizer: adam}}",
        "{strategy: {name: GlobalMomentum}, train: {momentum: 0.9, clip: 1.0}}",
        "train: {optimizer: rmsprop, momentum: 0.5, weight_decay: 0.1, keep_momentum: true}",
        "train: {loss: {name: 'training_parts:margin', width: 2.0}, schedule: 'training_parts:halved'}",
        "train: {class_weights: balanced, label_smoothing: 0.1}",
        "train: {optimizer: adamw, keep_momentum: true}",
    ],
)
def test_what_can_train_is_accepted(text: str) -> None:
    run = read(text, "model.name=cnn", "clients=2")
    assert prepare_run(run, "run", make_rule(run)).run.train == run.train


def test_a_schedule_of_the_user_gets_the_round_their_number_and_the_rate() -> None:
    run = read("{rounds: 8, train: {lr: 0.4, schedule: 'training_parts:halved'}}")
    assert [learning_rate(run, number) for number in (2, 3)] == pytest.approx([0.1 + 0.008, 0.05 + 0.008])


def test_a_schedule_of_the_user_may_return_a_number_of_numpy() -> None:
    rate = learning_rate(read("{rounds: 8, train: {lr: 0.25, schedule: 'training_parts:single'}}"), 2)
    assert type(rate) is float
    assert rate == 0.25


# --- the client's loss -------------------------------------------------------


def client(text: str, number: int = 0) -> object:
    node = {"partition-id": number, "num-partitions": 2}
    return make_client(Context(1, 1, node, RecordDict(), {"experiment": text}), {})


TWO = "clients: 2, model: {name: cnn}, data: {partition: {kind: classes, classes_per_client: 5}}"


def test_balanced_weights_are_of_the_client_s_own_images() -> None:
    first, second = (client(f"{{{TWO}, train: {{class_weights: balanced}}}}", number) for number in (0, 1))
    for each, absent in ((first, range(5, 10)), (second, range(5))):
        loss = each.loss
        assert loss.func is cross_entropy
        weights = loss.keywords["class_weights"]
        labels = torch.cat([targets for _, targets in each.train_data.epoch(1, 0)])
        assert not set(labels.tolist()) & set(absent)
        assert weights[labels].mean().item() == pytest.approx(1, rel=1e-3), "but for the last image, if it is left out"
        counts = torch.bincount(labels, minlength=10)
        assert float((weights * counts)[counts > 0].std()) < 1
        assert each.eval_loss is cross_entropy, "the loss that is reported has no weights"


def test_a_loss_of_the_user_is_what_evaluations_report() -> None:
    made = client(f"{{{TWO}, train: {{loss: {{name: 'training_parts:margin', width: 2.0}}}}}}")
    logits, labels = torch.randn(6, 10), torch.arange(6)
    expected = torch.nn.functional.multi_margin_loss(logits, labels, margin=2.0)
    assert made.loss(logits, labels).equal(expected)
    assert made.eval_loss(logits, labels).equal(expected)
    assert math.isfinite(float(expected))
