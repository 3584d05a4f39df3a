"""Predictions of a run's model: columns by their names, rows with gaps, images and their labels."""

from __future__ import annotations

import csv
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from safetensors.torch import load_file, save_file

from fedbn_flwr import Result, run
from fedbn_flwr.commands import cli
from tests.support.images import write_pictures
from tests.support.refusals import refusal

SETTINGS: dict[str, Any] = {
    "rounds": 2,
    "clients": 2,
    "seed": 0,
    "data": {"channels": 1, "size": 8, "classes": 2, "augment": []},
    "model": {"name": "cnn"},
    "train": {"lr": 0.1, "batch_size": 8},
}


def images(seed: int, label: int, count: int) -> np.ndarray[Any, Any]:
    """Dark ones are of class 0, bright ones of class 1."""
    values = np.random.default_rng(seed).integers(0, 100, (count, 8, 8))
    return (values + 150 * label).astype(np.uint8)


def trained_on(out: Path, model: str = "cnn", **data: Any) -> Result:
    return run({**SETTINGS, "data": data, "model": {"name": model}}, out=out, progress=False)


def predicted(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[list[dict[str, str]], str]:
    file = Path(words[0]) / "predictions.csv"
    capsys.readouterr()
    assert cli.main(["predict", *map(str, words), "--out", str(file)]) == 0
    with file.open() as lines:
        return list(csv.DictReader(lines)), capsys.readouterr().out


@pytest.mark.parametrize("form", ["folder", "folder of colours", "npz"])
def test_images_have_the_predictions_of_the_run_s_evaluation(
    form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    site = tmp_path / "site"
    site.mkdir()
    for part, count in (("train", 16), ("test", 6)):
        given = [images(len(part) + label, label, count) for label in (0, 1)]
        if form == "npz":
            np.savez(site / f"{part}.npz", inputs=np.concatenate(given), labels=np.repeat([0, 1], count))
        else:
            write_pictures(site / part, given[0], "benign")
            write_pictures(site / part, given[1], "malign")
    pictures = sorted(site.rglob("*.png"))
    for file in pictures if form == "folder of colours" else ():
        Image.open(file).convert("RGB").save(file)
    data = SETTINGS["data"] | ({"channels": 3} if form == "folder of colours" else {})
    result = trained_on(tmp_path / "out", name=str(site), **data)
    new = site / "test.npz" if form == "npz" else site
    rows, printed = predicted(capsys, result.folder, "--data", new)
    right = sum(row["label"] == row["prediction"] for row in rows)
    assert (len(rows), right / len(rows)) == (12, pytest.approx(result.values["accuracy"]))
    assert f"{right} of 12 labels" in printed
    if form == "folder of colours":  # greyscale images are repeated
        for file in pictures:
            Image.open(file).convert("L").save(file)
        assert predicted(capsys, result.folder, "--data", new)[0] == rows
    if form == "folder":  # the same images without labels, and an order of their own
        assert all(float(r["probability benign"]) + float(r["probability malign"]) == pytest.approx(1) for r in rows)
        (tmp_path / "new").mkdir()
        for place, file in enumerate(sorted((site / "test").rglob("*.png"))):
            (tmp_path / "new" / f"{place:02}.png").write_bytes(file.read_bytes())
        bare, printed = predicted(capsys, result.folder, "--data", tmp_path / "new")
        assert ("label" in bare[0], "labels" in printed) == (False, False)
        assert sorted(row["probability malign"] for row in bare) == sorted(row["probability malign"] for row in rows)
        words = ["predict", result.folder, "--data", tmp_path / "no.csv", "--out", tmp_path / "none.csv"]
        assert refusal(capsys, *words).endswith("no.csv': there is no such file or folder\n")


def test_a_row_that_training_would_leave_out_has_no_prediction(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [f"{value},{'high' if value > 20 else 'low'}" for value in range(40)]
    for name, first in (("train", ",low"), ("new", ",low")):
        (tmp_path / f"{name}.csv").write_text("\n".join(["x,y", first, *lines, ""]))
    for missing in ("drop", None):
        data = {"name": str(tmp_path / "train.csv"), "label": "y", "test": 0.25, "missing": missing}
        result = trained_on(tmp_path / f"out-{missing}", "mlp", **data)
        if missing:
            rows, printed = predicted(capsys, result.folder, "--data", tmp_path / "new.csv")
            assert [row["row"] for row in rows] == [str(row) for row in range(41)]
            assert (rows[0]["label"], rows[0]["prediction"], rows[0]["probability low"]) == ("low", "", "")
            assert all(row["prediction"] for row in rows[1:])
            assert "of 40 labels" in printed
            assert "without a prediction: 1 examples, which lack an input (data.missing is drop)" in printed
        (tmp_path / "train.csv").write_text("\n".join(["x,y", *lines, ""]))
    error = refusal(capsys, "predict", result.folder, "--data", tmp_path / "new.csv", "--out", tmp_path / "none.csv")
    assert "of the 41 rows some have no value (NaN or null) in x (1); fill them in" in error
    assert "set data.missing" not in error


# --- columns by name ---------------------------------------------------------


def patients(count: int = 60, seed: int = 0) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame(
        {
            "patient": [f"p{row}" for row in range(count)],
            "age": rng.integers(20, 90, count),
            "bp": rng.normal(120, 9, count),
            "sex": rng.choice(["f", "m"], count),
        }
    )
    return frame.assign(ill=np.where(frame["age"] + (frame["sex"] == "m") * 30 > 65, "yes", "no"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run whose data.missing is `mean`; model.json has the names of the columns, not the settings."""
    folder = tmp_path_factory.mktemp("patients")
    patients().to_csv(folder / "all.csv", index=False)
    data = {
        "name": str(folder / "all.csv"), "label": "ill", "test": 0.25, "missing": "mean",
        "categories": {"sex": ["f", "m"]},
    }  # fmt: skip
    return Path(trained_on(folder / "out", "mlp", **data).folder)


def test_columns_are_found_by_name(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In any order and of another type; others are ignored, and said to be."""
    described = json.loads((trained / "model.json").read_text())
    assert (described["inputs"], described["label"]) == (["age", "bp", "sex"], ["ill"])
    assert described["types"] == ["int64", "float64", "string"]
    frame, file = patients(20, seed=1), tmp_path / "new.csv"
    frame.to_csv(file, index=False)
    expected, printed = predicted(capsys, trained, "--data", file, "--id", "patient")
    assert [row["patient"] for row in expected] == frame["patient"].tolist()
    assert "ignored" not in printed
    frame[["ill", "sex", "bp", "age"]].assign(weight=0.0, age=frame["age"] * 1.0).to_csv(file, index=False)
    rows, printed = predicted(capsys, trained, "--data", file)
    assert "ignored, since the model has no such inputs: weight" in printed
    assert [row["probability yes"] for row in rows] == [row["probability yes"] for row in expected]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda frame: frame.drop(columns="age"),
            "data.inputs='age' is not a column of",
        ),
        (lambda frame: frame.rename(columns={"bp": "bp  x"}), "not a column of"),
        (lambda frame: frame[:0], "has no rows"),
        (
            lambda frame: frame.assign(age=frame["age"] > 50),
            "the column 'age' has true and false; the model was trained",
        ),
        (lambda frame: frame.assign(sex="x"), "lacks 1 of the values of the column 'sex' of"),
        (lambda frame: frame.assign(age="old"), "the column 'age' has texts; the model was trained on numbers in it"),
        (lambda frame: frame.assign(ill="perhaps"), "lacks 1 of the classes in 'ill'"),
    ],
)
def test_other_columns_are_an_error_that_names_them(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Any, message: str
) -> None:
    change(patients(20)).to_csv(tmp_path / "new.csv", index=False)
    words = ["predict", trained, "--data", tmp_path / "new.csv", "--out", tmp_path / "none.csv"]
    assert message in refusal(capsys, *words)


def test_rows_without_a_label_or_an_input_get_predictions(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    frame = patients(20, seed=1)
    frame.to_csv(tmp_path / "whole.csv", index=False)
    frame.loc[3, "ill"], frame.loc[5, "bp"] = None, np.nan
    frame.to_csv(tmp_path / "gaps.csv", index=False)
    frame.drop(columns="ill").to_csv(tmp_path / "bare.csv", index=False)
    whole, gaps, bare = (
        predicted(capsys, trained, "--data", tmp_path / f"{name}.csv") for name in ("whole", "gaps", "bare")
    )
    assert gaps[0][3]["label"] == ""
    assert gaps[0][3]["prediction"] == whole[0][3]["prediction"]
    assert "of 19 labels" in gaps[1]
    assert "without a label: 1 examples" in gaps[1]
    assert "label" not in bare[0][0]
    assert [row["prediction"] for row in bare[0]] == [row["prediction"] for row in gaps[0]]
    assert len(bare[0]) == 20


def as_text(separator: str, encoding: str = "utf-8", first: str = "", point: str = ".") -> Any:
    return lambda frame, file: file.write_text(
        first + frame.to_csv(index=False, sep=separator, decimal=point), encoding=encoding
    )


WRITTEN = {
    "tabs.tsv": as_text("\t"),
    "bars.csv": as_text("|"),
    "unicode-text.csv": as_text("\t", "utf-16"),
    "excel.csv": as_text(";", "utf-8-sig", first="sep=;\n", point=","),
    "points.csv": as_text(";"),
    "blanks.csv": lambda frame, file: frame.rename(columns="{} ".format).to_csv(file, index=False),
    "empty-labels.csv": lambda frame, file: frame.assign(ill=None).to_csv(file, index=False),
    "table.parquet": lambda frame, file: frame.to_parquet(file),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_a_table_of_any_program_gives_the_same_predictions(
    name: str, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)  # as if the extra `data` were not installed
    frame = patients(20, seed=1)
    frame.to_csv(tmp_path / "plain.csv", index=False)
    WRITTEN[name](frame, tmp_path / name)
    expected, found = (predicted(capsys, trained, "--data", tmp_path / each)[0] for each in ("plain.csv", name))
    shown = [key for key in expected[0] if key != "label" or "empty" not in name]
    assert [*found[0]] == shown
    assert found == [{key: row[key] for key in shown} for row in expected]


def test_a_site_s_test_file_is_used_or_said_not_to_be(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flower_log: pytest.LogCaptureFixture
) -> None:
    """The run holds out a quarter of its table, so a site's folder does too."""
    for part, count in (("train", 40), ("test", 30)):
        patients(count, seed=count).to_csv(tmp_path / f"{part}.csv", index=False)
    rows, _ = predicted(capsys, trained, "--data", tmp_path, "--id", "patient")
    assert len(rows) == 10
    assert all(row["patient"] == f"p{row['row']}" for row in rows)
    assert "test.csv will not be used, since data.test holds out a part of train*" in flower_log.text


def test_predictions_that_are_not_finite_are_left_out_and_said(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights so large that one row overflows."""
    patients(20, seed=1).assign(bp=[1e9 if row == 4 else 120.0 for row in range(20)]).to_csv(tmp_path / "new.csv")
    shutil.copytree(trained, tmp_path / "run")
    file = tmp_path / "run" / "model.safetensors"
    arrays = load_file(file)
    save_file(arrays | {"hidden.weight": arrays["hidden.weight"] * 1e32}, file, {"round": "2"})
    rows, said = predicted(capsys, tmp_path / "run", "--data", tmp_path / "new.csv")
    assert [number for number, row in enumerate(rows) if not row["prediction"]] == [4]
    assert "without a prediction: 1 examples, for which the model's outputs are not finite" in said
    assert "of 19 labels" in said


def test_predictions_of_series_have_the_ids_of_the_series(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    visits = [f"v{number}" for number in range(20)]
    rows = [{"visit": visit, "hr": 10 * place + minute, "ill": "ny"[place % 2]} for place, visit in enumerate(visits)
            for minute in range(4)]  # fmt: skip
    pd.DataFrame(rows).sample(frac=1, random_state=0).to_csv(tmp_path / "all.csv", index=False)
    data = {"name": str(tmp_path / "all.csv"), "label": "ill", "series": "visit", "test": 0.25}
    result = trained_on(tmp_path / "out", "cnn1d", **data)
    found, _ = predicted(capsys, result.folder, "--data", tmp_path / "all.csv")
    assert sorted(row["visit"] for row in found) == sorted(visits)
    assert all(row["label"] == "ny"[int(row["visit"][1:]) % 2] for row in found)
    result = trained_on(tmp_path / "windows", "cnn1d", **data, window={"length": 2, "overlap": 0.5})
    found, _ = predicted(capsys, result.folder, "--data", tmp_path / "all.csv")
    assert sorted(row["visit"] for row in found) == sorted(3 * visits)


# --- image files -------------------------------------------------------------


def test_images_have_their_file_names_and_the_labels_of_their_folders(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """CLASS/*.png and DOMAIN/CLASS/*.png are read as in training."""
    for domain in ("north", "south"):
        for label, name in enumerate(("benign", "malign")):
            write_pictures(tmp_path / "all" / domain, images(len(domain) + label, label, 12), name)
    result = trained_on(tmp_path / "out", name=str(tmp_path / "all"), test=0.25, **SETTINGS["data"])
    rows, printed = predicted(capsys, result.folder, "--data", tmp_path / "all")
    assert (len(rows), "of 48 labels" in printed) == (48, True)
    assert rows[0]["file"] == "north/benign/0.png"
    assert all(row["label"] == Path(row["file"]).parent.name for row in rows)
    some, printed = predicted(capsys, result.folder, "--data", tmp_path / "all" / "north")
    assert some[0]["file"] == "benign/0.png"
    assert [row["prediction"] for row in some] == [row["prediction"] for row in rows[:24]]
    (tmp_path / "all" / "north" / "malign" / "0.png").rename(tmp_path / "all" / "north" / "malign" / "train_0.png")
    bare, printed = predicted(capsys, result.folder, "--data", tmp_path / "all" / "north" / "malign")
    assert ("labels" in printed, "label" in bare[0], bare[0]["file"]) == (False, False, "1.png")
    Image.new("RGB", (8, 8), (200, 10, 10)).save(tmp_path / "all" / "north" / "malign" / "0.png")
    error = refusal(capsys, "predict", result.folder, "--data", tmp_path / "all", "--out", tmp_path / "none.csv")
    assert "has inputs of shape [3, 8, 8], but the model takes [1, 8, 8]; convert the images" in error
