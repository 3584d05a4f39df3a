"""The figures in the experiment files are those of the papers, and their set-ups too; the reference is not shipped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import yaml

from fedbn_flwr.experiment.content import shipped_experiments
from fedbn_flwr.experiment.find import load_experiment
from fedbn_flwr.experiment.published import condition
from fedbn_flwr.experiment.settings import Settings

# An experiment, the label of a condition, a key of summary.json, and the figure, maybe with its standard deviation.
Figure: TypeAlias = tuple[str, str, str, float | tuple[float, float]]
Key: TypeAlias = str | int
Place: TypeAlias = tuple[Key, ...]


class Reference:
    """The reference, and which of its figures were asked for."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self.content = content
        self.used: set[Place] = set()

    def at(self, *path: Key) -> Any:
        found: Any = self.content
        for key in path:
            found = found[key]
        self.used |= {(*path, *rest) for rest in _leaves(found)}
        return found

    def keys(self, *path: Key) -> list[Any]:
        found: Any = self.content
        for key in path:
            found = found[key]
        return list(found)

    def share(self, *path: Key) -> float:
        """A percentage as a fraction."""
        return _share(self.at(*path))

    def figures(self) -> set[Place]:
        return set(_leaves(self.content))


def _leaves(content: Any) -> Iterator[Place]:
    if not isinstance(content, dict | list):
        yield ()
        return
    for key, value in content.items() if isinstance(content, dict) else enumerate(content):
        yield from ((key, *rest) for rest in _leaves(value))


def _share(percent: float) -> float:
    return round(percent / 100, 5)


@pytest.fixture(scope="module")
def reference(shared_data: Path) -> Reference:
    file = shared_data.parent / "reference" / "paper_results.yaml"
    if not file.is_file():
        pytest.skip(f"the papers' figures are not here: {file.name} in reference/ beside the data sets")
    return Reference(yaml.safe_load(file.read_text(encoding="utf-8")))


@pytest.fixture(scope="module")
def experiments() -> dict[str, tuple[Settings, ...]]:
    return {name: load_experiment(name, ["seed=0"]).runs for name in shipped_experiments() if "/" in name}


# --- figures --------------------------------------------------------------------

IID, TWO_CLASSES = "partition=iid", "partition=classes classes_per_client=2"
SHARDS = "partition=shards shards_per_client=2"
OFFICE = ("amazon", "caltech", "dslr", "webcam")
DIGITS = ("mnist", "svhn", "usps", "synth", "mnist_m")


def fedtan(of: Reference) -> Iterator[Figure]:
    names = {"Centralized+BN": "Centralised", "FedAvg+Algorithm2": "FedAvg+Algorithm 2"}
    for table, section in (("table1", "with_momentum"), ("table2", "without_momentum")):
        for row in of.keys("fedtan_cifar10", section):
            key = "clients_accuracy" if row in ("FedBN", "SiloBN") else "accuracy"
            for kind, partition in (("iid", IID), ("noniid", TWO_CLASSES)):
                if kind not in of.keys("fedtan_cifar10", section, row):
                    continue
                place = ("fedtan_cifar10", section, row)
                figure = of.share(*place, kind), of.share(*place, f"{kind}_pm")
                label = names.get(row, row) + ("" if row == "Centralized+BN" else f", {partition}")
                yield f"fedtan/{table}", label, key, figure
                if table == "table1" and kind == "noniid" and key == "accuracy":
                    yield "fedtan/classes-per-client", label.replace(partition, "classes_per_client=2"), key, figure


def fedtan_traffic(of: Reference) -> Iterator[Figure]:
    place = "resnet20_cifar10_wire"
    yield "fedtan/table3", "FedAvg+GN", "parameters", of.at(place, "parameters_gn")
    yield "fedtan/table3", "FedAvg+BN", "elements_up_per_client", of.at(place, "parameters_bn_with_statistics")
    rounds = of.at(place, "communication_rounds_per_iteration")
    for row in of.keys(place, "mib_per_iteration"):
        yield "fedtan/table3", row, "broadcast_mib_per_round", of.at(place, "mib_per_iteration", row)
        yield "fedtan/table3", row, "communication_rounds", rounds[row.partition("+")[0]]
    iterations = 10_000
    for row in of.keys(place, "fedtan_ii_10000_iterations"):
        gib, extra_rounds, extra_bits = of.at(place, "fedtan_ii_10000_iterations", row).values()
        mib = round(gib * 1024 / iterations, 4)
        exact = int(row.removeprefix("M=")) if row != "FedTAN" else iterations
        sent = iterations - exact + exact * rounds["FedTAN"]
        assert 100 * (sent - iterations) / sent == pytest.approx(extra_rounds, abs=0.005)
        plain = of.at(place, "mib_per_iteration", "FedAvg+BN")
        assert 100 * (mib - plain) / mib == pytest.approx(extra_bits, abs=0.001), "of four decimals of a MiB"
        label = "FedTAN" if row == "FedTAN" else f"FedTAN-II, fedtan_rounds={exact / iterations}"
        yield "fedtan/table4", label, "broadcast_mib_per_round", mib
        yield "fedtan/table4", label, "communication_rounds", sent


def fixbn(of: Reference) -> Iterator[Figure]:
    for norm in of.keys("fixbn", "table1_E1_shards_no_momentum"):
        for kind, label in (("central", "Central"), ("fl", "Federated")):
            share = of.share("fixbn", "table1_E1_shards_no_momentum", norm, kind)
            yield "fixbn/table1", f"{label}, {norm}", "accuracy", share
    section = "table2_imagenet_dirichlet01_100clients_resnet18"
    for row in of.keys("fixbn", section):
        yield "fixbn/table2", row, "accuracy", of.share("fixbn", section, row)
    for model, label in (("mobilenet_v2", "MobileNetV2"), ("resnet50", "ResNet-50")):
        for row in of.keys("fixbn", "table3_cityscapes_miou", model):
            share = of.share("fixbn", "table3_cityscapes_miou", model, row)
            yield "fixbn/table3", f"{label}, {row}", "mean_iou", share
    table4 = {row: of.share("fixbn", "table4_shards_E100_128epochs", row) for row in ("BN", "GN", "FixBN")}
    for row in of.keys("fixbn", "table4_shards_E100_128epochs"):
        yield "fixbn/table4", row, "accuracy", of.share("fixbn", "table4_shards_E100_128epochs", row)
    for row, share in table4.items():  # one point of a figure is the set-up of Table 4
        yield "fixbn/clients", f"{row}, clients=5", "accuracy", share
        yield "fixbn/local-steps-128-epochs", f"{row}, E=100, {SHARDS}", "accuracy", share
        if row != "FixBN":
            yield "fixbn/batch-size", f"{row}, batch_size=20", "accuracy", share
    for freeze, row in (("0.5", "FixBN"), ("1.0", "BN")):
        yield "fixbn/freeze-round", f"FixBN, freeze_round={freeze}", "accuracy", table4[row]
    names = {"Centralized+BN": "Centralised, BN", "Centralized+FixBN": "Centralised, FixBN"}
    for row in of.keys("fixbn", "table5_10000_rounds"):
        place = ("fixbn", "table5_10000_rounds", row)
        if row in names:
            yield "fixbn/table5", names[row], "accuracy", of.share(*place)
            continue
        for kind, partition in (("iid", IID), ("noniid", TWO_CLASSES)):
            yield "fixbn/table5", f"{row}, {partition}", "accuracy", of.share(*place, kind)
            if row == "FedTAN":
                yield "fixbn/table5", f"{row}, {partition}", "communication_rounds", of.at(*place, "rounds")
    frozen = {
        "statistics_and_affine": "Statistics and affine",
        "statistics_only": "Statistics",
        "affine_only": "Affine",
        "nothing": "Nothing",
    }
    for key in of.keys("fixbn", "tableH_what_is_frozen"):
        yield "fixbn/tableH", frozen[key], "accuracy", of.share("fixbn", "tableH_what_is_frozen", key)
    for groups in of.keys("fixbn", "tableI_gn_groups"):
        yield "fixbn/tableI", f"GN, groups={groups}", "accuracy", of.share("fixbn", "tableI_gn_groups", groups)


def fedwon(of: Reference) -> Iterator[Figure]:
    own = "clients_own_accuracy"
    averages = (("digits_five_avg", "digits-five"), ("domainnet_avg", "domainnet"))
    for section, name in (*averages, ("office_caltech10_resnet18_avg", "resnet18")):
        for row in of.keys("fedwon", section):
            yield f"fedwon/{name}", row, own, of.share("fedwon", section, row)
    for row in of.keys("fedwon", "office_caltech10_alexnet_B32"):
        *domains, average = of.at("fedwon", "office_caltech10_alexnet_B32", row)
        for domain, value in zip(OFFICE, domains, strict=True):
            yield "fedwon/office-caltech10", row, f"{own}_{domain}", _share(value)
        yield "fedwon/office-caltech10", row, own, _share(average)
    section = "office_caltech10_small_batch_avg"
    for batch in of.keys("fedwon", section):
        for row in of.keys("fedwon", section, batch):
            label = f"{row}, batch_size={batch.removeprefix('B=')}"
            yield "fedwon/batch-size", label, own, of.share("fedwon", section, batch, row)
    section = "office_caltech10_wsconv_ablation_avg"
    for batch in of.keys("fedwon", section):
        for with_or_without in of.keys("fedwon", section, batch):
            share = of.share("fedwon", section, batch, with_or_without)
            yield "fedwon/ablation", f"{batch}, {with_or_without}", own, share
    section = "cifar10_mobilenetv2_100clients_C01_E5_300rounds"
    skews = {
        "iid": "iid",
        "dir1": "dirichlet alpha=1.0",
        "dir05": "dirichlet alpha=0.5",
        "dir01": "dirichlet alpha=0.1",
    }
    for row in of.keys("fedwon", section):
        for skew, partition in skews.items():
            share = of.share("fedwon", section, row, skew)
            yield "fedwon/cifar10", f"{row}, partition={partition}", "accuracy", share
    section = "digits_five_participation"
    for part in of.keys("fedwon", section):
        for row in of.keys("fedwon", section, part):
            label = f"{row}, fraction_train={part.removeprefix('C=')}"
            for domain, value in zip(DIGITS, of.at("fedwon", section, part, row), strict=True):
                yield "fedwon/participation", label, f"accuracy_{domain}", _share(value)


# What the reference says of set-ups, and what follows from its other figures.
NO_FIGURES = {
    ("resnet20_cifar10_wire", "bn_statistics"),
    ("resnet20_cifar10_wire", "bn_layers"),
    ("fedtan_cifar10", "other_datasets"),
    ("fedtan_cifar10", "classes_per_client_sweep"),
    ("fixbn", "setup"),
    ("fixbn", "figures"),
    ("fixbn", "auto_freeze"),
    ("fedwon", "defaults"),
    *(("fedbs", key) for key in ("setup", "partitions", "models", "claim")),
}


def test_each_figure_of_the_reference_is_in_a_file_and_no_file_has_another(
    reference: Reference, experiments: Mapping[str, tuple[Settings, ...]]
) -> None:
    expected: dict[tuple[str, str, str], Any] = {}
    for paper in (fedtan, fedtan_traffic, fixbn, fedwon):
        for name, label, key, figure in paper(reference):
            assert (name, label, key) not in expected
            expected[name, label, key] = figure
    shipped: dict[tuple[str, str, str], Any] = {}
    for name, runs in experiments.items():
        for run in runs:
            for key, figure in (run.published.model_extra or {} if run.published is not None else {}).items():
                shipped[name, condition(run.cell), key] = figure
    assert sorted(shipped) == sorted(expected)
    assert {place: figure for place, figure in shipped.items() if figure != pytest.approx(expected[place])} == {}
    not_in_a_file = {path[:2] for path in reference.figures() - reference.used}
    assert not_in_a_file == NO_FIGURES


# --- set-ups --------------------------------------------------------------------


def in_words(partition: Any) -> str:
    return " ".join(str(partition[key]) for key in ("kind", "alpha") if key in partition)


def test_the_runs_of_fixbn_have_the_set_up_of_the_reference(
    reference: Reference, experiments: Mapping[str, tuple[Settings, ...]]
) -> None:
    setup, figures = reference.at("fixbn", "setup"), reference.at("fixbn", "figures")
    for run in experiments["fixbn/table4"]:
        train = run.train
        assert (run.clients, train.lr, train.batch_size) == (setup["clients"], setup["lr"], setup["batch"])
        assert train.momentum == 0.9
        assert train.weight_decay == float(setup["weight_decay"])
        assert (train.schedule.kind, train.schedule.milestones) == ("step", (0.5, 0.75))
        assert run.strategy.get("freeze_round", 0.5) == 0.5
        assert run.rounds * run.clients * (train.steps or 0) * train.batch_size == 128 * 50_000
        assert run.data.partition.model_dump()["shards_per_client"] == 10 * 0.2, "a fifth of ten classes"
        assert run.data.pad == 2
    assert len(load_experiment("fixbn/table4", ["only=BN"]).runs) == setup["runs"]
    for name in ("fixbn/local-steps", "fixbn/local-steps-128-epochs"):
        runs = experiments[name]
        assert sorted({run.train.steps or 0 for run in runs}) == figures["local_steps"]
        partitions = dict.fromkeys(in_words(run.data.partition.model_dump()) for run in runs)
        assert list(partitions) == figures["partitions"]
    assert {run.rounds for run in experiments["fixbn/local-steps"]} == {128}
    for run in experiments["fixbn/local-steps-128-epochs"]:
        epochs = run.rounds * run.clients * (run.train.steps or 0) * run.train.batch_size / 50_000
        assert epochs == pytest.approx(128, rel=0.02), "to a round of 2,500 steps"
    assert {run.rounds for run in experiments["fixbn/dynamics"]} == {200}


def test_the_runs_of_fedtan_fedwon_and_fedbs_have_the_set_up_of_the_reference(
    reference: Reference, experiments: Mapping[str, tuple[Settings, ...]]
) -> None:
    sweep = experiments["fedtan/classes-per-client"]
    swept = sorted({run.data.partition.model_dump()["classes_per_client"] for run in sweep})
    assert swept == reference.at("fedtan_cifar10", "classes_per_client_sweep")

    defaults = reference.at("fedwon", "defaults")
    for name in ("fedwon/digits-five", "fedwon/office-caltech10", "fedwon/domainnet"):
        for run in experiments[name]:
            assert (run.train.batch_size, run.train.epochs) == (defaults["batch"], defaults["local_epochs"])
            assert run.strategy.get("clip", defaults["agc_lambda"]) == defaults["agc_lambda"]
    for run in experiments["fedwon/cifar10"]:
        strategy = run.strategy.get("base", run.strategy)
        assert (run.clients, run.rounds, run.train.epochs, strategy["fraction_train"]) == (100, 300, 5, 0.1)

    setup = reference.at("fedbs", "setup")
    rounds = {"mnist": "mnist", "fashion-mnist": "fashion_mnist"}
    rounds |= {"cifar10": "cifar10_balanced", "cifar10-unbalanced": "cifar10_unbalanced"}
    for name, key in rounds.items():
        for run in experiments[f"fedbs/{name}"]:
            train = run.train
            assert (run.clients, run.rounds) == (setup["clients"], setup["rounds"][key])
            assert run.strategy["fraction_train"] * run.clients == setup["per_round"]
            assert (train.batch_size, train.lr, train.epochs) == (setup["batch"], setup["lr"], setup["local_epochs"])
