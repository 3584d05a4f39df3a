"""Files that don't fit the settings: one message, which names the column and what would be right."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from fedbn_flwr.data.load import load
from fedbn_flwr.data.source import Source
from fedbn_flwr.errors import DataError
from tests.support.images import png

ILL = "age,ill\n1,0\n2,1\n"
TWO = {"train.csv": "x,ward,y\n1,n,a\n2,s,b\n", "test.csv": "x,ward,y\n3,n,a\n"}
HALF = {"label": "ill", "test": 0.5}
SEX: dict[str, Any] = {"inputs": ["age", "sex"], "label": "ill", "test": 0.5}
SEXES = "age,sex,ill\n1,m,0\n2,f,1\n3,m,1\n4,f,0\n"
# Visits of a patient, with a row for each time.
LONG = "visit,minute,hr,ill\n1,0,60,no\n1,5,61,no\n2,0,70,yes\n2,5,71,yes\n"
VISITS: dict[str, Any] = {"series": "visit", "time": "minute", "label": "ill", "test": 0.5}
ARRAYS: dict[str, Any] = {"inputs": np.random.default_rng(0).normal(size=(8, 3, 6)), "labels": np.arange(8) % 2}
MASKS = np.ones((8, 6), np.int64)
IMAGE = png(np.zeros((4, 4, 3), np.uint8))


def visits(**changes: list[object]) -> dict[str, str]:
    rows = [line.split(",") for line in LONG.split()]
    frame = pd.DataFrame(rows[1:], columns=rows[0]).assign(**changes)
    return {"t.csv": frame.to_csv(index=False)}


def write(folder: Path, files: Mapping[str, Any]) -> Path:
    """Texts, images, frames as Parquet, and arrays; returns the folder, or its only file."""
    for name, content in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        match content:
            case str() | bytes():
                file.write_bytes(content.encode("latin-1") if isinstance(content, str) else content)
            case pd.DataFrame():
                content.to_parquet(file)
            case _:
                np.savez(file, **content)
    return folder if len(files) > 1 or "/" in next(iter(files)) else folder / next(iter(files))


@pytest.mark.parametrize(
    ("files", "options", "message"),
    [
        # --- rows, columns and files ---
        ({"t.csv": "age,ill\n"}, HALF, "has no rows"),
        ({"t.csv": ILL}, {"label": "ill"}, r"is one file, which has no test split; set data\.test: 0\.2"),
        ({"t.csv": ILL}, HALF | {"test": 0.0001}, r"data\.test is 0\.0001, which is 0 of 2 examples"),
        ({"t.csv": ILL}, {"test": 0.5}, r"name the column with data\.label; its columns: age \(int64"),
        ({"t.csv": "age,city,ill\n1,Köln,0\n2,Bonn,1\n"}, HALF | {"inputs": "age"}, "'city' contains text that isn't"),
        ({"t.csv": "a,b\n5.5,9.5\n6.5,8.5\n"}, HALF | {"label": ["a", "b"]}, "no column left for inputs, data.lab"),
        ({"train.csv": ILL, "test.csv": "age,ill,age\n1,0,2\n"}, {"label": "ill"}, r"test\.csv has 2 columns 'age'"),
        (
            {"train.csv": ILL, "train_old.tsv": ILL, "test.csv": ILL},
            {"label": "ill"},
            r"files of 'train' are \.csv, \.tsv; expected one",
        ),
        (TWO | {"test.csv": "ward,y\nn,a\n"}, {"label": "y"}, "test has no column x; expected the columns of train"),
        (TWO | {"test.csv": "x,ward,y\n?,n,a\n"}, {"label": "y"}, "1 of 3 values of the column 'x' are not numbers"),
        ({"train.parquet": b"no table", "test.parquet": b""}, {}, r"cannot read .*train\.parquet"),
        # --- values ---
        (
            {"t.csv": "age,bp,ill\n1,,0\n,,1\n3,1,1\n"},
            HALF,
            r"no value .* in age \(1\), bp \(2\); .*data\.missing: mean, .* or drop",
        ),
        (
            TWO | {"test.csv": "x,ward,y\n,n,a\n"},
            {"label": "y", "missing": "drop"},
            r"every test example of '.*' \(1\) lacks an input or a label, so none is left",
        ),
        ({"t.csv": "age,ill\n1,0\ninf,1\n"}, HALF | {"missing": "mean"}, r"infinite values in age \(1\); expected"),
        ({"t.csv": SEXES}, SEX, r"column 'sex' has texts.* data\.categories: \{sex: \[f, m\]\}"),
        (
            {"t.csv": SEXES},
            SEX | {"categories": {"sex": ["m"]}},
            r"data\.categories lacks 1 of .* the column 'sex' .*, such as 'f'",
        ),
        *(
            (
                {"t.csv": SEXES},
                SEX | {"inputs": inputs, "categories": {"sax": ["m"]}},
                r"data\.categories='sax' is not a column of .*; its columns: age .*, sex",
            )
            for inputs in (["age"], [])
        ),
        # --- arrays ---
        ({"all.npz": ARRAYS}, {"test": 0.5, "shape": [3, 7]}, r"data\.shape is \[3, 7\], but .* of shape \[3, 6\]"),
        (
            {"all.npz": ARRAYS | {"inputs": MASKS * 7}},
            {"test": 0.5, "tokens": 5},
            r"tokens other than 0 to 4 \(data\.tokens is 5\): from 7 to 7",
        ),
        (
            {"all.npz": ARRAYS | {"inputs": MASKS - 3}},
            {"test": 0.5},
            r"tokens other than 0, 1, 2 and so on; give .* as floats: from -2 to -2",
        ),
        (
            {"t.parquet": pd.DataFrame({"a": [[1.0], [1.0, 2.0]], "y": [0, 1]})},
            {"inputs": "a", "label": "y", "test": 0.5},
            "'a' has arrays of several shapes, with sides of 1, 2; expected",
        ),
        *(
            (
                {"all.npz": ARRAYS | {"mask": mask}},
                {"inputs": ["inputs", "mask"], "test": 0.25},
                rf"'mask' of shape \[{shape}\]; expected \[8, 6\], .* 1 or true at real",
            )
            for mask, shape in ((MASKS + 1, "8, 6"), (MASKS[:, :5], "8, 5"))
        ),
        # --- labels ---
        ({"t.csv": "x,y\n1,.5\n2,1\n"}, {"label": "y", "test": 0.5, "task": "classification"}, "type float64 .* not"),
        (
            {"t.csv": "x,y,z\n1,.5,1\n2,1,0\n"},
            {"label": ["y", "z"], "test": 0.5, "task": "multilabel"},
            "has values other than 0 and 1",
        ),
        (
            {"all.npz": ARRAYS | {"labels": np.arange(8) % 3}},
            {"test": 0.25, "class_names": ("cat", "dog")},
            "has 2 classes, so labels must be 0 to 1.*they are 0 to 2",
        ),
        (TWO | {"test.csv": "x,ward,y\n3,n,c\n"}, {"label": "y", "class_names": ["b", "a"]}, "lacks 1 .* such as 'c'"),
        # --- series ---
        (visits(ill=[*"abab"]), VISITS, "2 of 2 series have several values in 'ill'; expected one for"),
        (visits(minute=[0] * 4), VISITS, "has 2 rows with the series and the time of another row"),
        (visits(minute=[None, 1, 2, 3]), VISITS, "has 1 rows without a series or a time"),
        (visits(visit=[None, *"abc"]), VISITS, "has 1 rows without a series or a time"),
        (visits(hr=[*"abcd"]), VISITS | {"inputs": ["hr"]}, "has texts in a column of inputs; series need"),
        (visits(hr=[None, 1, 2, 3]), VISITS, r"of the 2 rows some have no value .* in inputs \(1\)"),
        (visits(), VISITS | {"series": "visits"}, r"data\.series='visits' is not a column of .*: visit \(int64\)"),
        (visits(), VISITS | {"window": {"length": 3}}, "no series has the 3 rows of a window .*; the longest has 2"),
        # --- folders of images ---
        (
            {"train/1.png": IMAGE, "test/a/1.png": IMAGE},
            {},
            "'train' contains no images in folders of classes; expected .*train/CLASS/",
        ),
        (
            {"berlin/a/0.png": IMAGE, "koeln/a/0.png": IMAGE, "berlin_train.txt": "", "berlin_test.txt": ""},
            {},
            r"some domains have lists.*: koeln have none",
        ),
        (
            {"berlin/a/0.png": IMAGE, "rom/a/0.png": IMAGE},
            {},
            r"CLASS/\*\.png or DOMAIN/CLASS/\*\.png with data\.test: 0\.2",
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_with_files_is_one_message(
    files: dict[str, Any], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    place = write(tmp_path, files)
    with pytest.raises(DataError, match=message) as caught:
        load(Source.model_validate({"name": str(place), **options}))
    assert "\n" not in str(caught.value)
