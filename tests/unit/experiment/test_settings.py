"""Configuration stops at the door: every fault is found there, named, and told together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fedbn_flwr.experiment.data as experiment_data
import fedbn_flwr.experiment.prepare as experiment_prepare
from fedbn_flwr.data.catalogue import CATALOGUE
from fedbn_flwr.data.dataset import DataSet, Groups
from fedbn_flwr.data.images import Images
from fedbn_flwr.errors import SettingsError
from fedbn_flwr.experiment.find import (
    load_experiment,
    merge,
    parse_overrides,
    parse_yaml,
    read_experiment,
    run_names,
    shipped_experiments,
)
from fedbn_flwr.experiment.prepare import make_rule, prepare, prepare_run
from fedbn_flwr.experiment.settings import Data, Settings

EXPERIMENTS = Path(__file__).resolve().parents[3] / "apps" / "experiments"
FILES = sorted(EXPERIMENTS.rglob("*.y*ml"))


def read(text: str, *overrides: str) -> Settings:
    (run,) = read_experiment(parse_yaml(text), overrides).runs
    return run


def fault(text: str, *overrides: str) -> str:
    with pytest.raises(SettingsError) as caught:
        read_experiment(parse_yaml(text), overrides)
    return str(caught.value)


# --- the shipped experiments -------------------------------------------------


def stand_in(data: Data, device: str) -> DataSet:
    """Random images in place of a data set that is not shipped: a file's settings can be checked without it."""
    if data.name == "digits":
        return load_data(data, device)
    entry = CATALOGUE.get(data.name)
    if entry is None:
        shape: tuple[int, ...] = (3, data.size or 32, data.size or 32)  # type: ignore[arg-type]
    else:  # one that stays as it is has the size of its boxes
        shape = (entry.channels, *[entry.size or data.crop or 0] * 2)
    classes = data.classes or (entry.classes if entry else 10)
    count = 1000 * classes
    images = torch.zeros(1, *shape, dtype=torch.uint8).expand(count, *shape)
    if entry is not None and entry.ids is not None:  # each pixel has a label
        part = Images(images, torch.zeros(count, dtype=torch.int64), images[:, 0])
    else:
        part = Images(images, torch.arange(count) % classes)
    natural = None
    if data.partition.kind == "natural":  # as many values as Cityscapes has cities to train on
        rows = torch.arange(count) % 18
        natural = Groups(data.partition.column, tuple(map(str, range(18))), rows, rows)
    return DataSet(data.name, part, part, tuple(map(str, range(classes))), natural=natural)


load_data = experiment_data.load_data


def test_there_are_shipped_experiments() -> None:
    assert FILES
    assert set(shipped_experiments()) <= {file.stem for file in FILES}


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(EXPERIMENTS)))
def test_every_shipped_experiment_loads_and_can_be_prepared(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (experiment_data, experiment_prepare):
        monkeypatch.setattr(module, "load_data", stand_in)
    experiment_data.partition_of.cache_clear()
    experiment = load_experiment(str(file))
    assert experiment.description, "fedbn list experiments shows it"
    names = run_names(experiment)
    for run, name in zip(experiment.runs, names, strict=True):
        if run.data.crop is not None:  # networks of pixels take seconds to try
            run = run.model_copy(update={"data": run.data.model_copy(update={"crop": 64})})
        prepared = prepare_run(run, name, make_rule(run))
        assert prepared.name == name
    experiment_data.partition_of.cache_clear()


def test_a_shipped_experiment_is_found_by_name() -> None:
    assert load_experiment("demo").name == "demo"


def test_an_unknown_experiment_is_answered_with_the_nearest() -> None:
    with pytest.raises(SettingsError, match=r"no experiment 'dmo'.*did you mean 'demo'"):
        load_experiment("dmo")


# --- unknown keys ------------------------------------------------------------


def test_an_unknown_key_is_named_with_its_value_and_a_suggestion() -> None:
    found = fault("rouns: 3")
    assert "unknown key 'rouns' (= 3); did you mean 'rounds'?" in found


def test_an_unknown_nested_key_is_answered_by_its_section() -> None:
    found = fault("train: {learning_rat: 1}")
    assert "unknown key 'train.learning_rat' (= 1)" in found
    names = "batch_size, channels_last, epochs, keep_momentum, lr, momentum, precision, schedule, steps, weight_decay"
    assert f"known: {names}" in found
    assert "did you mean 'momentum'?" in fault("train: {momentun: 0.9}")


def test_an_unknown_key_two_levels_down() -> None:
    found = fault("train: {schedule: {gama: 0.5}}")
    assert "unknown key 'train.schedule.gama' (= 0.5); did you mean 'gamma'?" in found


def test_an_unknown_key_of_a_partition_is_answered_by_its_kind() -> None:
    found = fault("data: {partition: {kind: classes, classes_per_client: 2, asignment: random}}")
    assert "unknown key 'data.partition.asignment' (= 'random'); did you mean 'assignment'?" in found
    found = fault("data: {partition: {kind: iid, alpha: 1}}")
    assert "unknown key 'data.partition.alpha' (= 1)" in found
    assert "min_size" not in found


def test_keys_of_experiments_are_suggested_too() -> None:
    assert "did you mean 'seeds'?" in fault("sedes: [1, 2]")


# --- wrong types and values --------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rounds: '3'", ["rounds is '3'", "integer"]),
        ("rounds: 3.0", ["rounds is 3.0", "integer"]),
        ("rounds: true", ["rounds is True", "integer"]),
        ("rounds: 0", ["rounds is 0", "greater than or equal to 1"]),
        ("seed: -1", ["seed is -1"]),
        ("train: {lr: fast}", ["train.lr is 'fast'", "number"]),
        ("train: {lr: 0}", ["train.lr is 0", "greater than 0"]),
        ("train: {momentum: 1.0}", ["train.momentum is 1.0", "less than 1"]),
        ("train: 3", ["train is 3"]),
        ("data: {augment: [flop]}", ["data.augment", "'flop'", "'flip'"]),
        ("data: {partition: {kind: sharks}}", ["data.partition.kind is not one of iid, dirichlet, classes", "sharks"]),
        ("data: {partition: {alpha: 1}}", ["data.partition.kind is not one of iid, dirichlet, classes"]),
        ("data: {partition: {kind: classes}}", ["'data.partition.classes_per_client' is missing"]),
        ("data: {partition: {kind: dirichlet, alpha: 0}}", ["data.partition.alpha is 0", "greater than 0"]),
        ("engine: {workers: -1}", ["engine: workers is -1; give 0, a number of processes, or 'auto'"]),
        ("engine: {name: dask}", ["engine.name is 'dask'", "'local' or 'ray'"]),
        ("strategy: {freeze_round: 1}", ["strategy needs a name"]),
        ("train: {epochs: 1, steps: 2}", ["train: epochs (1) and steps (2) exclude each other"]),
        ("train: {keep_momentum: true}", ["train: keep_momentum keeps nothing while momentum is 0"]),
    ],
)
def test_a_wrong_value_is_named_with_what_is_expected(text: str, words: list[str]) -> None:
    found = fault(text)
    for word in words:
        assert word in found


def test_all_faults_are_told_at_once() -> None:
    found = fault("{rouns: 3, clients: many, train: {lr: -1, stpes: 2}, data: {partition: {kind: classes}}}")
    for word in (
        "'rouns'",
        "clients is 'many'",
        "train.lr is -1",
        "'train.stpes'",
        "'data.partition.classes_per_client' is missing",
    ):
        assert word in found


def test_a_fault_in_a_run_names_the_run() -> None:
    assert "run 'second'" in fault("runs: {first: {rounds: 1}, second: {rounds: none}}")


def test_a_file_that_is_not_a_mapping_is_refused() -> None:
    assert "expected a mapping of keys, found list" in fault("[1, 2]")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"cannot read the experiment .*absent\.yaml.*No such file"):
        load_experiment(str(tmp_path / "absent.yaml"))


def test_settings_are_frozen() -> None:
    run = read("rounds: 3")
    with pytest.raises(ValueError, match="frozen"):
        run.rounds = 4  # type: ignore[misc]


# --- YAML as a person reads it -----------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-4", 1e-4), ("1E5", 1e5), ("-2e3", -2e3), ("1.5e-3", 1.5e-3), ("1.e2", 100.0), ("0.1", 0.1), ("3", 3)],
)
def test_numbers_are_numbers(text: str, value: float) -> None:
    found = parse_yaml(text)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("text", ["1e", "e5", "1e-4x", "v1e4"])
def test_text_that_looks_like_a_number_stays_text(text: str) -> None:
    assert parse_yaml(text) == text


def test_learning_rate_in_exponent_form_is_accepted() -> None:
    assert read("train: {lr: 1e-4}").train.lr == 1e-4


def test_a_key_given_twice_is_an_error_with_its_line() -> None:
    with pytest.raises(SettingsError, match=r"'rounds' stands twice \(line 3\)"):
        parse_yaml("rounds: 1\nclients: 2\nrounds: 3\n")
    with pytest.raises(SettingsError, match="'lr' stands twice"):
        parse_yaml("train: {lr: 1, momentum: 0, lr: 2}")


def test_text_that_is_no_yaml_is_refused_on_one_line() -> None:
    with pytest.raises(SettingsError, match="not readable as YAML") as caught:
        parse_yaml("train: {lr: 1")
    assert "\n" not in str(caught.value)


def test_a_mapping_as_a_key_is_refused() -> None:
    with pytest.raises(SettingsError):
        parse_yaml("? [1]\n: 2")


def test_merge_keys_of_yaml_work() -> None:
    assert parse_yaml("a: &a {x: 1}\nb: {<<: *a, y: 2}")["b"] == {"x": 1, "y": 2}


# --- overrides and merging ---------------------------------------------------


def test_overrides_are_yaml_values_at_a_path() -> None:
    found = parse_overrides(["rounds=3", "train.lr=1e-2", "train.steps=5", "data.name=a=b", "data.augment=[flip]"])
    assert found == {
        "rounds": 3,
        "train": {"lr": 0.01, "steps": 5},
        "data": {"name": "a=b", "augment": ["flip"]},
    }


@pytest.mark.parametrize("word", ["rounds", "=3", ""])
def test_an_override_without_key_or_value_is_refused(word: str) -> None:
    with pytest.raises(SettingsError, match="is not of the form key=value"):
        parse_overrides([word])


def test_an_override_below_a_value_is_refused() -> None:
    with pytest.raises(SettingsError, match="'train' is already given a value"):
        parse_overrides(["train=3", "train.lr=1"])


def test_overrides_reach_every_run() -> None:
    content = parse_yaml("rounds: 5\nruns: {a: {train: {lr: 1}}, b: {rounds: 7}}")
    runs = read_experiment(content, ["rounds=2", "train.momentum=0.5"]).runs
    assert [run.rounds for run in runs] == [2, 2]
    assert [run.train.momentum for run in runs] == [0.5, 0.5]
    assert [run.train.lr for run in runs] == [1, 0.1]


def test_merging_goes_mapping_by_mapping() -> None:
    base = {"train": {"lr": 1, "steps": 2}, "rounds": 3}
    assert merge(base, {"train": {"lr": 5}}) == {"train": {"lr": 5, "steps": 2}, "rounds": 3}
    assert base == {"train": {"lr": 1, "steps": 2}, "rounds": 3}


def test_a_mapping_that_names_another_thing_replaces() -> None:
    base: dict[str, Any] = {"strategy": {"name": "FixBN", "freeze_round": 0.5}}
    assert merge(base, {"strategy": {"name": "FedAvg"}}) == {"strategy": {"name": "FedAvg"}}
    assert merge(base, {"strategy": {"name": "FixBN", "freeze": ["affine"]}}) == {
        "strategy": {"name": "FixBN", "freeze_round": 0.5, "freeze": ["affine"]}
    }
    run = read("data: {partition: {kind: classes, classes_per_client: 2}}", "data.partition.kind=iid")
    assert run.data.partition.kind == "iid"


def test_another_data_set_or_model_keeps_what_stands_beside_its_name() -> None:
    text = "data: {partition: {kind: dirichlet, alpha: 0.3}, augment: [flip]}\nmodel: {name: cnn, norm: gn}"
    run = read(text, "data.name=./elsewhere", "model.name=resnet20", "engine.name=ray")
    assert (run.data.name, run.data.partition.kind, run.data.augment) == ("./elsewhere", "dirichlet", ("flip",))
    assert (run.model.name, run.model.norm) == ("resnet20", "gn")


def test_an_override_changes_one_argument_of_a_strategy() -> None:
    run = read("strategy: {name: FixBN, freeze_round: 0.5}", "strategy.freeze_round=3")
    assert run.strategy == {"name": "FixBN", "freeze_round": 3}


# --- runs and seeds ----------------------------------------------------------


def test_seeds_expand_each_run() -> None:
    runs = read_experiment(parse_yaml("seeds: [0, 1, 2]\nruns: {a: {}, b: {rounds: 2}}")).runs
    assert [(run.label, run.seed) for run in runs] == [("a", 0), ("a", 1), ("a", 2), ("b", 0), ("b", 1), ("b", 2)]


def test_a_seed_on_the_command_line_asks_for_that_one() -> None:
    content = parse_yaml("seeds: [0, 1, 2]")
    assert [run.seed for run in read_experiment(content, ["seed=7"]).runs] == [7]
    assert [run.seed for run in read_experiment(content, ["seeds=[4, 5]"]).runs] == [4, 5]


@pytest.mark.parametrize("seeds", ["3", "[a]", "[true]", "[1.5]"])
def test_seeds_must_be_a_list_of_numbers(seeds: str) -> None:
    assert "expected a list of numbers" in fault(f"seeds: {seeds}")


def test_runs_must_map_labels_to_changes() -> None:
    assert "runs must map a label to changes" in fault("runs: [a, b]")


def test_a_run_without_a_label_has_the_name_of_its_strategy() -> None:
    assert read("strategy: {name: FixBN}").label == "FixBN"
    assert read("rounds: 1").label == "FedAvg"


def test_names_of_runs_are_names_of_folders() -> None:
    runs = read_experiment(parse_yaml("seeds: [0, 1]\nruns: {'a b/c': {}}"))
    assert run_names(runs) == ["a-b-c-seed0", "a-b-c-seed1"]


def test_the_same_seed_twice_is_refused() -> None:
    with pytest.raises(SettingsError, match="two runs are both called"):
        run_names(read_experiment(parse_yaml("seeds: [1, 1]")))


# --- what only the objects can tell ------------------------------------------


def refused(text: str) -> str:
    with pytest.raises(SettingsError) as caught:
        prepare(read_experiment(parse_yaml(text)))
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model: {name: resnet21}", ["model.name='resnet21'", "did you mean 'resnet20'?"]),
        ("model: {norm: gm}", ["model.norm='gm'", "known: bn, "]),
        ("model: {norm: gn, groups: 3}", ["bn1 has 16 channels", "3 groups do not divide"]),
        ("model: {classes: 7}", ["model.classes is 7", "'digits' has 10 classes"]),
        ("data: {classes: 9}", ["data.classes is 9", "10 classes"]),
        ("strategy: {name: FedAgv}", ["strategy.name='FedAgv'", "did you mean 'FedAvg'?"]),
        ("strategy: {name: FixBN, freeze_rond: 1}", ["strategy.freeze_rond (= 1)", "did you mean 'freeze_round'?"]),
        ("strategy: {name: FedAvg, fraction_train: half}", ["strategy.fraction_train of FedAvg is 'half'", "float"]),
        ("strategy: {name: FedAvg, base: {name: FedAvg}}", ["FedAvg wraps no other strategy"]),
        ("{rounds: 3, strategy: {name: FixBN, freeze_round: 4}}", ["freeze_round is 4, but there are 3 rounds"]),
        ("strategy: {name: FixBN, base: FedAvg}", ["strategy.base is 'FedAvg'", "{name: FedAvg}"]),
    ],
)
def test_what_cannot_be_built_is_refused_before_training(text: str, words: list[str]) -> None:
    found = refused(text)
    for word in words:
        assert word in found
