"""Objects that are built and checked before training."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedbn_flwr.experiment.data as experiment_data
import fedbn_flwr.experiment.parts as experiment_parts
from fedbn_flwr.data.catalogue import CATALOGUE
from fedbn_flwr.data.dataset import DataSet, Groups
from fedbn_flwr.data.examples import Examples
from fedbn_flwr.errors import SettingsError
from fedbn_flwr.experiment.file.content import shipped_experiments
from fedbn_flwr.experiment.file.layers import load_experiment, parse_yaml, read_experiment
from fedbn_flwr.experiment.prepare import make_rule, prepare, prepare_run
from fedbn_flwr.experiment.settings import Data, Experiment
from fedbn_flwr.messages.arrays import pack
from fedbn_flwr.models.tensors import initial_arrays
from fedbn_flwr.strategies import FedAvg
from fedbn_flwr.tasks import CLASSIFICATION, SEGMENTATION
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
