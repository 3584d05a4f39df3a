"""The set-ups in the experiment files are those of the papers, which docs/published.yaml lists."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pytest
import yaml
from torch import nn

from fedbn_flwr.data.catalogue import CATALOGUE
from fedbn_flwr.experiment.file.content import shipped_experiments
from fedbn_flwr.experiment.file.layers import load_experiment
from fedbn_flwr.experiment.parts import learning_rate
from fedbn_flwr.experiment.settings import Settings, strategy_name
from fedbn_flwr.models.build import build_model
from tests.support.command import ROOT

PAPERS = yaml.safe_load((ROOT / "docs" / "published.yaml").read_text(encoding="utf-8"))
NAMES = [name for name in shipped_experiments() if "/" in name]


@pytest.fixture(scope="module")
def experiments() -> dict[str, tuple[Settings, ...]]:
    return {name: load_experiment(name, ["seed=0"]).runs for name in NAMES}


@pytest.mark.parametrize(("table", "data", "unit", "bits"), [
    ("Table 4", "CIFAR-10", "GiB", 8), ("Table 5 and Figure 14", "MNIST", "Gibit", 1)])  # fmt: skip
def test_the_costs_of_fedtan_ii_are_arithmetic(table: str, data: str, unit: str, bits: int) -> None:
    setup = PAPERS["FedTAN"]["setup"][data]
    # Table 4 counts the running statistics, Table 5 does not. An exchange adds two values for each statistic.
    model = setup["parameters with GN"] + setup["statistics"] if table == "Table 4" else setup["parameters"]
    copies = 4 * (1 + setup["clients"])  # to all clients once, and from each of them
    iterations = setup["iterations"]
    for label, figures in PAPERS["FedTAN"][table].items():
        kind, _, exact = label.partition("=")
        part = 1.0 if not exact else float(exact) if kind.endswith("fedtan_rounds") else int(exact) / iterations
        plain, mib = (each * copies / 2**20 for each in (model, model + 2 * setup["statistics"] * part))
        if table == "Table 4":  # of the MiB of an iteration as printed, with four decimals
            plain, mib = round(plain, 4), round(mib, 4)
        assert mib * iterations * 8 / bits / 1024 == pytest.approx(figures[unit], abs=5.1e-5), label
        assert 100 * (mib - plain) / mib == pytest.approx(figures["more bits"], abs=5.1e-5), label
        more = 3 * setup["batch norms"] * part
        assert 100 * more / (1 + more) == pytest.approx(figures["more rounds"], abs=0.0051), label


# --- set-ups --------------------------------------------------------------------


def in_words(partition: Any) -> str:
    return " ".join(str(partition[key]) for key in ("kind", "alpha") if key in partition)


def innermost(run: Settings) -> Mapping[str, Any]:
    """The strategy that samples clients."""
    strategy = run.strategy
    while "base" in strategy:
        strategy = strategy["base"]
    return strategy


def clients_in_a_round(run: Settings) -> float:
    return run.clients * float(innermost(run).get("fraction_train", 1))


def epochs_over_all_clients(run: Settings) -> float:
    """Passes over the training examples, counted over all clients."""
    if run.train.epochs is not None:
        return run.rounds * run.train.epochs * clients_in_a_round(run) / run.clients
    images = CATALOGUE[run.data.name].examples
    return run.rounds * clients_in_a_round(run) * run.train.steps * run.train.batch_size / images


def rows_of(runs: Iterable[Settings]) -> set[str]:
    return {run.cell.row for run in runs}


def partitions_of(runs: Iterable[Settings]) -> list[str]:
    return list(dict.fromkeys(run.data.partition.kind for run in runs if run.clients > 1))


def test_the_runs_of_fixbn_have_the_set_up_of_the_paper(experiments: Mapping[str, tuple[Settings, ...]]) -> None:
    setup = PAPERS["FixBN"]["setup"]
    for run in experiments["fixbn/table4"]:
        train = run.train
        assert (run.clients, train.lr, train.batch_size) == (
            setup["clients"],
            setup["lr"]["others"],
            setup["batch size"],
        )
        assert (train.momentum, train.weight_decay) == (setup["momentum"]["others"], setup["weight decay"])
        assert (train.schedule.kind, list(train.schedule.milestones or ())) == ("step", setup["lr falls at"])
        assert run.strategy.get("freeze_round", setup["freeze round"]) == setup["freeze round"]
        images = run.rounds * run.clients * (train.steps or 0) * train.batch_size
        assert images == setup["epochs over all clients"] * 50_000
        assert run.data.partition.model_dump()["shards_per_client"] == 10 * setup["share of classes on a client"]
        assert run.data.pad == setup["padding of crops"]
    assert len(load_experiment("fixbn/table4", ["only=BN"]).runs) == setup["runs"]
    for name in ("fixbn/local-steps", "fixbn/local-steps-128-epochs", "fixbn/tiny-imagenet"):
        assert sorted({run.train.steps or 0 for run in experiments[name]}) == setup["local steps"]
        partitions = dict.fromkeys(in_words(run.data.partition.model_dump()) for run in experiments[name])
        assert list(partitions) == setup["partitions"]
    assert {run.rounds for run in experiments["fixbn/local-steps"]} == {setup["rounds of the second budget"]}
    assert sorted({run.train.lr for run in experiments["fixbn/table1"]}) == setup["lr"]["Table 1"]
    assert {run.train.momentum for run in experiments["fixbn/table1"]} == {setup["momentum"]["Table 1"]}
    figure_j, small_images = setup["Figure J"], setup["Tiny-ImageNet"]
    runs = experiments["fixbn/batch-size"]
    assert rows_of(runs) == {*figure_j["rules"]}
    assert {(run.train.steps, run.model.norm) for run in runs} == {(figure_j["local steps"], "bn")}
    for run in (*experiments["fixbn/tiny-imagenet"], *experiments["fixbn/tiny-imagenet-momentum"]):
        found = (run.model.name, run.clients, innermost(run)["fraction_train"])
        assert found == (small_images["model"], small_images["clients"], small_images["share of clients"])


FIXED_EPOCHS = (
    *("local-steps-128-epochs", "momentum", "clients", "participation", "dynamics", "one-step-momentum"),
    *("tiny-imagenet", "tiny-imagenet-momentum"),
)


@pytest.mark.parametrize("name", FIXED_EPOCHS)
def test_the_figures_of_fixbn_have_its_epochs_over_all_clients(
    experiments: Mapping[str, tuple[Settings, ...]], name: str
) -> None:
    setup = PAPERS["FixBN"]["setup"]
    for run in experiments[f"fixbn/{name}"]:
        expected = pytest.approx(setup["epochs over all clients"], rel=0.02)  # to a round of 2,500 steps
        assert epochs_over_all_clients(run) == expected, run.label


def test_table_2_of_fixbn_has_the_set_up_of_the_paper(experiments: Mapping[str, tuple[Settings, ...]]) -> None:
    expected = PAPERS["FixBN"]["setup"]["Table 2"]
    for run in experiments["fixbn/table2"]:
        found = {
            "clients": run.clients,
            "share of clients": innermost(run)["fraction_train"],
            "batch size": run.train.batch_size,
            "lr": run.train.lr,
            "lr falls at": list(run.train.schedule.milestones),
            "local epochs": run.train.epochs,
            "epochs over all clients": epochs_over_all_clients(run),
        }
        assert found == pytest.approx(expected)
        ends = [learning_rate(run, number) for number in (96, 97, 192, 193, 288, 289, 320)]
        assert ends == pytest.approx([0.1, 0.01, 0.01, 0.001, 0.001, 0.0001, 0.0001]), "of 320 rounds, every 30 %"


def test_table_3_of_fixbn_has_the_set_up_of_the_paper(experiments: Mapping[str, tuple[Settings, ...]]) -> None:
    expected = PAPERS["FixBN"]["setup"]["Table 3"]
    runs = experiments["fixbn/table3"]
    assert sorted({run.train.lr for run in runs}, reverse=True) == expected["lr"]
    for run in runs:
        found = {
            "rounds": run.rounds,
            "clients": run.clients,
            "share of clients": innermost(run).get("fraction_train", 1),
            "optimizer": run.train.optimizer,
            "lr": expected["lr"],
            "lr falls at": list(run.train.schedule.milestones),
            "weight decay": run.train.weight_decay,
            "batch size": run.train.batch_size,
            "local epochs": run.train.epochs,
            "crop": run.data.crop,
            "freeze round": run.strategy.get("freeze_round", 0.9) * run.rounds,
        }
        assert found == expected


def test_the_figures_of_fixbn_have_the_set_ups_of_the_paper(experiments: Mapping[str, tuple[Settings, ...]]) -> None:
    setup = PAPERS["FixBN"]["setup"]
    expected = setup["Figures 3a to c"]
    for run in experiments["fixbn/dynamics"]:
        assert (run.train.steps, run.train.momentum) == (expected["local steps"], expected["momentum"])
        assert run.evaluate.dynamics
        assert run.evaluate.every == expected["rounds of the window"], "a line is of the rounds since the one before"
    expected = setup["Figure 1"]
    for run in experiments["fixbn/one-step-momentum"]:
        found = (run.train.steps, run.train.keep_momentum, run.train.momentum)
        assert found == (expected["local steps"], expected["keeps momentum"], setup["momentum"]["others"])
    numbers = sorted({run.clients for run in experiments["fixbn/clients"]})
    assert [numbers[0], numbers[-1]] == setup["Figure I"]["clients"]
    shares = sorted({innermost(run)["fraction_train"] for run in experiments["fixbn/participation"]})
    assert [shares[0], shares[-1]] == setup["Figure I"]["share of clients"]
    for name in ("fixbn/momentum", "fixbn/tiny-imagenet-momentum"):
        assert sorted({run.train.steps or 0 for run in experiments[name]}) == setup["local steps"]
        rows = rows_of(experiments[name])
        for norm in ("BN", "GN", "FixBN"):
            assert {f"{norm}, local momentum, E=1", f"{norm}, global momentum, E=1", f"{norm}, E=1"} <= rows
        for run in experiments[name]:
            assert run.train.keep_momentum == ("local" in run.cell.row)
            assert ("GlobalMomentum" in strategy_name(run.strategy)) == ("global" in run.cell.row)


NO_SWEEP = {
    "fedtan/table1": ["sweep=null"],
    "fedtan/table2": ["sweep=null"],
    "fedtan/cifar100": ["sweep=null"],
}


def rates_of(run: Settings, last: int) -> list[float]:
    """The learning rate of each round of a strategy that switches after round `last`."""
    factor = run.train.schedule.switch or 1.0
    rates = [learning_rate(run, number) for number in range(1, run.rounds + 1)]
    return [rate * (factor if number >= last else 1.0) for number, rate in enumerate(rates)]


def test_the_runs_of_fedtan_have_the_set_up_of_the_paper(experiments: Mapping[str, tuple[Settings, ...]]) -> None:
    setup = PAPERS["FedTAN"]["setup"]
    sweep = experiments["fedtan/classes-per-client"]
    classes = {run.cell.sweep["data.partition.classes_per_client"] for run in sweep if run.clients > 1}
    assert sorted(classes) == setup["classes on a client"]
    assert {run.train.steps for run in experiments["fedtan/one-step"]} == {1}
    rules = {run.cell.row for run in experiments["fedtan/table1"]}
    assert {run.cell.row for run in experiments["fedtan/table2"]} == rules, "the curves of Figure 4"
    assert {run.rounds for run in experiments["fedtan/table5"]} == {setup["MNIST"]["iterations"]}
    for run in experiments["fedtan/table5"]:
        exact, (before, after) = run.strategy.get("fedtan_rounds", run.rounds), setup["MNIST"]["lr"]
        assert rates_of(run, exact) == pytest.approx([before] * exact + [after] * (run.rounds - exact))
    for name, after in (("table4", setup["FedTAN-II's lr"]), ("two-stage", setup["Figure 11"]["FedTAN-II's lr"])):
        for run in experiments[f"fedtan/{name}"]:
            if run.strategy["name"] == "FedTANII":
                rates = rates_of(run, exact := round(run.strategy["fedtan_rounds"] * run.rounds))
                assert rates[exact - 1] == setup["Table 1"]["lr"][0]
                assert [rates[number] for number in (exact, 6_000, 8_000)] == pytest.approx(after)
    for name, table in (("fedtan/table1", "Table 1"), ("fedtan/table2", "Table 2"), ("fedtan/cifar100", "CIFAR-100")):
        expected = setup[table]
        for run in experiments[name]:
            train, whole = run.train, setup["CIFAR-10"]
            found = (run.rounds, train.steps, train.batch_size)
            assert found == (whole["iterations"], whole["local steps"], whole["batch size"])
            assert run.clients == (1 if run.cell.row == "Centralised" else whole["clients"])
            assert [learning_rate(run, number + 1) for number in expected["from"]] == pytest.approx(expected["lr"])
            assert train.momentum == expected.get("momentum", train.momentum)
            assert train.weight_decay == expected.get("weight decay", train.weight_decay)
        assert len(load_experiment(name, ["only=FedTAN", *NO_SWEEP[name]]).runs) == setup["CIFAR-10"]["runs"]
    classes = {run.data.partition.model_dump().get("classes_per_client") for run in experiments["fedtan/cifar100"]}
    assert classes - {None} == {setup["CIFAR-100"]["classes on a client"]}
    for name, count in setup["domains"]["clients"].items():
        for run in experiments[f"fedtan/{name}"]:
            found = {
                "model": run.model.name,
                "batch size": run.train.batch_size,
                "lr": run.train.lr,
                "local steps": run.train.steps,
                "momentum": run.train.momentum,
                "each client is tested on every domain": run.evaluate.domains,
            }
            assert found == {key: setup["domains"][key] for key in found}
            assert run.clients in (1, count)
    weights = {each.momentum for each in build_model("resnet20", 10).modules() if isinstance(each, nn.BatchNorm2d)}
    assert weights == {setup["CIFAR-10"]["weight of new statistics"]}
    assert {run.train.batch_size for run in experiments["fedtan/mnist"]} == {setup["MNIST"]["batch size"]}
    network = build_model("mlp", 10, "bn", input_shape=(1, 28, 28))
    parameters = sum(each.numel() for each in network.parameters())
    statistics = sum(each.numel() for each in network.buffers() if each.dim() > 0)
    assert (parameters, statistics) == (setup["MNIST"]["parameters"], setup["MNIST"]["statistics"])


def test_the_images_of_fedtan_have_the_padding_of_its_code(experiments: Mapping[str, tuple[Settings, ...]]) -> None:
    names = [name for name in NAMES if name.startswith("fedtan/") or name == "fixbn/table5"]
    cropped = [run for name in names for run in experiments[name] if "crop" in (run.data.augment or ())]
    assert {run.data.name for run in cropped} == {"cifar10", "cifar100"}
    assert {run.data.pad for run in cropped} == {PAPERS["FedTAN"]["setup"]["padding of crops"]}


FIGURES = {"one-step": 3, "classes-per-client": 5, "cifar100": 7, "two-stage": 11, "batch-size": 12}


@pytest.mark.parametrize("name", FIGURES)
def test_the_figures_of_fedtan_have_the_set_ups_of_the_paper(
    experiments: Mapping[str, tuple[Settings, ...]], name: str
) -> None:
    setup, runs = PAPERS["FedTAN"]["setup"], experiments[f"fedtan/{name}"]
    expected = setup[f"Figure {FIGURES[name]}"]
    assert {*expected.get("strategies", ())} <= rows_of(runs)
    assert partitions_of(runs) == expected.get("partitions", partitions_of(runs))
    for run in runs:
        assert run.train.steps == expected.get("local steps", setup["CIFAR-10"]["local steps"])
        assert run.train.momentum == expected.get("momentum", 0.9)
        assert run.train.weight_decay == expected.get("weight decay", run.train.weight_decay)
        assert run.cell.row != "FedAvg without BN" or run.model.norm == "none"


def test_the_figures_of_fedwon_fit_the_test_sets_of_fedbn() -> None:
    """As means of three runs, printed with one decimal; docs/results/domains.md#fedwon quotes the counts."""

    def fit(sizes: tuple[int, ...]) -> int:
        table = PAPERS["FedWon"]["Table 1, Office-Caltech-10"].values()
        return sum(
            any(abs(100 * right / (3 * size) - figure) <= 0.0501 for right in range(3 * size + 1))
            for row in table
            for figure, size in zip(row.values(), sizes, strict=False)
        )

    assert (fit((192, 225, 32, 59)), fit((180, 220, 27, 56))) == (31, 9)


def test_the_runs_of_fedwon_have_the_set_up_of_the_paper(
    experiments: Mapping[str, tuple[Settings, ...]],
) -> None:
    setup = PAPERS["FedWon"]["setup"]
    for name in ("fedwon/digits-five", "fedwon/office-caltech10", "fedwon/domainnet"):
        for run in experiments[name]:
            assert (run.train.batch_size, run.train.epochs) == (setup["batch size"], setup["local epochs"])
            assert run.strategy.get("clip", setup["clipping"]) == setup["clipping"]
    for name, images in setup["images of a client"].items():
        for run in experiments[f"fedwon/{name}"]:
            assert run.data.partition.model_dump()["examples"] == images
    assert {run.rounds for run in experiments["fedwon/domainnet"]} == {setup["rounds of DomainNet"]}
    for run in experiments["fedwon/cifar10"]:
        low, high = setup["lr"]
        assert low <= run.cell.tune["train.lr"] <= high, "a rate for each strategy"
        found = {
            "clients": run.clients,
            "share of clients": innermost(run)["fraction_train"],
            "local epochs": run.train.epochs,
            "rounds": run.rounds,
        }
        assert found == setup["CIFAR-10"]
    assert {run.clients for run in experiments["fedwon/participation"]} == {50}
    assert sorted({run.clients for run in experiments["fedwon/clients"]}) == setup["Figure 4"]["clients"]
    assert sorted(rows_of(experiments["fedwon/clients"])) == setup["Figure 4"]["strategies"]
    runs, expected = experiments["fedwon/clients-batch-size"], setup["Figure 5"]
    assert {run.clients for run in runs} == {expected["clients"]}
    assert {innermost(run)["fraction_train"] for run in runs} == {expected["share of clients"]}
    assert sorted({run.train.batch_size for run in runs}) == expected["batch size"]
    assert sorted(rows_of(runs)) == expected["strategies"]
    for run in experiments["fedwon/statistics"]:
        assert run.clients == len(run.data.domains) == setup["Figure 2"]["clients"]
        network = build_model(run.model.name, 10, "bn", input_shape=(3, 32, 32))
        norms = sum(isinstance(each, nn.modules.batchnorm._BatchNorm) for each in network.modules())
        assert (run.model.name, norms) == (setup["Figure 2"]["model"], setup["Figure 2"]["batch norms"])
        assert run.evaluate.dynamics


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("fedbs/")])
def test_the_runs_of_fedbs_have_the_set_up_of_the_paper(
    experiments: Mapping[str, tuple[Settings, ...]], name: str
) -> None:
    setup = PAPERS["FedBS"]["setup"]
    key = name.removeprefix("fedbs/").replace("mnist-unbalanced", "mnist").replace("local-test", "cifar10-unbalanced")
    for run in experiments[name]:
        train = run.train
        assert (run.clients, run.rounds) == (setup["clients"], setup["rounds"][key])
        assert clients_in_a_round(run) == setup["clients in a round"]
        assert list(run.data.augment or ()) == setup["augmentation"]
        assert (train.batch_size, train.lr, train.epochs) == (
            setup["batch size"],
            setup["lr"],
            setup["local epochs"],
        )
        if run.strategy["name"] == "FedBS":
            assert {key: run.strategy[key] for key in ("epsilon", "patience")} == setup["switch"]
        partition = run.data.partition.model_dump()
        image = (3, 32, 32) if "cifar" in run.model.name else (1, 28, 28)
        network = build_model(run.model.name, 10, input_shape=image)
        layers = [*network.modules()]
        channels = [each.out_channels for each in layers if isinstance(each, nn.Conv2d)]
        inputs = [each.in_features for each in layers if isinstance(each, nn.Linear)]
        assert channels == setup["convolutions"][run.model.name]
        assert inputs == setup["fully connected"][run.model.name]
        weights = {each.momentum for each in layers if isinstance(each, nn.BatchNorm2d)}
        assert weights == {setup["weight of new statistics"]}
        if not name.endswith(("unbalanced", "local-test")):
            assert partition["shards_per_client"] == setup["balanced"]["shards"]
        else:
            assert partition["shard_size"] == setup["unbalanced"]["shard size"]
            assert [partition["min_shards"], partition["max_shards"]] == setup["unbalanced"]["shards"]
