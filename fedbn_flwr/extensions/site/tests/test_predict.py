"""Predictions of a run's model on images: a folder, the test examples of a site's folder, and an .npz file."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedbn_flwr import cli, run

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


def write_folder(folder: Path) -> None:
    for part, count in (("train", 16), ("test", 6)):
        for label, name in enumerate(("benign", "malign")):
            (folder / part / name).mkdir(parents=True)
            for i, image in enumerate(images(len(part) + label, label, count)):
                Image.fromarray(image).save(folder / part / name / f"{i}.png")


def predicted(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[list[dict[str, str]], str]:
    file = Path(words[0]) / "predictions.csv"
    capsys.readouterr()
    assert cli.main(["predict", *map(str, words), "--out", str(file)]) == 0
    with file.open() as lines:
        return list(csv.DictReader(lines)), capsys.readouterr().out


def test_images_of_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_folder(tmp_path / "site")
    result = run(
        {**SETTINGS, "data": {**SETTINGS["data"], "name": str(tmp_path / "site")}}, out=tmp_path / "out", progress=False
    )
    rows, printed = predicted(capsys, result.folder, "--data", tmp_path / "site")
    right = sum(row["label"] == row["prediction"] for row in rows)
    assert (len(rows), right / len(rows)) == (12, pytest.approx(result.values["accuracy"]))
    assert f"{right} of 12 labels" in printed
    assert all(float(row["probability benign"]) + float(row["probability malign"]) == pytest.approx(1) for row in rows)
    words = ["predict", str(result.folder), "--data", str(tmp_path / "no.csv"), "--out", str(tmp_path / "none.csv")]
    assert cli.main(words) == 2
    assert capsys.readouterr().err.endswith("no.csv': there is no such file or folder\n")
    # The same images without labels, and an order of their own.
    (tmp_path / "new").mkdir()
    for place, file in enumerate(sorted((tmp_path / "site" / "test").rglob("*.png"))):
        (tmp_path / "new" / f"{place:02}.png").write_bytes(file.read_bytes())
    unlabelled, printed = predicted(capsys, result.folder, "--data", tmp_path / "new")
    assert "label" not in unlabelled[0]
    assert "labels" not in printed
    assert sorted(row["probability malign"] for row in unlabelled) == sorted(row["probability malign"] for row in rows)


def test_images_of_an_npz_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "site").mkdir()
    for part, count in (("train", 16), ("test", 6)):
        np.savez(
            tmp_path / "site" / f"{part}.npz",
            inputs=np.concatenate([images(len(part) + label, label, count) for label in (0, 1)]),
            labels=np.repeat([0, 1], count),
        )
    result = run(
        {**SETTINGS, "data": {**SETTINGS["data"], "name": str(tmp_path / "site")}}, out=tmp_path / "out", progress=False
    )
    rows, printed = predicted(capsys, result.folder, "--data", tmp_path / "site" / "test.npz")
    right = sum(row["label"] == row["prediction"] for row in rows)
    assert (len(rows), right / len(rows)) == (12, pytest.approx(result.values["accuracy"]))
    assert f"{right} of 12 labels" in printed


def test_every_row_of_a_table_gets_a_prediction_or_the_table_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Training left out rows with gaps; predictions have the numbers of the rows, so none may be left out there."""
    lines = [f"{value},{'high' if value > 20 else 'low'}" for value in range(40)]
    for name, first in (("train", ",low"), ("whole", "3,low"), ("gap", ",low")):
        (tmp_path / f"{name}.csv").write_text("\n".join(["x,y", first, *lines, ""]))
    data = {"name": str(tmp_path / "train.csv"), "label": "y", "test": 0.25, "missing": "drop"}
    result = run({**SETTINGS, "data": data, "model": {"name": "mlp"}}, out=tmp_path / "out", progress=False)
    for name in ("whole", "gap"):
        (tmp_path / name).mkdir()
        (tmp_path / f"{name}.csv").rename(tmp_path / name / "new.csv")
    rows, _ = predicted(capsys, result.folder, "--data", tmp_path / "whole" / "new.csv")
    assert [row["label"] for row in rows].count("low") == 22
    words = [str(result.folder), "--data", str(tmp_path / "gap" / "new.csv"), "--out", str(tmp_path / "none.csv")]
    assert cli.main(["predict", *words]) == 2
    assert "of the 41 rows of train some have no value (NaN or null) in x (1)" in capsys.readouterr().err
