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
from fedbn_flwr.results.yaml_text import dump_yaml, parse_yaml
from fedbn_flwr.trees import flat_settings
from tests.support.experiments import fault
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


def test_a_long_value_is_cut_and_the_expectation_is_not() -> None:
    message = fault("model: {stem: " + "x" * 100_000 + "}")
    assert len(message) < 2000
    assert message.endswith("expected 'auto', 'small' or 'large'")
