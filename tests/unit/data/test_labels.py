"""Labels: the same rule for every format, labels of one column [N, 1], gaps, and rows without a label."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from fedbn_flwr.data.dataset import DataSet
from fedbn_flwr.data.load import load
from fedbn_flwr.data.source import Source
from fedbn_flwr.errors import DataError

FORMATS = ("csv", "parquet", "npz")


def opened(folder: Path, kind: str, labels: Any, **options: Any) -> DataSet:
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
    data = opened(tmp_path, kind, [2, 7, 10, 7] * 5)
    assert (data.class_names, data.task.name) == (("2", "7", "10"), "classification")
    assert [data.class_names[label] for label in data.train.labels] == [
        str([2, 7, 10, 7][int(value) % 4]) for value in data.train.inputs[:, 0].tolist()
    ]
    assert opened(tmp_path, kind, [0, 2] * 10, classes=3).class_names == ("0", "1", "2")
    named = opened(tmp_path, kind, [0, 2] * 10, class_names=("cat", "dog", "owl"))
    assert set(named.train.labels.tolist()) == {0, 2}
    with pytest.raises(DataError, match=r"has 2 classes, so labels must be 0 to 1.*they are 0 to 2"):
        opened(tmp_path, kind, [0, 2] * 10, class_names=("cat", "dog"))


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
        opened(tmp_path, kind, labels)
    data = opened(tmp_path, kind, labels, missing="drop")
    kept = data.train.inputs[:, 0].tolist() + data.test.inputs[:, 0].tolist()
    assert sorted(kept) == [row for row in range(20) if row % 4 != 2]
    assert data.task.name == ("regression" if kind == "npz" else "classification")
    assert data.classes == (1 if kind == "npz" else 2)
    assert "data.missing: drop leaves out 5 of 20 training examples" in flower_log.text


def test_labels_of_one_class_are_a_warning_that_has_the_key(
    tmp_path: Path, flower_log: pytest.LogCaptureFixture
) -> None:
    opened(tmp_path, "csv", ["ill"] * 8)
    assert "data.label: all examples of" in flower_log.text
    assert "one class, 'ill'" in flower_log.text
    flower_log.clear()
    opened(tmp_path, "npz", [1] * 8, classes=2)
    assert not flower_log.text, "a site may lack a class"
