"""Folders, columns and labels of the user: all are read, or the error says what was found."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fedbn_flwr.data.dataset import DataSet
from fedbn_flwr.data.load import load
from fedbn_flwr.data.source import Source
from fedbn_flwr.errors import DataError
from tests.support.images import write_pictures

RNG = np.random.default_rng(0)


def pictures(folder: Path, *folders: str) -> Path:
    """Five images in each folder."""
    return write_pictures(folder, (np.full((4, 4, 3), 50 * i, np.uint8) for i in range(5)), *folders)


def opened(path: Path, **options: object) -> DataSet:
    return load(Source.model_validate({"name": str(path), "test": 0.2, **options}))


def total(data: DataSet) -> int:
    return len(data.train) + len(data.test)


# --- folders of images -------------------------------------------------------


def test_a_share_is_held_out_of_all_domains(tmp_path: Path) -> None:
    folder = pictures(tmp_path / "towns", *(f"{town}/{kind}" for town in ("berlin", "koeln", "rom") for kind in "ab"))
    data = opened(folder)
    assert (total(data), data.class_names, data.domains.names) == (30, ("a", "b"), ("berlin", "koeln", "rom"))
    assert opened(folder, domains=["rom"]).domains.names == ("rom",)  # type: ignore[union-attr]


def test_a_share_is_held_out_of_folders_of_classes(tmp_path: Path) -> None:
    data = opened(pictures(tmp_path / "flat", "a", "b"))
    assert (total(data), data.class_names, data.domains) == (10, ("a", "b"), None)


@pytest.mark.parametrize(
    "folders",
    [
        ("cat/p1", "cat/p2", "dog/p3"),  # classes with a folder for each patient
        ("berlin/a", "berlin/b", "koeln"),
        ("amazon/images/a", "amazon/images/b"),
        (".", "a", "b"),
    ],
)
def test_other_layouts_are_refused_with_the_folders(tmp_path: Path, folders: tuple[str, ...]) -> None:
    pictures(tmp_path / "odd", *folders)
    with pytest.raises(DataError, match=r"CLASS/\*\.png, or DOMAIN/CLASS/\*\.png.*train/CLASS") as raised:
        opened(tmp_path / "odd")
    assert all(name in str(raised.value) for name in folders)
    assert folders[0] not in raised.value.public or folders[0] == "."


def test_all_folders_that_begin_with_the_split_s_name_are_read(tmp_path: Path) -> None:
    folder = pictures(tmp_path / "parts", "train_1/a", "train_1/b", "train_2/a", "test/a")
    data = opened(folder, test=None)
    assert (len(data.train), len(data.test), data.class_names) == (15, 5, ("a", "b"))
    assert total(opened(folder)) == 15


def test_domains_with_and_without_lists_are_refused_by_name(tmp_path: Path) -> None:
    folder = pictures(tmp_path / "mixed", "berlin/a", "koeln/a", "rom/a")
    (folder / "notes").mkdir()
    for part in ("train", "test"):
        (folder / f"berlin_{part}.txt").write_text("berlin/a/0.png 0\n")
    with pytest.raises(DataError, match=r"some domains have lists.*: koeln, rom have none"):
        opened(folder, test=None)


def test_an_own_folder_of_domains_without_a_share_is_told_of_it(tmp_path: Path) -> None:
    folder = pictures(tmp_path / "towns", "berlin/a", "rom/a")
    with pytest.raises(DataError, match=r"CLASS/\*\.png or DOMAIN/CLASS/\*\.png with data\.test: 0\.2"):
        opened(folder, test=None)


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_paths_in_a_table_count_from_its_folder(tmp_path: Path, kind: str) -> None:
    folder = pictures(tmp_path / "flat", "a", "b")
    paths = [f"{name}/{i}.png" for name in "ab" for i in range(5)]
    frame = pd.DataFrame({"file": [*paths[:-1], str(folder / paths[-1])], "kind": ["a", "b"] * 5})
    getattr(frame, f"to_{kind}")(folder / f"all.{kind}", index=False)
    found = [opened(folder / f"all.{kind}", inputs="file", label="kind") for _ in range(2)]
    assert sorted(found[0].train.inputs[:, 0, 0, 0].tolist() + found[0].test.inputs[:, 0, 0, 0].tolist()) == sorted(
        [0, 50, 100, 150, 200] * 2
    )
    assert len(list((tmp_path / "cache").glob("*.npy"))) == 2, "they are decoded once"


# --- columns -----------------------------------------------------------------


def table() -> pd.DataFrame:
    return pd.DataFrame(
        {"age": RNG.integers(20, 90, 40), "pulse": RNG.normal(70, 9, 40), "ill": ["yes", "no"] * 20}, range(7, 47)
    )


def test_the_index_of_pandas_is_no_input(tmp_path: Path) -> None:
    table().to_csv(tmp_path / "a.csv")
    table().sample(frac=1, random_state=0).to_parquet(tmp_path / "a.parquet")
    pd.read_csv(tmp_path / "a.csv").to_csv(tmp_path / "b.csv", index=False)
    for name, index in (("a.csv", ""), ("a.parquet", "__index_level_0__"), ("b.csv", "Unnamed: 0")):
        data = opened(tmp_path / name, label="ill")
        assert data.input_names == ("age", "pulse")
        assert data.columns == {index: "index of pandas", "age": "input", "pulse": "input", "ill": "data.label"}
        assert opened(tmp_path / name, label="ill", inputs=[index, "age"]).input_names == (index, "age")


def test_each_column_has_its_use(tmp_path: Path) -> None:
    frame = table().assign(site=["n", "s"] * 20, name="x", town="y", sex=["f", "m"] * 20)
    frame.to_csv(tmp_path / "a.csv", index=False)
    options = {"label": "ill", "group": "site", "domain": "town"}
    data = opened(tmp_path / "a.csv", **options, categories={"sex": ["f", "m"]})
    used = {"ill": "data.label", "site": "data.group", "town": "data.domain"}
    assert data.columns == {"age": "input", "pulse": "input", "sex": "input", "name": "string", **used}
    some = opened(tmp_path / "a.csv", **options, inputs="age")
    assert some.columns == {"age": "input", **dict.fromkeys(("pulse", "sex", "name"), "not in data.inputs"), **used}


def test_a_stray_text_in_a_column_of_numbers_is_refused(tmp_path: Path) -> None:
    frame = table().astype({"pulse": object})
    frame.iloc[4, 1] = None
    frame.iloc[[5, 8], 1] = "?"
    frame.to_csv(tmp_path / "a.csv", index=False)
    with pytest.raises(
        DataError, match=r"2 of 39 values of the column 'pulse' are not numbers.*: '\?' in row 5"
    ) as raised:
        opened(tmp_path / "a.csv", label="ill")
    assert "?" not in raised.value.public
    with pytest.raises(DataError, match=r"2 of 39 values of the column 'pulse' are not numbers.*: '\?' in row 5"):
        opened(tmp_path / "a.csv", label="ill", inputs=["age", "pulse"]).moments  # noqa: B018
    assert opened(tmp_path / "a.csv", label="ill", inputs="age").input_names == ("age",)
    frame.assign(pulse=[f"{row}" if row % 2 else f"A{row}" for row in range(40)]).to_csv(tmp_path / "b.csv")
    assert opened(tmp_path / "b.csv", label="ill").columns["pulse"] == "string", "half are numbers: a code"
