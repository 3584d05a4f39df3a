"""The test split that is held out of the examples: shares, folds, patients and times."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from fedbn_flwr.batch import first
from fedbn_flwr.data.examples import main_input
from fedbn_flwr.data.load import load
from fedbn_flwr.data.partitions import hold_out
from fedbn_flwr.data.source import HeldOut, Source
from fedbn_flwr.errors import DataError, SettingsError
from fedbn_flwr.experiment.file.layers import load_experiment

ROWS = 240


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Rows with their number as input; 40 patients of two sites, six rows each; ten dates."""
    number = np.arange(ROWS)
    frame = pd.DataFrame(
        {
            "row": number,
            "sick": np.where(number % 3 == 0, "yes", "no"),
            "patient": number % 40,
            "site": np.where(number % 2 == 0, "a", "b"),
            "date": [f"2024-{1 + (i * 7) % 10:02}-01" for i in number],
        }
    )
    frame.to_csv(tmp_path / "t.csv", index=False)
    return tmp_path / "t.csv"


def rows(table: Path, seed: int = 0, **test: Any) -> tuple[set[int], set[int]]:
    """The numbers of the training and of the test rows."""
    source = Source(name=str(table), label=("sick",), group="site", inputs=("row",), test=test).of_seed(seed)
    data = load(source)
    train, found = ({int(row) for row in first(part.inputs).flatten()} for part in (data.train, data.test))
    assert not train & found
    assert train | found == set(range(ROWS))
    return train, found


def test_no_patient_is_on_both_sides(table: Path) -> None:
    train, test = rows(table, share=0.2, by="patient")
    patients = {row % 40 for row in test}
    assert len(patients) == 8
    assert len(test) == 8 * 6
    assert not patients & {row % 40 for row in train}
    assert sum(patient % 2 for patient in patients) == 4, "in proportion to the sites"


@pytest.mark.parametrize("form", ["2024-{:02}-01", "{}", "{}.5", "2024-{}-1 12:00"])
def test_the_last_share_of_the_time_is_the_test_split(tmp_path: Path, form: str) -> None:
    months = [1 + (i * 7) % 12 for i in range(ROWS)]
    frame = pd.DataFrame({"row": range(ROWS), "sick": [i % 3 for i in range(ROWS)], "site": 1})
    frame.assign(date=[form.format(month) for month in months]).to_csv(tmp_path / "t.csv", index=False)
    _, test = rows(tmp_path / "t.csv", share=0.2, time="date")
    assert {months[row] for row in test} == {11, 12}, "a sixth of the rows, since a quarter is further from a fifth"


def test_a_seed_draws_its_own_split_and_folds_cover_all_rows_once(table: Path) -> None:
    plain = rows(table, share=0.2)[1]
    assert rows(table, seed=1, share=0.2)[1] == plain, "the same for all seeds"
    assert rows(table, seed=0, share=0.2, split="seed")[1] == plain
    assert rows(table, seed=1, share=0.2, split="seed") == rows(table, share=0.2, split=1)
    assert rows(table, share=0.2, split=1)[1] != plain
    folds = [rows(table, seed=seed, folds=5)[1] for seed in range(5)]
    assert set().union(*folds) == set(range(ROWS))
    assert [len(fold) for fold in folds] == [48] * 5
    assert all(abs(sum(row % 3 == 0 for row in fold) - 16) <= 1 for fold in folds), "in proportion to the classes"
    again = [rows(table, seed=seed, folds=5)[1] for seed in range(5, 10)]
    assert again[0] not in folds
    assert set().union(*again) == set(range(ROWS))
    patients = [{row % 40 for row in rows(table, seed=seed, folds=4, by="patient")[1]} for seed in range(4)]
    assert sorted(patient for fold in patients for patient in fold) == list(range(40))


def test_validation_keeps_together_what_the_test_split_does(table: Path) -> None:
    source = Source(name=str(table), label=("sick",), test={"share": 0.2, "by": "patient"})  # type: ignore[arg-type]
    data = load(source)
    rows = torch.arange(len(data.train))[::2]
    train, held = hold_out(data, {1: rows}, 0.25, 0)[1]
    assert sorted([*train.tolist(), *held.tolist()]) == rows.tolist()
    patients = [{int(row) % 40 for row in main_input(data.train.select(part).inputs)[:, 0]} for part in (train, held)]
    assert len(patients[1]) == round(len(patients[0] | patients[1]) / 4)
    assert patients[0].isdisjoint(patients[1])


def test_the_columns_of_a_split_are_no_inputs(table: Path) -> None:
    source = Source(name=str(table), label=("sick",), test={"share": 0.2, "by": "patient"})  # type: ignore[arg-type]
    data = load(source)
    assert data.input_names == ("row",)
    assert data.columns["patient"] == "data.test.by"


@pytest.mark.parametrize(
    ("test", "message"),
    [
        ({"share": 0.2, "by": "pat"}, r"data\.test\.by='pat' is not a column"),
        ({"share": 0.01, "by": "patient"}, r"data\.test is 0\.01, which is 0 of 40 values of data\.test\.by='patient'"),
        ({"folds": 50, "by": "patient"}, r"data\.test\.folds is 50, more than the 40 values"),
        (
            {"share": 0.2, "time": "sick"},
            r"data\.test\.time='sick': .* has other times than numbers, or dates .*: 'no'",
        ),
    ],
)
def test_errors_name_the_key_and_the_column(table: Path, test: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        rows(table, **test)


@pytest.mark.parametrize(
    ("test", "message"),
    [
        ("{share: 0.2, folds: 5}", r"data\.test: expected either share, such as 0\.2, or folds"),
        ("{by: patient}", r"data\.test: expected either share"),
        ("{share: 0.2, by: patient, time: date}", r"data\.test: time is 'date', .*; leave by='patient' out"),
        ("{share: 2}", r"data\.test\.share is 2: expected a number below 1"),
        ("{share: 0.2, group: patient}", r"unknown key 'data\.test\.group' .*known: by, folds, share, split, time"),
        ("{share: 0.2, split: seeds}", r"data\.test\.split: found 'seeds'; expected a number, or seed"),
        ("[0.2]", r"data\.test: found \[0\.2\]; expected the name of a split, a share .*, or \{share: 0\.2"),
    ],
)
def test_settings_say_what_is_wrong(test: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        load_experiment(f"{{data: {{test: {test}}}}}")


def test_folds_replace_a_share_and_the_other_way_round() -> None:
    text = "{data: {test: {share: 0.2, by: patient}}, runs: {A: {}, B: {data: {test: {folds: 2}}}}}"
    found = [run.data.held_out for run in load_experiment(text).runs]
    assert found == [HeldOut(share=0.2, by="patient"), *[HeldOut(folds=2, by="patient")] * 2]
    (run,) = load_experiment(text, ["data.test.share=0.3", "only=B"]).runs
    assert run.data.held_out == HeldOut(share=0.3, by="patient")


def test_folds_without_seeds_are_a_run_each() -> None:
    def seeds(text: str, *changes: str) -> list[int]:
        return [run.seed for run in load_experiment(text, changes).runs]

    assert seeds("{data: {test: {folds: 3}}}") == [0, 1, 2]
    assert seeds("{data: {test: {folds: 3}}}", "seed=4") == [4]
    assert seeds("{seeds: [7, 8], data: {test: {folds: 3}}}") == [7, 8]
    assert seeds("{data: {test: {folds: 3, split: 1}}}") == [0]
    assert load_experiment("{data: {test: {folds: 3}}}").runs[1].source.held_out.split == 1  # type: ignore[union-attr]
