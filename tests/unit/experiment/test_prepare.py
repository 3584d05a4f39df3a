"""Objects that are built and checked before training."""

from __future__ import annotations

import math
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context, RecordDict
from torch import nn

import fedbn_flwr.experiment.data as experiment_data
import fedbn_flwr.experiment.parts as experiment_parts
from fedbn_flwr.client.losses import cross_entropy
from fedbn_flwr.data.catalogue import CATALOGUE
from fedbn_flwr.data.dataset import DataSet, Groups
from fedbn_flwr.data.examples import Examples
from fedbn_flwr.errors import SettingsError
from fedbn_flwr.experiment.file.content import shipped_experiments
from fedbn_flwr.experiment.file.layers import load_experiment, parse_yaml, read_experiment
from fedbn_flwr.experiment.node import make_client
from fedbn_flwr.experiment.parts import learning_rate
from fedbn_flwr.experiment.prepare import make_rule, prepare, prepare_run
from fedbn_flwr.experiment.settings import Data, Experiment
from fedbn_flwr.messages.arrays import pack
from fedbn_flwr.models.tensors import initial_arrays
from fedbn_flwr.strategies import FedAvg
from fedbn_flwr.tasks import CLASSIFICATION, SEGMENTATION
from tests.support.experiments import read
from tests.support.marks import slow_except

EXPERIMENTS = Path(__file__).resolve().parents[3] / "apps" / "experiments"
FILES = sorted(EXPERIMENTS.rglob("*.y*ml"))
LARGE = re.compile("office.caltech|domainnet|imagenet|cityscapes")  # whose images take seconds
LOAD = experiment_data.load_data


# --- the shipped experiments -------------------------------------------------


def stand_in(data: Data, device: str) -> DataSet:
    """Random examples in place of a data set that is not shipped: a file's settings can be checked without it."""
    entry = CATALOGUE.get(data.name)
    if entry is not None and entry.embedded:
        if find_spec(entry.embedded.replace("-", "_")) is None:
            pytest.skip(f"{entry.embedded} is not installed")
        return LOAD(data, device)
    if entry is None:
        shape: tuple[int, ...] = (3, data.size or 32, data.size or 32)  # type: ignore[arg-type]
    else:  # an image that is not resized has the size of its boxes
        shape = (entry.channels, *[entry.size or data.crop or 0] * 2)
    classes = data.classes or (entry.classes if entry else 10)
    count = min((entry and entry.examples) or 1000 * classes, 50_000)
    images = torch.zeros(1, *shape, dtype=torch.uint8).expand(count, *shape)
    if entry is not None and entry.ids is not None:  # segmentation data
        part, task = Examples(images, images[:, 0]), SEGMENTATION
    else:
        part, task = Examples(images, torch.arange(count) % classes), CLASSIFICATION
    natural = None
    if data.partition.kind == "natural":  # as many values as Cityscapes has cities to train on
        rows = torch.arange(count) % 18
        natural = Groups(tuple(map(str, range(18))), rows, rows)
    domains = None
    if names := data.domains or (entry.domains if entry else ()):
        rows = torch.arange(count) % len(names)
        domains = Groups(tuple(names), rows, rows)
    return DataSet(data.name, part, part, tuple(map(str, range(classes))), domains, groups=natural, task=task)


def test_there_are_shipped_experiments() -> None:
    shipped = shipped_experiments()
    assert sorted(shipped.values()) == FILES
    assert {"demo", "fixbn/table4", "fedtan/mnist"} <= set(shipped)
    assert load_experiment("fixbn/table4").name == "fixbn-table4"


@pytest.mark.parametrize(
    "file",
    slow_except([file for file in FILES if not LARGE.search(file.read_text())], FILES),
    ids=lambda file: str(file.relative_to(EXPERIMENTS)),
)
def test_every_shipped_experiment_loads_and_can_be_prepared(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (experiment_data, experiment_parts):
        monkeypatch.setattr(module, "load_data", stand_in)
    experiment_data.forget_data()
    experiment = load_experiment(str(file))
    assert experiment.description, "fedbn list experiments shows it"
    run, name = experiment.runs[-1], list(experiment.by_folder)[-1]  # nightly tests train all of them at size smoke
    if run.data.crop is not None:  # networks of pixels take seconds to try
        run = run.model_copy(update={"data": run.data.model_copy(update={"crop": 64})})
    prepared = prepare_run(run, name, make_rule(run))
    assert prepared.name == name
    experiment_data.forget_data()


# --- a norm that a rule replaces ---------------------------------------------

RULES: list[dict[str, Any]] = [
    {"name": "FedTAN"},
    {"name": "FedTANII", "fedtan_rounds": 1},
    {"name": "FedAvgGlobalStats"},
    {"name": "MeanStatistics", "base": {"name": "FedTAN"}},
    {"name": "FixBN", "freeze_round": 1, "base": {"name": "MeanStatistics", "base": {"name": "FedTAN"}}},
]


def experiment_of(strategy: dict[str, Any], norm: str) -> Experiment:
    return read_experiment({"strategy": strategy, "model": {"norm": norm}, "rounds": 2})


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_rules_that_replace_batch_norm_refuse_other_kinds_of_it(rule: dict[str, Any]) -> None:
    message = r"batches replaces plain .* 'bn1' is a BatchRenorm, whose own .*model\.norm: bn\), or another strategy"
    with pytest.raises(SettingsError, match=message):
        prepare(experiment_of(rule, "brn"))
    prepare(experiment_of(rule, "bn"))


def test_other_rules_take_it() -> None:
    prepare(experiment_of({"name": "FixBN", "freeze_round": 1}, "brn"))


def test_a_warning_about_the_strategy_comes_before_training_and_once(flower_log: pytest.LogCaptureFixture) -> None:
    (run,) = read_experiment({"rounds": 1, "strategy": {"name": "FixBN", "freeze_round": 0.5}}).runs
    for _ in range(2):
        prepared = prepare_run(run, "name", make_rule(run))
    prepared.rule.begin(1, pack(initial_arrays(prepared.model)))
    assert [each.message for each in flower_log.records if "0.5 of 1 rounds" in each.message] == [
        "freeze_round=0.5 of 1 rounds is round 0: the statistics are frozen at their initial values; train more rounds"
    ]


def strategy_of(text: str) -> object:
    (run,) = read_experiment(parse_yaml(text)).runs
    return make_rule(run)


def test_a_round_needs_two_clients_unless_the_experiment_says_otherwise() -> None:
    for clients, spec, needed in ((1, "", 1), (5, "", 2), (5, ", min_train_nodes: 4", 4)):
        strategy = strategy_of(f"{{clients: {clients}, strategy: {{name: FedAvg{spec}}}}}")
        assert isinstance(strategy, FedAvg)
        assert strategy.min_train_nodes == needed
        assert strategy.min_available_nodes <= needed, "a lost client would stop the run"


# --- faults that show once the objects are built -----------------------------


VECTORS = "{clients: 2, model: {name: 'tests.unit.experiment.test_prepare:vectors'}, %s}"


def refused(text: str) -> str:
    with pytest.raises(SettingsError) as caught:
        prepare(read_experiment(parse_yaml(text)))
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model: {name: resnet21}", ["model.name='resnet21'", "did you mean 'resnet20'?"]),
        ("model: {norm: gm}", ["model.norm='gm'", "known: bn, "]),
        ("model: {norm: gn, groups: 3}", ["bn1 has 16 channels", "cannot be split into 3 equal groups"]),
        ("data: {classes: 9}", ["data.classes is 9", "10 classes"]),
        ("strategy: {name: FedAgv}", ["strategy.name='FedAgv'", "did you mean 'FedAvg'?"]),
        ("strategy: {name: FixBN, freeze_rond: 1}", ["strategy.freeze_rond (= 1)", "did you mean 'freeze_round'?"]),
        ("strategy: {freeze_round: 1}", ["strategy.freeze_round (= 1) is not an argument of FedAvg"]),
        ("strategy: {nmae: FixBN}", ["strategy.nmae (= 'FixBN') is not an argument of FedAvg; did you mean 'name'?"]),
        (
            "strategy: {name: FedAvg, fraction_train: half}",
            ["strategy.fraction_train of FedAvg is 'half'", "a number > 0 and <= 1"],
        ),
        ("strategy: {name: FedAvg, base: {name: FedAvg}}", ["FedAvg wraps no other strategy"]),
        ("{rounds: 3, strategy: {name: FixBN, freeze_round: 4}}", ["freeze_round is 4, but there are 3 rounds"]),
        ("{strategy: FixBN, model: {norm: gn}}", ["FixBN freezes batch norm, and no array of the model is"]),
        ("strategy: {name: FixBN, base: [FedAvg]}", ["strategy.base is ['FedAvg']", "{name: FedAvg}"]),
        ("strategy: {name: FixBN, freeze_round: -1}", ["strategy.freeze_round of FixBN is -1; expected a round"]),
        (
            "strategy: {name: FixBN, base: {name: Fedprox}}",
            ["strategy.base.name='Fedprox' is not a strategy; did you mean 'FedPr"],
        ),
        (
            "strategy: {name: FixBN, base: {name: FixBN, base: {name: FedProx, proximal_mu: -1}}}",
            ["strategy.base.base.proximal_mu of FedProx is -1; expected a number >= 0"],
        ),
        ("strategy: {name: FixBN, base: {name: FedAvg, x: 1}}", ["strategy.base.x (= 1) is not an argument of FedAvg"]),
        ("strategy: {name: FixBN, base: {name: FedAvg, 3: 4}}", ["strategy.base.3 (= 4) is not an argument of FedAvg"]),
        (
            "strategy: {name: MeanStatistics, base: {name: FedAdam, eta: -1}}",
            ["strategy.base.eta of FedAdam is -1; expected a"],
        ),
        (
            "strategy: {name: FedAvgM, server_momentum: 1}",
            ["strategy.server_momentum of FedAvgM is 1; expected a number >= 0 and"],
        ),
        *(
            (
                f"strategy: {{name: FedAvg, fraction_train: {share}}}",
                [f"strategy.fraction_train of FedAvg is {share}; expected a number > 0 and <= 1"],
            )
            for share in (-1, 0, 1.5)
        ),
        (
            "strategy: {name: FedAvg, node_timeout: -1}",
            ["strategy.node_timeout of FedAvg is -1; expected a number of seconds > 0"],
        ),
        (
            "{clients: 3, strategy: {name: FedBN, min_train_nodes: 4}}",
            ["strategy.min_train_nodes of FedBN is 4, but there are 3 clients"],
        ),
        (
            "{clients: 3, strategy: {name: FixBN, base: {name: FedAvg, min_available_nodes: 4}}}",
            ["strategy.min_available_nodes of FedAvg is 4, but there are 3 clients"],
        ),
        (
            VECTORS % "train: {batch_size: 1}",
            [
                f"train.batch_size is 1, and batch norm of '{__name__}:vectors' can",
                "use batches of two or more, or another norm, for instance model.norm: gn",
            ],
        ),
        ("data: {crop: 7}", ["data.crop is 7, but 'digits' has one label per example"]),
        (VECTORS % "data: {examples: 2}", ["each client has one training example, and batch norm"]),
    ],
)
def test_what_cannot_be_built_is_refused_before_training(text: str, words: list[str]) -> None:
    found = refused(text)
    for word in words:
        assert word in found


def vectors(num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.BatchNorm1d(4), nn.Linear(4, num_classes))


@pytest.mark.parametrize(
    "text",
    [
        VECTORS % "train: {batch_size: 1}, strategy: {name: FixBN, freeze_round: 0}",
        VECTORS % "train: {batch_size: 1}, strategy: {name: FedTAN, min_batch: 1}",
        VECTORS % "data: {examples: 3}",  # one of the clients has two examples
        "train: {batch_size: 1}",  # of images
        "{model: {norm: gn}, train: {batch_size: 1}}",
    ],
)
def test_other_batches_of_one_example_are_not_refused(text: str) -> None:
    (parts,) = prepare(read_experiment(parse_yaml(text)))
    assert all(float(value.min()) == 0 for key, value in parts.model.state_dict().items() if key.endswith("_mean"))


class Counting(nn.Sequential):
    """Counts the passes of all its instances."""

    passes = 0

    def __init__(self, num_classes: int) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, num_classes))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        Counting.passes += 1
        return super().forward(inputs)  # type: ignore[no-any-return]


def test_a_network_is_tried_for_one_seed_and_the_examples_of_all_are_counted() -> None:
    text = f"{{model: {{name: '{__name__}:Counting'}}, seeds: %s, data: {{partition: {{kind: %s}}}}, clients: 5}}"

    def passes(seeds: list[int]) -> int:
        before = Counting.passes
        assert len(prepare(read_experiment(parse_yaml(text % (seeds, "iid"))))) == len(seeds)
        return Counting.passes - before

    assert passes([0, 1, 2]) == passes([0]) > 0
    (first, second) = prepare(read_experiment(parse_yaml(text % ([0, 1], "dirichlet, alpha: 0.5"))))
    assert [len(part) for part in first.partition] != [len(part) for part in second.partition]


def test_batches_of_one_are_accepted_for_all_seeds_if_batch_norm_is_frozen_from_the_start() -> None:
    text = (
        "{strategy: {name: FixBN, freeze_round: %s}, rounds: 2, train: {batch_size: 1}, seeds: [0, 1], "
        "model: {name: mlp}}"
    )
    assert len(prepare(read_experiment(parse_yaml(text % 0)))) == 2
    with pytest.raises(SettingsError, match="cannot compute a variance of one example"):
        prepare(read_experiment(parse_yaml(text % 1)))


# --- Optimiser, loss, schedule and metrics of an experiment, and what is refused before training.


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


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "training_parts.py").write_text(PARTS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "training_parts", raising=False)


BN = "model: {name: cnn}\nclients: 2\n"


@pytest.mark.usefixtures("parts")
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


@pytest.mark.usefixtures("parts")
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


@pytest.mark.usefixtures("parts")
def test_a_schedule_of_the_user_gets_the_round_their_number_and_the_rate() -> None:
    run = read("{rounds: 8, train: {lr: 0.4, schedule: 'training_parts:halved'}}")
    assert [learning_rate(run, number) for number in (2, 3)] == pytest.approx([0.1 + 0.008, 0.05 + 0.008])


@pytest.mark.usefixtures("parts")
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


@pytest.mark.usefixtures("parts")
def test_a_loss_of_the_user_is_what_evaluations_report() -> None:
    made = client(f"{{{TWO}, train: {{loss: {{name: 'training_parts:margin', width: 2.0}}}}}}")
    logits, labels = torch.randn(6, 10), torch.arange(6)
    expected = torch.nn.functional.multi_margin_loss(logits, labels, margin=2.0)
    assert made.loss(logits, labels).equal(expected)
    assert made.eval_loss(logits, labels).equal(expected)
    assert math.isfinite(float(expected))
