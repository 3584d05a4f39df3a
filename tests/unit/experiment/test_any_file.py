"""Any file is an experiment or is refused: a UserError with a message under 2 kB, and no other exception."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fedbn_flwr.errors import UserError
from fedbn_flwr.experiment.file.content import shipped_experiments
from fedbn_flwr.experiment.file.layers import load_experiment, parse_overrides, split_changes
from fedbn_flwr.experiment.prepare import make_rule
from fedbn_flwr.experiment.settings import Settings
from fedbn_flwr.trees import flat_settings
from fedbn_flwr.yaml_text import dump_yaml, parse_yaml
from tests.support.experiments import fault, read
from tests.support.fuzz import cases, damaged

# Values that were accepted or ended a run in earlier versions, and others of each type.
SCALARS = [
    "0", "-1", "1", "2", "0.5", "-0.5", "1e300", "-1e300", "1e-300", ".inf", "-.inf", ".nan", "true", "~", "on", "''",
    "auto", "..", "../x", "/", "$\\frac$", '"\\0"', '"\\ud800"', "2024-01-01", "2024-99-99", "!!int abc",
    "!!binary aGk=",
    "!!set {a, b}", "!!float x", "!!timestamp x", "!!python/object:os.system x", "0x_", "0b_", "1" * 30, "1" * 5000,
    "x" * 3000, "é", "os:system", ":", "a:", "{}", "[]", "[[]]", "{a: 1}", "[1, 2]", "[.nan]", "{name: FedAvg}",
    "&a [*a]", "{kind: {}}", "{kind: [1]}", "{1: 2}", "{name: FixBN, base: {name: FedAvg, 3: 4}}", "[{3: 4}]",
    "{row: 1, sweep: 2, tune: 3}", "{row: a, sweep: {train.lr: 1}, tune: {}}", "{3: {4: 5}}", "{a: {b: 1}}", "cosine",
    "{name: {a: 1}}", "{<<: [{a: 1}], b: 2}", "? [a]\n", "[" * 200, "FixBN", "dirichlet", "FedAvg", "resnet20", "gn",
]  # fmt: skip
KEYS = [
    "name", "label", "rounds", "clients", "seed", "seeds", "runs", "description", "track", "mods", "data",
    "data.name", "data.image", "data.size", "data.pad", "data.augment", "data.partition", "data.partition.kind",
    "data.partition.alpha", "data.normalise", "data.options", "model", "model.name", "model.norm", "model.stem",
    "model.brn.r_max", "train", "train.lr", "train.optimizer", "train.loss", "train.momentum", "train.schedule",
    "train.schedule.milestones", "train.schedule.gamma", "train.class_weights", "train.batch_size", "train.clip",
    "strategy", "strategy.name", "strategy.base", "strategy.base.name", "strategy.fraction_train",
    "strategy.fraction_evaluate", "strategy.freeze_round", "strategy.min_train_nodes", "strategy.proximal_mu",
    "strategy.exchange_timeout", "strategy.beta", "strategy.num_malicious_nodes", "strategy.server_learning_rate",
    "engine.timeout", "engine.node_timeout", "engine.workers", "evaluate",
    "evaluate.metrics", "evaluate.validation", "only", "unknown", "train.unknown", "",
    "sizes", "size", "cell", "cell.sweep", "sweep", "tune", "extends", "strategy.base.base", "data.partition.kind.x",
    "strategy.3", "engine", "engine.name",
]  # fmt: skip
NAMES = [
    "FedAvg",
    "FixBN",
    "FedTAN",
    "FedBN",
    "FedProx",
    "FedAdam",
    "FedTrimmedAvg",
    "Krum",
    "Scaffold",
    "MeanStatistics",
]
SHIPPED = [file.read_bytes() for file in shipped_experiments().values()]

overrides = st.builds("{}={}".format, st.sampled_from(KEYS), st.sampled_from(SCALARS))
of_strategy = st.builds(
    "strategy={{name: {}, {}: {}}}".format,
    st.sampled_from(NAMES),
    st.text("abe_", max_size=3)
    | st.sampled_from([key.partition(".")[2] for key in KEYS if key.startswith("strategy.")]),
    st.sampled_from(SCALARS),
)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.dates(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=5), inner),
    max_leaves=12,
)


files = st.one_of(
    st.binary(max_size=60),
    st.text(max_size=60).map(lambda text: text.encode("utf-16")),
    st.builds(damaged, st.sampled_from(SHIPPED), st.integers(0, 2**32)),
    st.dictionaries(st.sampled_from(KEYS), values, max_size=4).map(lambda content: yaml.safe_dump(content).encode()),
    st.sampled_from(SHIPPED),
)  # fmt: skip


def attempt(source: str, changes: list[str]) -> Any:
    """The experiment with its strategies made, or the error with which it is refused."""
    try:
        experiment = load_experiment(source, changes)
        list(experiment.by_folder)
        for run in experiment.runs:
            make_rule(run)
    except UserError as error:
        return error
    return experiment


def check(found: Any) -> None:
    if isinstance(found, UserError):
        assert 0 < len(str(found).encode()) < 2048
        assert str(found).replace("\n", "").isprintable()
        assert found.exit_code == 2


@settings(max_examples=cases(200))
@given(content=files, changes=st.lists(overrides | of_strategy, max_size=3))
def test_any_file_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, changes: list[str]
) -> None:
    file = tmp_path_factory.getbasetemp() / "any.yaml"
    file.write_bytes(content)
    check(attempt(str(file), changes))


BASES = [
    "{rounds: 3, clients: 2}",
    "{runs: {A: {strategy: FedAvg}, B: {strategy: {name: FixBN, freeze_round: 1}}}, seeds: [0, 1]}",
    "{sweep: {train.lr: [0.1, 0.2]}, tune: {train.momentum: [0, 0.9]}}",
    "{sizes: {small: {rounds: 2}}, data: {partition: {kind: dirichlet, alpha: 1.0}}, train: {schedule: cosine}}",
]


@settings(max_examples=int(os.environ.get("FEDBN_EXAMPLES", "200")))
@given(base=st.sampled_from(BASES), changes=st.lists(overrides | of_strategy, min_size=1, max_size=5))
def test_any_settings_are_read_or_refused(base: str, changes: list[str]) -> None:
    check(attempt(base, changes))
    keys: dict[str, Any] = {}
    with suppress(UserError):
        keys = parse_overrides(changes)
    check(attempt(dump_yaml({**parse_yaml(base), **keys}), []))


@settings(max_examples=cases(300))
@given(
    key=st.sampled_from(sorted({*filter(None, KEYS), *flat_settings(Settings().model_dump())})),
    value=st.sampled_from(SCALARS),
)
@example(key="data.partition.alpha", value="0.5")
def test_an_error_names_the_key_that_was_changed(key: str, value: str) -> None:
    if isinstance(found := attempt("{rounds: 3, clients: 2}", [f"{key}={value}"]), UserError):
        assert key.rpartition(".")[2] in str(found)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("sizes: 3", "sizes must map a size to changes"),
        ("data: {partition: {kind: {}}}", "data.partition.kind={} is not a partition"),
        ("data: {partition: {alpha: 0.1}}", "data.partition has alpha without kind; known: dirichlet, or module"),
        ("data: {partition: {kind: [1]}}", "data.partition.kind=[1] is not a partition"),
        ("data: {partition: {kind: {x: 1}}}", "data.partition.kind={'x': 1} is not a partition"),
        ("cell: {row: 1, sweep: 2, tune: 3}", "cell.row is 1: expected a valid string; cell.sweep is 2"),
        ("train: {1: 2}", "unknown key 'train.1'"),
        ("strategy: &a {name: FedAvg, base: *a}", "found an alias; expected the value itself in line 1"),
        ("train: " + "[" * 60 + "]" * 60, "nested more than 50 levels"),
        ("train: " + "[" * 20_000, "nested more than 50 levels"),
        ("train: {lr: .inf}", "train.lr is inf; expected a finite number"),
        ("engine: {timeout: 1e300}", "engine.timeout is 1e+300: expected at most 1000000"),
        (
            "strategy: {name: FedAvg, x: !!binary aGk=}",
            "could not determine a constructor for the tag 'tag:yaml.org,2002:binary' in line 1",
        ),
        ("seed: " + "1" * 30, f"seed is {'1' * 30}: expected a number below 9.2"),
        ("rounds: !!int abc", "not readable as YAML: invalid literal"),
        ('name: "a\\0b"', "name is 'a\\x00b'; expected text without the character '\\x00'"),
        ("data: {pad: 100000}", "data.pad is 100000: expected at most 1000"),
        ("rounds: 1000000000000", "rounds is 1000000000000: expected at most 1000000"),
        ("data: {size: [8, 100000]}", "data.size: found [8, 100000]; expected pixels per side, or [height, width], at"),
        ("label: 'a\n\n  b'", "label is 'a\\nb': expected one line"),
        ('label: "a\\e[31m"', "label is 'a\\x1b[31m': expected one line without control characters"),
        ("train: {schedule: {kind: step, milestones: [-1]}}", "train.schedule: milestones has -1; expected a fraction"),
        ("train: {schedule: {kind: step, milestones: [1.5]}}", "train.schedule: milestones has 1.5; expected a frac"),
        ("train: {schedule: {kind: cosine, gamma: 0.5}}", "train.schedule: gamma (0.5) is for kind step, but"),
        ("train: {schedule: {milestones: [0.1]}}", "train.schedule: milestones ([0.1]) are for kind step, but kind is"),
        ("train: {schedule: {kind: step, gamma: 2.0}}", "train.schedule.gamma is 2.0: expected at most"),
        (("{}", "train.lr=["), "train.lr: not readable as YAML"),
        (("{}", "strategy={a: .nan}"), "strategy: a is nan; expected a finite number"),
    ],
)
def test_what_is_wrong_is_named(given: str | tuple[str, str], message: str) -> None:
    assert message in fault(*([given] if isinstance(given, str) else given))


def test_changes_that_a_blank_has_split_need_quotes() -> None:
    """Before the first part is found to be no YAML."""
    message = fault("{}", *split_changes("rounds=2 strategy={name: FedTAN}"))
    assert message.startswith("'FedTAN}' is not of the form key=value")
    assert message.endswith("put one that has blanks in quotes: 'strategy={name: FedBN}'")


def test_a_file_with_wrong_yaml_or_without_any_is_named_and_control_characters_are_not_repeated(
    tmp_path: Path,
) -> None:
    file = tmp_path / "mine.yaml"
    for text, message in (
        ("description: café".encode("latin-1"), r"mine\.yaml.*'utf-8' codec can't decode byte 0xe9 in position 16"),
        (b"a: b: c", r"mine\.yaml': not readable as YAML: mapping values are not allowed here in line 1, column 5$"),
        (b"", r"mine\.yaml': expected a mapping of keys, found nothing$"),
        (b"a: 1\na: 2", r"mine\.yaml': not readable as YAML: the key 'a' is given twice in line 2, column 1$"),
    ):
        file.write_bytes(text)
        (tmp_path / "child.yaml").write_text("extends: mine.yaml")
        for name in ("mine.yaml", "child.yaml"):
            with pytest.raises(UserError, match=message):
                load_experiment(str(tmp_path / name))
    assert str(UserError("a \x1b[31mb\nc \ud800")) == "a ?[31mb\nc ?"


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ("{name: FixBN, freeze_round: -1}", "strategy: freeze_round is -1; expected a round"),
        ("{name: FixBN, base: {name: Fedprox}}", "strategy.base.name='Fedprox' is not a strategy; did you mean 'FedPr"),
        ("{name: FixBN, base: {name: FixBN, base: {name: FedProx, proximal_mu: -1}}}",
         "strategy.base.base: proximal_mu is -1; expected a number >= 0"),
        ("{name: FixBN, base: {name: FedAvg, x: 1}}", "strategy.base.x (= 1) is not an argument of FedAvg"),
        ("{name: FixBN, base: {name: FedAvg, 3: 4}}", "strategy.base.3 (= 4) is not an argument of FedAvg"),
        ("{name: MeanStatistics, base: {name: FedAdam, eta: -1}}", "strategy.base.eta of FedAdam is -1; expected a"),
        ("{name: FedAvgM, server_momentum: 1}", "strategy.server_momentum of FedAvgM is 1; expected a number >= 0 and"),
        *((f"{{name: FedAvg, fraction_train: {share}}}",
           f"strategy.fraction_train of FedAvg is {share}; expected a number > 0 and <= 1") for share in (-1, 0, 1.5)),
        ("{name: FedAvg, node_timeout: -1}", "strategy.node_timeout of FedAvg is -1; expected a number of seconds > 0"),
    ],
)  # fmt: skip
def test_a_strategy_s_argument_is_named_with_its_section(strategy: str, message: str) -> None:
    with pytest.raises(UserError) as found:
        make_rule(read(f"strategy: {strategy}"))
    assert message in str(found.value)


def test_a_long_value_is_cut_and_the_expectation_is_not() -> None:
    message = fault("model: {stem: " + "x" * 100_000 + "}")
    assert len(message) < 2000
    assert message.endswith("expected 'auto', 'small' or 'large'")
