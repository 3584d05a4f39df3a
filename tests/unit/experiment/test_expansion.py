"""Lists of values in an experiment become cells, and a size changes its settings."""

from __future__ import annotations

import pytest

from fedbn_flwr.experiment.file.layers import parse_overrides, parse_yaml, read_experiment
from fedbn_flwr.experiment.settings import Settings
from tests.support.experiments import fault

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
