"""The figures and set-ups in the experiment files are those of the papers, which docs/published.yaml lists."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import pytest
import yaml
from torch import nn

from fedbn_flwr.data.catalogue import CATALOGUE
from fedbn_flwr.experiment.file.content import shipped_experiments
from fedbn_flwr.experiment.file.expansion import condition
from fedbn_flwr.experiment.file.layers import load_experiment
from fedbn_flwr.experiment.parts import learning_rate
from fedbn_flwr.experiment.settings import Settings, strategy_name
from fedbn_flwr.models.build import build_model
from tests.support.command import ROOT

PAPERS = yaml.safe_load((ROOT / "docs" / "published.yaml").read_text(encoding="utf-8"))
NAMES = [name for name in shipped_experiments() if "/" in name]

# A table, an experiment, the label of a condition, a key of summary.json, and the figure, maybe with a deviation.
Figure: TypeAlias = tuple[str, str, str, str, float | tuple[float, ...]]


@pytest.fixture(scope="module")
def experiments() -> dict[str, tuple[Settings, ...]]:
    return {name: load_experiment(name, ["seed=0"]).runs for name in NAMES}


def share(percent: float | list[float]) -> float | tuple[float, ...]:
    return tuple(round(each / 100, 5) for each in percent) if isinstance(percent, list) else round(percent / 100, 5)


# --- figures --------------------------------------------------------------------

IID, TWO_CLASSES = "partition=iid", "partition=classes classes_per_client=2"
SHARDS = "partition=shards shards_per_client=2"


def fedtan(tables: Mapping[str, Any]) -> Iterator[Figure]:
    for table, name in (("Table 1", "fedtan/table1"), ("Table 2", "fedtan/table2")):
        for row, figures in tables[table].items():
            key = "clients_accuracy" if row in ("FedBN", "SiloBN") else "accuracy"
            if len(figures) == 1:
                yield table, name, row, key, share(figures[0])
                continue
            for partition, figure in zip((IID, TWO_CLASSES), figures, strict=True):
                yield table, name, f"{row}, {partition}", key, share(figure)
            if table == "Table 2":  # two classes on each client are a point of a figure
                yield table, "fedtan/classes-per-client", f"{row}, classes_per_client=2", key, share(figures[1])
    counts = tables["setup"]["CIFAR-10"]
    with_gn, with_bn = counts["parameters with GN"], counts["parameters with GN"] + counts["statistics"]
    yield "Table 3", "fedtan/table3", "FedAvg+GN", "parameters", with_gn
    yield "Table 3", "fedtan/table3", "FedAvg+BN", "elements_up_per_client", with_bn
    for row, figures in tables["Table 3"].items():
        yield "Table 3", "fedtan/table3", row, "broadcast_mib_per_round", figures["MiB"]
        yield "Table 3", "fedtan/table3", row, "communication_rounds", figures["communication rounds"]
    for table, unit, mib in (("Table 4", "GiB", 1024), ("Table 5", "Gibit", 128)):
        setup = tables["setup"]["CIFAR-10" if table == "Table 4" else "MNIST"]
        iterations = setup["iterations"]
        for exact, figures in tables[table].items():
            if table == "Table 4":
                label = "FedTAN" if exact == iterations else f"FedTAN-II, fedtan_rounds={exact / iterations}"
            else:
                label = "FedTAN" if exact == iterations else f"FedTAN-II M={exact}"
            name, rounds = f"fedtan/{table.lower().replace(' ', '')}", iterations + exact * 3 * setup["batch norms"]
            yield table, name, label, "broadcast_mib_per_round", round(figures[unit] * mib / iterations, 4)
            yield table, name, label, "communication_rounds", rounds


@pytest.mark.parametrize(("table", "data", "unit", "bits"), [
    ("Table 4", "CIFAR-10", "GiB", 8), ("Table 5", "MNIST", "Gibit", 1)])  # fmt: skip
def test_the_costs_of_fedtan_ii_are_arithmetic(table: str, data: str, unit: str, bits: int) -> None:
    setup = PAPERS["FedTAN"]["setup"][data]
    # Table 4 counts the running statistics, Table 5 does not. An exchange adds two values for each statistic.
    model = setup["parameters with GN"] + setup["statistics"] if table == "Table 4" else setup["parameters"]
    copies = 4 * (1 + setup["clients"])  # to all clients once, and from each of them
    for exact, figures in PAPERS["FedTAN"][table].items():
        part = exact / setup["iterations"]
        plain, mib = (each * copies / 2**20 for each in (model, model + 2 * setup["statistics"] * part))
        if table == "Table 4":  # of the MiB of an iteration as printed, with four decimals
            plain, mib = round(plain, 4), round(mib, 4)
        assert mib * setup["iterations"] * 8 / bits / 1024 == pytest.approx(figures[unit], abs=5.1e-5), exact
        assert 100 * (mib - plain) / mib == pytest.approx(figures["more bits"], abs=5.1e-5), exact
        more = 3 * setup["batch norms"] * part
        assert 100 * more / (1 + more) == pytest.approx(figures["more rounds"], abs=0.0051), exact


def fixbn(tables: Mapping[str, Any]) -> Iterator[Figure]:
    for norm, figures in tables["Table 1"].items():
        for where, figure in figures.items():
            for lr in tables["setup"]["lr"]["Table 1"]:  # the paper does not say for which of the two
                yield "Table 1", "fixbn/table1", f"{where}, {norm}, lr={lr}", "accuracy", share(figure)
    for row, figure in tables["Table 2"].items():
        yield "Table 2", "fixbn/table2", row, "accuracy", share(figure)
    for model, figures in tables["Table 3"].items():
        for row, figure in figures.items():
            for lr in tables["setup"]["Table 3"]["lr"]:  # the paper does not say for which of the two
                yield "Table 3", "fixbn/table3", f"{model}, {row}, lr={lr}", "mean_iou", share(figure)
    for row, figure in tables["Table 4"].items():
        yield "Table 4", "fixbn/table4", row, "accuracy", share(figure)
        if row in ("BN", "GN", "FixBN"):  # one point of a figure is the set-up of Table 4
            yield "Table 4", "fixbn/clients", f"{row}, clients=5", "accuracy", share(figure)
            yield "Table 4", "fixbn/local-steps-128-epochs", f"{row}, E=100, {SHARDS}", "accuracy", share(figure)
    for freeze, row in (("0.5", "FixBN"), ("1.0", "BN")):
        label = f"FixBN, freeze_round={freeze}"
        yield "Table 4", "fixbn/freeze-round", label, "accuracy", share(tables["Table 4"][row])
    table5 = dict(tables["Table 5"])
    rounds = table5.pop("communication rounds of FedTAN")
    for row, figures in table5.items():
        if len(figures) == 1:
            yield "Table 5", "fixbn/table5", row, "accuracy", share(figures[0])
            continue
        for partition, figure in zip((IID, TWO_CLASSES), figures, strict=True):
            yield "Table 5", "fixbn/table5", f"{row}, {partition}", "accuracy", share(figure)
            if row == "FedTAN":
                yield "Table 5", "fixbn/table5", f"{row}, {partition}", "communication_rounds", rounds
    for row, figure in tables["Table H"].items():
        yield "Table H", "fixbn/tableH", row, "accuracy", share(figure)
    for groups, figure in tables["Table I"].items():
        yield "Table I", "fixbn/tableI", f"GN, groups={groups}", "accuracy", share(figure)


def fedwon(tables: Mapping[str, Any]) -> Iterator[Figure]:
    own = "clients_own_accuracy"
    names = {"Digits-Five": "digits-five", "DomainNet": "domainnet", "Office-Caltech-10, ResNet-18": "resnet18"}
    for table, name in names.items():
        for row, figure in tables[table].items():
            yield table, f"fedwon/{name}", row, own, share(figure)
    table = "Office-Caltech-10, AlexNet"
    keys = [*(f"{own}_{domain}" for domain in ("amazon", "caltech", "dslr", "webcam")), own]
    for row, figures in tables[table].items():
        for key, figure in zip(keys, figures, strict=True):
            yield table, "fedwon/office-caltech10", row, key, share(figure)
    table = "Office-Caltech-10, small batches"
    for size, rows in tables[table].items():
        for row, figure in rows.items():
            yield table, "fedwon/batch-size", f"{row}, batch_size={size}", own, share(figure)
    for size, rows in tables["ablation"].items():
        for row, figure in rows.items():
            yield "ablation", "fedwon/ablation", f"B={size}, {row}", own, share(figure)
    table, skews = "CIFAR-10, MobileNetV2", ("iid", *(f"dirichlet alpha={alpha}" for alpha in (1.0, 0.5, 0.1)))
    for row, figures in tables[table].items():
        for skew, figure in zip(skews, figures, strict=True):
            yield table, "fedwon/cifar10", f"{row}, partition={skew}", "accuracy", share(figure)
    table = "Digits-Five, participation"
    for part, rows in tables[table].items():
        for row, figures in rows.items():
            for domain, figure in zip(("mnist", "svhn", "usps", "synth", "mnist_m"), figures, strict=True):
                label = f"{row}, fraction_train={part}"
                yield table, "fedwon/participation", label, f"accuracy_{domain}", share(figure)


def flamby(tables: Mapping[str, Any]) -> Iterator[Figure]:
    for row, figures in tables["Heart Disease"].items():
        for place, figure in figures.items():
            of = "clients_own_accuracy" if row == "Local" else "accuracy"
            key = of if place == "all" else f"{of}_{place}"
            yield "Heart Disease", "ours/heart", row, key, share(figure)


def test_each_published_figure_is_in_a_file_and_no_file_has_another(
    experiments: Mapping[str, tuple[Settings, ...]],
) -> None:
    expected: dict[tuple[str, str, str], Any] = {}
    tables = set()
    for paper, figures in (("FedTAN", fedtan), ("FixBN", fixbn), ("FedWon", fedwon), ("FLamby", flamby)):
        for table, name, label, key, figure in figures(PAPERS[paper]):
            assert (name, label, key) not in expected
            expected[name, label, key] = (figure, f"{paper}, {table}")
            tables.add((paper, table))
    assert tables == {(paper, table) for paper in PAPERS for table in PAPERS[paper] if table != "setup"}
    shipped: dict[tuple[str, str, str], Any] = {}
    for name, runs in experiments.items():
        for run in runs:
            if run.published is not None:
                for key, figure in (run.published.model_extra or {}).items():
                    shipped[name, condition(run.cell), key] = (figure, run.published.source)
    assert sorted(shipped) == sorted(expected)
    assert {place: figure for place, figure in shipped.items() if figure != expected[place]} == {}


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
    """As means of three runs, printed with one decimal; docs/results/fedwon.md quotes the counts."""

    def fit(sizes: tuple[int, ...]) -> int:
        table = PAPERS["FedWon"]["Office-Caltech-10, AlexNet"].values()
        return sum(
            any(abs(100 * right / (3 * size) - figure) <= 0.0501 for right in range(3 * size + 1))
            for row in table
            for figure, size in zip(row, sizes, strict=False)
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
