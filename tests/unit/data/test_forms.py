"""Forms in which people have their images: class folders that differ, bytes in Parquet files, a saved DatasetDict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from fedbn_flwr.data.dataset import DataSet
from fedbn_flwr.data.load import load
from fedbn_flwr.data.source import Source
from fedbn_flwr.errors import DataError, FedbnError
from fedbn_flwr.experiment.data import load_data
from fedbn_flwr.experiment.settings import Data
from tests.support.images import png, write_pictures


def grey(value: int) -> np.ndarray:
    return np.full((6, 6), value, np.uint8)


def write_folders(folder: Path, **splits: dict[str, int]) -> Path:
    """A folder with images of one grey value for each class, by split: train={"cat": 10, "dog": 20}."""
    for split, classes in splits.items():
        for name, value in classes.items():
            write_pictures(folder, [grey(value)] * 2, f"{split}/{name}")
    return folder


def values_by_class(name: Path, **options: Any) -> dict[str, dict[str, int]]:
    """The grey value of each class by split; its images have the number of its name."""
    dataset = load(Source(name=str(name), **options))
    return {
        split: {
            dataset.class_names[label]: int(images.inputs[images.labels == label].unique())
            for label in sorted(set(images.labels.tolist()))
        }
        for split, images in (("train", dataset.train), ("test", dataset.test))
    }


def test_test_images_may_lack_a_class_and_training_images_too(tmp_path: Path) -> None:
    whole = {"cat": 10, "dog": 20, "owl": 30}
    splits = {"train": {"cat": 10, "owl": 30}, "test": {"dog": 20, "owl": 30}}
    folder = write_folders(tmp_path / "folders", **splits)
    assert values_by_class(folder) == splits
    assert load(Source(name=str(folder))).class_names == tuple(whole)
    for part, labels in splits.items():
        table = {"image": [png(grey(value)) for value in labels.values()], "kind": list(labels)}
        pd.DataFrame(table).to_parquet(tmp_path / f"{part}.parquet")
    assert values_by_class(tmp_path, label="kind") == splits


def test_sites_with_other_classes_number_them_as_all_do(tmp_path: Path) -> None:
    """Without names, class 0 of the north would be class 0 of the south."""
    names = ("owl", "cat", "dog")
    north = write_folders(tmp_path / "north", train={"cat": 10, "dog": 20}, test={"cat": 10})
    south = write_folders(tmp_path / "south", train={"dog": 20, "owl": 30}, val={"owl": 30})
    for site, labels in ((north, [1, 1, 2, 2]), (south, [2, 2, 0, 0])):
        data = Data(name=str(site), class_names=names)
        assert data.classes == 3
        dataset = load_data(data, "cpu")
        assert dataset.class_names == names
        assert dataset.train.labels.tolist() == labels


def test_names_of_embedded_data_must_be_theirs() -> None:
    with pytest.raises(FedbnError, match="'digits' has 2 classes, so labels must be 0 to 1, but they are 0 to 9"):
        load_data(Data(name="digits", class_names=("a", "b")), "cpu")


@pytest.mark.parametrize("form", ["bytes", "bytes and path", "paths"])
def test_parquet_files_of_other_programs_are_read(form: str, tmp_path: Path) -> None:
    for split, (low, high) in {"train": (10, 20), "test": (30, 40)}.items():
        for value in (low, high):
            (tmp_path / f"{value}.png").write_bytes(png(grey(value)))
        column: Any = {
            "bytes": [png(grey(low)), png(grey(high))],
            "bytes and path": [{"bytes": png(grey(value)), "path": None} for value in (low, high)],
            "paths": [str(tmp_path / f"{value}.png") for value in (low, high)],
        }[form]
        pd.DataFrame({"photo": column, "label": [0, 1]}).to_parquet(tmp_path / f"{split}.parquet")
    found = load(Source(name=str(tmp_path), inputs="photo" if form == "paths" else None, label="label"))
    assert found.train.inputs[:, 0, 0, 0].tolist() == [10, 20]
    assert found.test.inputs[:, 0, 0, 0].tolist() == [30, 40]


# --- Labels: the same rule for every format, labels of one column [N, 1], gaps, and rows without a label.


FORMATS = ("csv", "parquet", "npz")


def labelled(folder: Path, kind: str, labels: Any, **options: Any) -> DataSet:
    """A table of the values 0, 1, 2 and so on, with these labels."""
    values = np.arange(float(len(labels)))
    file = folder / f"all.{kind}"
    if kind == "npz":
        np.savez(file, x=values, y=np.array(labels, None if None not in labels else float))
    else:
        getattr(pd.DataFrame({"x": values, "y": labels}), f"to_{kind}")(file, index=False)
    return load(Source(**{"name": str(file), "inputs": "x", "label": "y", "test": 0.25} | options))


@pytest.mark.parametrize("kind", FORMATS)
def test_whole_numbers_are_names_of_classes_in_every_format(tmp_path: Path, kind: str) -> None:
    data = labelled(tmp_path, kind, [2, 7, 10, 7] * 5)
    assert (data.class_names, data.task.name) == (("2", "7", "10"), "classification")
    assert [data.class_names[label] for label in data.train.labels] == [
        str([2, 7, 10, 7][int(value) % 4]) for value in data.train.inputs[:, 0].tolist()
    ]
    assert labelled(tmp_path, kind, [0, 2] * 10, classes=3).class_names == ("0", "1", "2")
    named = labelled(tmp_path, kind, [0, 2] * 10, class_names=("cat", "dog", "owl"))
    assert set(named.train.labels.tolist()) == {0, 2}


@pytest.mark.parametrize("task", [None, "regression"])
def test_labels_of_one_column_are_labels(tmp_path: Path, task: str | None) -> None:
    """As an array [N, 1] too, and as lists of one number in Parquet."""
    labels = np.arange(20) % 2
    np.savez(tmp_path / "all.npz", inputs=np.ones((20, 3)), labels=labels, column=labels[:, None])
    pd.DataFrame({"x": np.ones(20), "labels": labels, "column": labels[:, None].tolist()}).to_parquet(
        tmp_path / "all.parquet"
    )
    for kind in ("npz", "parquet"):
        found = [
            load(Source(name=str(tmp_path / f"all.{kind}"), label=label, inputs=inputs, test=0.25, task=task))
            for label in ("labels", "column")
            for inputs in ["inputs" if kind == "npz" else "x"]
        ]
        assert found[0].task is found[1].task
        assert found[0].train.targets.equal(found[1].train.targets)
        assert found[0].outputs == found[1].outputs == (1 if task else 2)


def test_arrays_that_no_key_names_may_be_anything(tmp_path: Path) -> None:
    arrays = {"x": np.arange(20.0), "y": np.arange(20) % 2}
    np.savez(tmp_path / "all.npz", version=3, empty=np.array([]), **arrays)
    assert load(Source(name=str(tmp_path / "all.npz"), inputs="x", label="y", test=0.25)).input_names == ("x",)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("labels", [[0, 1, None, 1] * 5, ["a", "b", None, "b"] * 5])
def test_rows_without_a_label_are_left_out_if_missing_values_are(
    tmp_path: Path, kind: str, labels: list[Any], flower_log: pytest.LogCaptureFixture
) -> None:
    if kind == "npz":
        labels = [0.5, 1.5, None, 1.5] * 5
    elif isinstance(labels[0], int):
        labels = pd.array(labels, "Int64")  # pandas writes whole numbers with gaps as floats otherwise
    with pytest.raises(DataError, match=r"5 of 20 rows have no value in 'y', .*row 2 of train;.*data\.missing: drop"):
        labelled(tmp_path, kind, labels)
    data = labelled(tmp_path, kind, labels, missing="drop")
    kept = data.train.inputs[:, 0].tolist() + data.test.inputs[:, 0].tolist()
    assert sorted(kept) == [row for row in range(20) if row % 4 != 2]
    assert data.task.name == ("regression" if kind == "npz" else "classification")
    assert data.classes == (1 if kind == "npz" else 2)
    assert "data.missing: drop leaves out 5 of 20 training examples" in flower_log.text


def test_labels_of_one_class_are_a_warning_that_has_the_key(
    tmp_path: Path, flower_log: pytest.LogCaptureFixture
) -> None:
    labelled(tmp_path, "csv", ["ill"] * 8)
    assert "data.label: all examples of" in flower_log.text
    assert "one class, 'ill'" in flower_log.text
    flower_log.clear()
    labelled(tmp_path, "npz", [1] * 8, classes=2)
    assert not flower_log.text, "a site may lack a class"


# --- Folders, columns and labels of the user: all are read, or the error says what was found.


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
