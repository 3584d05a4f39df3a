"""Experiments are found, read from YAML, changed from a command line and expanded into runs."""

from __future__ import annotations

import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from fedbn_flwr import named
from fedbn_flwr.errors import SettingsError
from fedbn_flwr.experiment.file.content import merge, read_content
from fedbn_flwr.experiment.file.layers import (
    from_run_config,
    load_experiment,
    parse_overrides,
    parse_yaml,
    read_experiment,
    split_changes,
)
from fedbn_flwr.experiment.settings import Settings
from fedbn_flwr.results.yaml_text import dump_yaml
from tests.support.command import ROOT
from tests.support.experiments import fault, read

# --- finding ---


def test_a_relative_file_begins_where_the_command_was_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.yaml").write_text("rounds: 7\n")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with pytest.raises(SettingsError, match=r"cannot read the experiment 'mine\.yaml'"):
        load_experiment("mine.yaml")
    monkeypatch.setenv(named.FOLDER, str(tmp_path))  # as in Flower's processes, which run in a folder of their own
    for source in ("mine.yaml", "{extends: mine.yaml}"):
        (run,) = from_run_config({"experiment": source}).runs
        assert run.rounds == 7


# --- extends ---

PARENT = (
    "rounds: 8\ndescription: parent\ntrain: {lr: 0.5, steps: 3}\nstrategy: {name: FedProx}\nruns: {a: {rounds: 3}}\n"
)


def test_an_experiment_takes_the_settings_of_the_one_it_extends(tmp_path: Path) -> None:
    (tmp_path / "parent.yaml").write_text(PARENT)
    (tmp_path / "child.yaml").write_text("extends: parent.yaml\ntrain: {lr: 0.1}\nstrategy: {name: FedBN}\n")
    content, name = read_content(str(tmp_path / "child.yaml"))
    assert (content, name) == ({"rounds": 8, "train": {"lr": 0.1, "steps": 3}, "strategy": {"name": "FedBN"}}, "child")
    experiment = load_experiment(str(tmp_path / "child.yaml"), ["rounds=2"])
    (run,) = experiment.runs
    assert (run.rounds, run.label, experiment.description) == (2, "FedBN", "")
    assert from_run_config({"experiment": str(tmp_path / "child.yaml"), "set": "rounds=2"}) == experiment
    (run,) = load_experiment("{extends: quick, rounds: 7}").runs
    assert (run.rounds, run.clients, run.strategy["name"]) == (7, 3, "FixBN")


def test_a_value_replaces_the_list_of_candidates_of_the_file_that_it_extends(tmp_path: Path) -> None:
    (tmp_path / "parent.yaml").write_text(
        "rounds: 2\ntune: {train: {lr: [0.1, 0.2]}, strategy.proximal_mu: [0.1, 1]}\nstrategy: {name: FedProx}\n"
    )

    def candidates(text: str) -> list[Any]:
        (tmp_path / "child.yaml").write_text(f"extends: parent.yaml\n{text}\n")
        runs = load_experiment(str(tmp_path / "child.yaml")).runs
        return [(run.train.lr, run.strategy.get("proximal_mu")) for run in runs]

    assert candidates("rounds: 3") == [(0.1, 0.1), (0.1, 1), (0.2, 0.1), (0.2, 1)]
    assert candidates("train: {lr: 0.5}") == [(0.5, 0.1), (0.5, 1)]
    assert candidates("train: {lr: 0.5}\ntune: {train.lr: [3, 4]}\nstrategy: {proximal_mu: 2}") == [(3, 2), (4, 2)]


def test_the_experiment_of_the_page_on_sites_is_read(tmp_path: Path) -> None:
    """Its command makes the TOML file in which a user sends it as text to a remote SuperLink."""
    page = (ROOT / "docs" / "sites.md").read_text(encoding="utf-8")
    (experiment,) = re.findall(r"^```yaml\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    (command,) = re.findall(r"^\{ echo .*", page, re.MULTILINE)
    (tmp_path / "heart.yaml").write_text(experiment)
    subprocess.run(["sh", "-c", command], cwd=tmp_path, check=True)
    settings = tomllib.loads((tmp_path / "heart.toml").read_text())
    assert (
        settings.keys() <= tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"].keys()
    )
    (run,) = from_run_config(settings).runs
    assert (run.rounds, run.clients, run.model.name, run.strategy["name"]) == (10, 2, "mlp", "FedBN")


def test_a_mistyped_file_is_answered_by_the_ones_that_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.yaml").write_text("rounds: 1")
    monkeypatch.chdir(tmp_path)
    for source, message in (
        ("mien.yaml", r"cannot read the experiment 'mien.yaml': No such file or directory; did you mean 'mine.yaml'\?"),
        ("mine", r"did you mean 'mine.yaml'\?"),
        ("Demo", r"did you mean 'demo'\? `fedbn list experiments` shows"),
        ("dmo", r"no experiment 'dmo'.*did you mean 'demo'"),
        (str(tmp_path / "absent.yaml"), r"cannot read the experiment .*absent\.yaml.*No such file"),
    ):
        with pytest.raises(SettingsError, match=message):
            load_experiment(source)


@pytest.mark.parametrize("source", [".", "./", "/", "", "..", "a/.."])
def test_a_folder_is_no_experiment(source: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("{}")
    with pytest.raises(SettingsError) as caught:
        load_experiment(source)
    message = f"there is no experiment {source!r}: it is neither a file ending in .yaml nor a shipped experiment; "
    assert str(caught.value) == message + "`fedbn list experiments` shows those that are shipped"


def test_what_extends_nothing_readable_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    for source, message in (
        ("qick", "did you mean 'quick'"),
        ("[quick]", r"extends is \['quick'\]; expected a shipped experiment or a file"),
        ("absent.yaml", "cannot read the experiment .*absent.yaml"),
        ("a.yaml", "of a chain, expected at most 5; one of them extends itself"),
    ):
        file.write_text(f"extends: {source}\n")
        with pytest.raises(SettingsError, match=message):
            load_experiment(str(file))
    (tmp_path / "list.yaml").write_text("[1]")
    file.write_text("extends: list.yaml")
    with pytest.raises(SettingsError, match=r"list\.yaml': expected a mapping of keys, found list"):
        load_experiment(str(file))


# --- YAML as users read it ---------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-4", 1e-4), ("1E5", 1e5), ("-2e3", -2e3), ("1.5e-3", 1.5e-3), ("1.e2", 100.0), ("0.1", 0.1), ("3", 3)],
)
def test_numbers_are_numbers(text: str, value: float) -> None:
    found = parse_yaml(text)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    "text",
    [
        *("1e", "e5", "1e-4x", "v1e4", "012", "0o14", "0x1F", "0b1", "1_000", "1:30", "190:20:30", "190:20:30.5"),
        *("yes", "no", "Yes", "NO", "on", "Off", "y", "N", "2024-01-01", "="),
    ],
)
def test_text_that_looks_like_a_number_or_a_truth_value_stays_text(text: str) -> None:
    assert parse_yaml(text) == text
    assert parse_yaml(dump_yaml({text: [text]})) == {text: [text]}
    assert yaml.safe_load(dump_yaml([text])) == [text], "for readers of YAML 1.1 too"


@pytest.mark.parametrize("value", ["1e-4", ".5e3", "1.", "true", "null", "~", "", "12", "-3", ".inf", "no", "012"])
def test_text_that_is_written_is_read_as_text(value: str) -> None:
    assert parse_yaml(dump_yaml({"key": value})) == yaml.safe_load(dump_yaml({"key": value})) == {"key": value}


@pytest.mark.parametrize(("text", "value"), [("true", True), ("False", False), ("null", None), ("~", None), ("", None)])
def test_other_plain_values_are_those_of_yaml_1_2(text: str, value: object) -> None:
    assert parse_yaml(f"key: {text}") == {"key": value}


def test_a_word_is_text_in_files_on_the_command_line_and_in_categories() -> None:
    assert fault("rounds: 190:20:30") == "experiment: rounds is '190:20:30': expected a whole number"
    assert fault("{}", "rounds=012") == "experiment: rounds is '012': expected a whole number"
    assert fault("train: {compile: yes}") == "experiment: train.compile is 'yes': expected a valid boolean"
    assert parse_overrides(["data.class_names=[no, yes]"]) == {"data": {"class_names": ["no", "yes"]}}
    data = read("data: {categories: {smoker: [yes, no], country: [NO, SE], code: [012, 1:30, 7]}}").data
    assert data.categories == {"smoker": ("yes", "no"), "country": ("NO", "SE"), "code": ("012", "1:30", "7")}
    assert [*parse_yaml("{on: 1, 012: 2, true: 3, 1.50: 4}")] == ["on", "012", "true", "1.50"], "keys, as written"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: {name: mlp\ntrain: {lr: 1}", "expected ',' or '}', but got ':' in line 2, column 6$"),
        ("a:\n\tb: 1", "a tab instead of spaces in line 2, column 1$"),
        ("train: {lr: 1", "not readable as YAML"),
        ("? [1]\n: 2", "not readable as YAML"),
        ("rounds: 1\nclients: 2\nrounds: 3\n", "'rounds' is given twice in line 3"),
        ("train: {lr: 1, momentum: 0, lr: 2}", "'lr' is given twice"),
        ("a: &a {x: 1}\nb: [*a]", "found an alias; expected the value itself in line 2"),
    ],
)
def test_errors_of_yaml_are_one_line_with_the_place_and_without_an_excerpt(text: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message) as caught:
        parse_yaml(text)
    assert "\n" not in str(caught.value)


# --- overrides and merging ---------------------------------------------------


def test_overrides_are_yaml_values_at_a_path_of_which_the_last_counts() -> None:
    found = parse_overrides(
        ["rounds=1", "rounds=3", "train.lr=1e-2", "train.steps=5", "data.name=a=b", "data.augment=[flip]"]
    )
    assert found == {
        "rounds": 3,
        "train": {"lr": 0.01, "steps": 5},
        "data": {"name": "a=b", "augment": ["flip"]},
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        *(([word], "is not of the form key=value") for word in ("rounds", "=3", "")),
        (["train=3", "train.lr=1"], "train is 3; expected a mapping, since train.lr has a value"),
    ],
)
def test_an_override_without_key_or_value_or_below_a_value_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        parse_overrides(words)


def test_merging_goes_mapping_by_mapping() -> None:
    base = {"train": {"lr": 1, "steps": 2}, "rounds": 3}
    assert merge(base, {"train": {"lr": 5}}) == {"train": {"lr": 5, "steps": 2}, "rounds": 3}
    assert base == {"train": {"lr": 1, "steps": 2}, "rounds": 3}


def test_options_of_a_part_are_not_taken_for_settings() -> None:
    for section in ("data", "model"):
        base = {section: {"options": {"seeds": [1, 2], "epochs": 3, "loss": {"name": "a", "beta": 1}}}}
        changes = {section: {"options": {"seed": 7, "steps": 2, "loss": {"name": "b"}}}}
        options = {"seeds": [1, 2], "epochs": 3, "seed": 7, "steps": 2, "loss": {"name": "b", "beta": 1}}
        assert merge(base, changes) == {section: {"options": options}}
    of_strategy = {"strategy": {"name": "m:f", "base": {"name": "m:g", "epochs": 3}}}
    assert merge(of_strategy, {"strategy": {"base": {"steps": 2}}})["strategy"]["base"] == {
        "name": "m:g",
        "epochs": 3,
        "steps": 2,
    }
    assert merge(of_strategy, {"strategy": {"base": {"name": "m:h"}}})["strategy"]["base"] == {"name": "m:h"}


def test_a_seed_and_steps_replace_seeds_and_epochs_in_sizes_too() -> None:
    base = {"seeds": [0, 1], "train": {"epochs": 2}, "sizes": {"small": {"seeds": [2], "train": {"epochs": 1}}}}
    changes = {"seed": 3, "train": {"steps": 4}}
    assert merge(base, {**changes, "sizes": {"small": changes}}) == {**changes, "sizes": {"small": changes}}


def test_a_mapping_that_names_another_thing_replaces() -> None:
    base: dict[str, Any] = {"strategy": {"name": "FixBN", "freeze_round": 0.5}}
    assert merge(base, {"strategy": {"name": "FedAvg"}}) == {"strategy": {"name": "FedAvg"}}
    assert merge(base, {"strategy": {"name": "FixBN", "freeze": ["affine"]}}) == {
        "strategy": {"name": "FixBN", "freeze_round": 0.5, "freeze": ["affine"]}
    }
    run = read("data: {partition: {kind: classes, classes_per_client: 2}}", "data.partition.kind=iid")
    assert run.data.partition.kind == "iid"


def test_steps_count_instead_of_the_epochs_of_an_earlier_place_and_epochs_instead_of_steps() -> None:
    text = "{train: {epochs: 2}, runs: {A: {rounds: 2}, B: {train: {steps: 20}}}}"

    def trained(*changes: str) -> list[tuple[int | None, int | None]]:
        runs = read_experiment(parse_yaml(text), parse_overrides(changes)).runs
        return [(run.train.epochs, run.train.steps) for run in runs]

    assert trained() == [(2, None), (None, 20)]
    assert trained("train.steps=5") == [(None, 5), (None, 5)]
    assert trained("train.epochs=3") == [(3, None), (3, None)]
    assert trained("train.steps=null") == [(2, None), (None, None)]
    with pytest.raises(SettingsError, match="epochs \\(1\\) and steps \\(5\\) exclude each other"):
        trained("train.steps=5", "train.epochs=1")


# --- runs and seeds ----------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "overrides", "names"),
    [
        ("{seeds: [0, 1], runs: {a: {}, b: {rounds: 2}}}", [], ["a-seed0", "a-seed1", "b-seed0", "b-seed1"]),
        ("seeds: [0, 1, 2]", ["seed=7"], ["FedAvg-seed7"]),
        ("seeds: [0, 1, 2]", ["seeds=[4, 5]"], ["FedAvg-seed4", "FedAvg-seed5"]),
        ("{seeds: [0, 1], runs: {A: {}, B: {seed: 7}}}", [], ["A-seed0", "A-seed1", "B-seed7"]),
        ("{seeds: [0, 1], sizes: {small: {seed: 5}}}", ["size=small"], ["FedAvg-seed5"]),
        ("{runs: {A: {}, B: {seeds: [3, 4]}}}", [], ["A-seed0", "B-seed3", "B-seed4"]),
        ("{runs: {A: {}, B: {seeds: [3, 4]}}}", ["only=A"], ["A-seed0"]),
        ("{runs: {A: {}, B: {rounds: 2, seeds: [3, 4]}}}", ["seeds=[3]"], ["A-seed3", "B-seed3"]),
    ],
)
def test_the_seeds_of_the_nearest_place_expand_each_run_and_names_have_them(
    content: str, overrides: list[str], names: list[str]
) -> None:
    found = read_experiment(parse_yaml(content), parse_overrides(overrides)).by_folder
    assert [*found] == [f"{run.label}-seed{run.seed}" for run in found.values()] == names


def test_the_label_of_a_wrapper_names_its_base() -> None:
    labels = [read_experiment({"strategy": {"name": "FixBN", "base": base}}).runs[0].label for base in ("a:A", "b:B")]
    assert labels == ["FixBN(a:A)", "FixBN(b:B)"]


def test_the_same_seed_twice_is_refused() -> None:
    with pytest.raises(SettingsError, match="two runs are both called"):
        list(read_experiment(parse_yaml("seeds: [1, 1]")).by_folder)


# --- overrides of the compared keys ------------------------------------------

COMPARISON = """
train: {lr: 0.1}
runs:
  BN: {}
  GN: {model: {norm: gn}}
  FixBN: {strategy: {name: FixBN, freeze_round: 0.5}}
"""


@pytest.mark.parametrize(
    ("overrides", "labels"),
    [
        (["train.lr=0.2", "rounds=3"], ["BN", "GN", "FixBN"]),  # no run sets these keys
        (["only=GN"], ["GN"]),
        (["strategy.freeze_round=3", "only=FixBN"], ["FixBN, strategy.freeze_round=3"]),
        (["model.norm=ln", "only=[BN, FixBN]"], ["BN, model.norm=ln", "FixBN, model.norm=ln"]),
        (["strategy.name=FedTAN", "only=BN"], ["BN, strategy.name=FedTAN"]),
        (["strategy.name=FedTAN", "only=FixBN"], ["FixBN, strategy.name=FedTAN"]),
    ],
)
def test_a_label_names_an_override_of_a_compared_key(overrides: list[str], labels: list[str]) -> None:
    assert [run.label for run in read_experiment(parse_yaml(COMPARISON), parse_overrides(overrides)).runs] == labels


def test_a_label_never_leaves_the_folder_of_its_experiment() -> None:
    labels = ["..", ".", "../../x", "a/b", ".hidden", "\u00e9" * 300]
    runs = {"runs": {label: {"rounds": i + 1} for i, label in enumerate(labels)}}
    names = list(read_experiment(runs, parse_overrides(("only=[..]",))).by_folder)
    assert names == ["run"]
    names = list(
        read_experiment(runs, parse_overrides(("only=['../../x', a/b, .hidden, '" + labels[-1] + "']",))).by_folder
    )
    assert names[:3] == ["x", "a-b", "hidden"]
    assert len(names[3].encode()) <= 200


# --- `set` of a Flower run ---------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", []),
        ("  rounds=3   train.lr=0.1 ", ["rounds=3", "train.lr=0.1"]),
        ("'strategy={name: FedTAN}' rounds=2", ["strategy={name: FedTAN}", "rounds=2"]),
        ("data.size=[28,28]", ["data.size=[28,28]"]),
        ("label='a b' only=\"FedAvg + BN\"", ["label=a b", "only=FedAvg + BN"]),
        ("""data='{root: "/my data"}'""", ["""data={root: "/my data"}"""]),
        ("label='a [b'", ["label=a [b"]),
    ],
)  # fmt: skip
def test_changes_are_separated_by_blanks_outside_quotes(text: str, words: list[str]) -> None:
    assert split_changes(text) == words


@given(st.lists(st.text(st.characters(codec="utf-8"))))
def test_changes_that_a_shell_would_quote_are_split_again(words: list[str]) -> None:
    assert split_changes(shlex.join(words)) == words


def test_a_strategy_with_blanks_reaches_the_experiment() -> None:
    experiment = from_run_config({"experiment": "quick", "set": "'strategy={name: FedTAN, exchange: paper}' rounds=2"})
    assert [dict(run.strategy) for run in experiment.runs] == [{"name": "FedTAN", "exchange": "paper"}]
    assert {run.rounds for run in experiment.runs} == {2}


# --- Lists of values in an experiment become cells, and a size changes its settings.


SWEPT = """
rounds: 40
data: {partition: {kind: dirichlet, alpha: 1.0}}
sweep: {data.partition.alpha: [0.1, 1.0]}
runs:
  BN: {}
  FixBN: {strategy: {name: FixBN, freeze_round: 20}, tune: {train.lr: [0.01, 0.1]}}
  Centralised: {clients: 1, data: {partition: {kind: iid}}, sweep: {data.partition.alpha: null}}
sizes:
  small: {rounds: 10, seeds: [3], data: {examples: 500}}
"""


def runs(text: str, *overrides: str) -> tuple[Settings, ...]:
    return read_experiment(parse_yaml(text), parse_overrides(overrides)).runs


def labels(text: str, *overrides: str) -> list[str]:
    return [run.label for run in runs(text, *overrides)]


# --- sweeps -------------------------------------------------------------------


VALIDATED = "tune: {train.lr: [0.1]}\nruns: {A: {}, B: {evaluate: {validation: 0.2}}}"


@pytest.mark.parametrize(
    ("text", "overrides", "expected"),
    [
        (
            SWEPT,
            [],
            [
                *("BN, alpha=0.1", "BN, alpha=1.0", "FixBN, alpha=0.1, lr=0.01", "FixBN, alpha=0.1, lr=0.1"),
                *("FixBN, alpha=1.0, lr=0.01", "FixBN, alpha=1.0, lr=0.1", "Centralised"),
            ],
        ),
        (
            "{}",
            ["sweep.train.lr=[0.1, 0.2]", "sweep.train.steps=[1]"],
            ["FedAvg, lr=0.1, steps=1", "FedAvg, lr=0.2, steps=1"],
        ),
        (
            "sweep: {data.partition: [{kind: iid}, {kind: classes, classes_per_client: 2}], data.name: [digits]}",
            [],
            ["FedAvg, partition=iid, data=digits", "FedAvg, partition=classes classes_per_client=2, data=digits"],
        ),
        (
            "strategy: {name: FedWon}\nsweep: {train.clip: [2], strategy.clip: [3]}",
            [],
            ["FedWon, train.clip=2, strategy.clip=3"],
        ),
        (VALIDATED, [], ["A, lr=0.1", "B, lr=0.1"]),  # a share to validate by is no override
        (VALIDATED, ["evaluate.validation=0.3", "only=A"], ["A, lr=0.1, evaluate.validation=0.3"]),
        *(
            ("runs: {A: {}, 'A #2': {rounds: 3}, 'yes': {rounds: 4}, '1e3': {rounds: 5}}", [f"only={label}"], [label])
            for label in ("A", "A #2", "yes", "1e3")
        ),
    ],
)
def test_each_combination_of_values_is_a_run_whose_label_names_them(
    text: str, overrides: list[str], expected: list[str]
) -> None:
    assert labels(text, *overrides) == expected


def test_a_cell_has_its_values_and_its_place() -> None:
    run = runs(SWEPT)[3]
    assert (run.train.lr, run.data.partition.model_dump()["alpha"]) == (0.1, 0.1)
    assert run.cell.row == "FixBN"
    assert (run.cell.sweep, run.cell.tune) == ({"data.partition.alpha": 0.1}, {"train.lr": 0.1})


def test_a_run_has_its_place_in_the_whole_file() -> None:
    whole = runs(SWEPT)
    places = [list(run.cell.place) for run in whole]
    assert places == sorted(places) == [[0, 0], [0, 1], [1, 0, 0], [1, 0, 1], [1, 1, 0], [1, 1, 1], [2]]
    for overrides in (["only=FixBN"], ["train.lr=0.1", "only=FixBN"], ["seeds=[1, 0]"]):
        for run in runs(SWEPT, *overrides):
            assert run.cell in [each.cell for each in whole]
    assert runs(SWEPT, "data.partition.alpha=0.5", "only=BN")[0].cell.place == [0, 2], "after those of the file"
    repeated = read_experiment(whole[-1].model_dump(mode="json")).runs[0]
    assert list(repeated.cell.place) == [2], "settings of a run keep its place"


def test_candidates_are_compared_by_held_out_images() -> None:
    """All rows train on the same examples, also those without candidates."""
    assert {run.evaluate.validation for run in runs(SWEPT)} == {0.1}
    assert {run.evaluate.validation for run in runs(SWEPT, "evaluate.validation=0.2")} == {0.2}
    assert "evaluate.validation is 0" in fault(SWEPT, "evaluate.validation=0")
    assert {run.evaluate.validation for run in runs(SWEPT, "only=BN")} == {0.1}


def test_a_run_that_gives_a_listed_key_keeps_its_value() -> None:
    text = "sweep: {train.lr: [0.1, 0.2]}\nruns: {A: {}, B: {train: {lr: 0.5}}}"
    assert [(run.label, run.train.lr) for run in runs(text)] == [("A, lr=0.1", 0.1), ("A, lr=0.2", 0.2), ("B", 0.5)]


def test_a_run_that_gives_a_listed_section_keeps_it() -> None:
    text = """
    sweep: {strategy: [{name: FedAvg}, {name: Scaffold}], data.partition: [{kind: iid}]}
    tune: {train.optimizer.eps: [1.0e-8]}
    runs:
      A: {train: {optimizer: adam}}
      Own: {strategy: {name: FedBN}, data: {partition: {kind: shards, shards_per_client: 2}}, tune: null}
    """
    found = [(run.label, run.strategy["name"], run.data.partition.model_dump()["kind"]) for run in runs(text)]
    assert found == [
        ("A, strategy=FedAvg, partition=iid, eps=1e-08", "FedAvg", "iid"),
        ("A, strategy=Scaffold, partition=iid, eps=1e-08", "Scaffold", "iid"),
        ("Own", "FedBN", "shards"),
    ]


STRATEGIES = "sweep: {strategy: [{name: FedAvg}, {name: FedProx, proximal_mu: 0.1}]}\n"


def test_an_override_of_a_part_of_a_listed_section_is_for_all_its_values() -> None:
    file = STRATEGIES + "strategy: {name: FedAvg}\nruns: {A: {}}\nsizes: {small: {strategy: {seed: 3}}}"
    for override in ("strategy.seed=3", "size=small"):
        found = [(run.strategy["name"], run.strategy["seed"]) for run in runs(file, override)]
        assert found == [("FedAvg", 3), ("FedProx", 3)]
        assert labels(file, override) == ["A, strategy=FedAvg seed=3", "A, strategy=FedProx proximal_mu=0.1 seed=3"]
    assert [run.strategy for run in runs(file, "strategy={name: FedAvg}")] == [{"name": "FedAvg"}]


def test_candidates_that_are_strategies_belong_to_one_row() -> None:
    assert {run.cell.row for run in runs(STRATEGIES.replace("sweep", "tune"))} == {""}
    assert {run.cell.row for run in runs("tune: {train.lr: [0.1, 0.2]}")} == {"FedAvg"}


def test_a_changed_run_of_a_sweep_leaves_its_place() -> None:
    before = runs("sweep: {train.lr: [0.1, 0.2]}\nruns: {A: {}}")[0].model_dump(mode="json")

    def again(*overrides: str) -> Settings:
        return read_experiment(before, parse_overrides(overrides)).runs[0]

    assert (again("seed=7").label, again("seed=7").cell.sweep) == ("A, lr=0.1", {"train.lr": 0.1})
    assert (again("train.lr=0.7").label, again("train.lr=0.7").cell.sweep) == ("A", {})
    assert again("train.lr=0.7", "label=other").label == "other"


def test_seeds_repeat_each_cell() -> None:
    found = runs(SWEPT, "seeds=[0, 1]", "only=BN")
    assert [(run.label, run.seed) for run in found] == [
        ("BN, alpha=0.1", 0),
        ("BN, alpha=0.1", 1),
        ("BN, alpha=1.0", 0),
        ("BN, alpha=1.0", 1),
    ]


def test_an_override_of_a_listed_key_selects_cells_with_their_folders() -> None:
    whole, some = (
        list(read_experiment(parse_yaml(SWEPT), parse_overrides(overrides)).by_folder)
        for overrides in ([], ["train.lr=0.1", "only=FixBN"])
    )
    assert some == ["FixBN-alpha=0.1-lr=0.1", "FixBN-alpha=1.0-lr=0.1"]
    assert set(some) < set(whole)


# --- sizes --------------------------------------------------------------------


def test_a_size_changes_all_runs_before_the_command_line() -> None:
    found = runs(SWEPT, "size=small", "rounds=12", "strategy.freeze_round=5", "only=FixBN")
    assert {(run.rounds, run.seed, run.data.examples) for run in found} == {(12, 3, 500)}


def test_a_size_is_named() -> None:
    assert runs(SWEPT, "size=small", "only=BN", "data.size=8")[0].size == "small"
    assert runs(SWEPT)[0].size == "paper"


def test_a_run_can_have_changes_of_its_own() -> None:
    text = """
    runs: {A: {sizes: {small: {rounds: 2}}}, B: {}}
    sizes: {small: {rounds: 3, sweep: {train.lr: [0.5]}}}
    """
    assert [(run.label, run.rounds) for run in runs(text, "size=small")] == [("A, lr=0.5", 2), ("B, lr=0.5", 3)]
    swept = runs(text, "size=small", "only=B", "sweep.rounds=[4, 5]")
    assert [run.rounds for run in swept] == [4, 5], "a list that is given later counts instead of the size's value"


def test_settings_of_a_run_are_an_experiment() -> None:
    run = runs(SWEPT, "size=small")[2]
    assert read_experiment(run.model_dump(mode="json")).runs == (run,)
