"""Forms in which people have their images: class folders that differ, bytes in Parquet files, a saved DatasetDict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from fedbn_flwr.data.load import load
from fedbn_flwr.data.source import Source
from fedbn_flwr.errors import DataError, FedbnError
from fedbn_flwr.experiment.data import load_data
from fedbn_flwr.experiment.file.layers import load_experiment
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
    with pytest.raises(DataError, match=r"data\.class_names lacks 1 of .* in 'label' of .*, such as 'owl'; .*'cow'"):
        load(Source(name=str(south), class_names=("dog", "cow")))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data: {class_names: [a, a]}", "class_names is ['a', 'a']; expected different texts"),
        (
            "data: {class_names: [0, 1]}",
            "data.class_names.0 is 0: expected a valid string",
        ),
        ("data: {class_names: [a, b], classes: 3}", "classes is 3, but class_names has 2"),
    ],
)
def test_wrong_names_are_refused(text: str, message: str) -> None:
    with pytest.raises(FedbnError) as error:
        load_experiment(f"clients: 2\n{text}\n")
    assert message in str(error.value)


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
