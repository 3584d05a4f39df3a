"""Predicted masks: a file for each image, from tables, folders and a reader of one's own, and their Dice by hand."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from fedbn_flwr import Result, run
from fedbn_flwr.commands import cli
from tests.support.refusals import refusal

HERE = "fedbn_flwr.extensions.site.tests.test_masks"


class Pixels(nn.Sequential):
    """A class for each pixel of images, or for each voxel of volumes."""

    def __init__(self, num_classes: int, input_shape: tuple[int, ...]) -> None:
        conv, norm = (nn.Conv2d, nn.BatchNorm2d) if len(input_shape) == 3 else (nn.Conv3d, nn.BatchNorm3d)
        super().__init__(conv(1, 4, 3, padding=1), norm(4), nn.ReLU(), conv(4, num_classes, 1))


def bright(count: int, *shape: int, seed: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    """Noise with a bright corner, which is class 1; some pixels are not labelled."""
    draw = np.random.default_rng(seed)
    masks = np.zeros((count, *shape), np.uint8)
    for mask in masks:
        mask[tuple(slice(0, int(draw.integers(2, side))) for side in shape)] = 1
    images = (draw.integers(0, 90, masks.shape) + 110 * masks).astype(np.uint8)
    masks[:, 0, 0] = 255
    return {"x": images[:, None], "y": masks}


def read_folder(root: str) -> dict[str, dict[str, np.ndarray[Any, Any]]]:
    parts = {name: np.load(Path(root, f"{name}.npy")) for name in ("train", "test")}
    return {name: {"inputs": both[:, :1], "labels": both[:, 1].astype(np.int64)} for name, both in parts.items()}


def trained_on(out: Path, **data: Any) -> Result:
    train = {"lr": 0.1, "batch_size": 8}
    return run({"rounds": 2, "clients": 2, "data": data, "train": train}, model=Pixels, out=out, progress=False)


def predicted(folder: Path, data: Path, capsys: pytest.CaptureFixture[str], *more: str) -> tuple[Any, list[Any], str]:
    """The rows, their masks, and what the command says."""
    words = ["predict", folder, "--data", data, "--allow", f"{HERE}:Pixels", *more, "--out", data.parent / "found.csv"]
    capsys.readouterr()
    assert cli.main([*map(str, words)]) == 0
    rows = [*csv.DictReader((data.parent / "found.csv").open())]
    files = [data.parent / "found-masks" / row["prediction"] for row in rows]
    masks = [np.load(file) if file.suffix == ".npy" else np.array(Image.open(file)) for file in files]
    return rows, masks, capsys.readouterr().out


def expected(result: Result, images: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    inputs = torch.from_numpy(images.astype(np.float32))
    with torch.no_grad():
        return (
            result.model()(result.normalise()(inputs / 255 if images.dtype == np.uint8 else inputs)).argmax(1).numpy()
        )


def test_masks_of_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.savez(tmp_path / "all.npz", **bright(40, 8, 8))
    data = {"name": str(tmp_path / "all.npz"), "inputs": "x", "label": "y", "classes": 2, "test": 0.25}
    result = trained_on(tmp_path / "run", **data)
    new = bright(9, 8, 8, seed=1)
    np.savez(tmp_path / "new.npz", **new)
    rows, masks, said = predicted(result.folder, tmp_path / "new.npz", capsys)
    assert [row["prediction"] for row in rows] == [f"{number}.png" for number in range(9)]
    assert np.array_equal(masks, expected(result, new["x"]))
    found, real = (np.array(values)[new["y"] != 255] for values in (masks, new["y"]))
    dice = np.mean([2 * ((found == c) & (real == c)).sum() / ((found == c).sum() + (real == c).sum()) for c in (0, 1)])
    shown = re.search(r"mean IoU [\d.]+, accuracy ([\d.]+), dice ([\d.]+): 9 masks", said)
    assert shown is not None
    assert [float(value) for value in shown.groups()] == pytest.approx([np.mean(found == real), dice], abs=1e-4)
    # The same images as files, without masks.
    (tmp_path / "images").mkdir()
    for number, image in enumerate(new["x"]):
        Image.fromarray(image[0]).save(tmp_path / "images" / f"{number}.png")
    rows, without, said = predicted(result.folder, tmp_path / "images", capsys)
    assert [row["file"] for row in rows] == [f"{number}.png" for number in range(9)]
    assert np.array_equal(without, masks)
    assert "dice" not in said


def test_masks_of_volumes_that_a_reader_of_one_s_own_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for site in ("one", "new"):
        (tmp_path / site).mkdir()
        for name, count in (("train", 12), ("test", 5)):
            made = bright(count, 4, 6, 8, seed=len(site) + count)
            both = np.concatenate([made["x"], made["y"][:, None]], 1).astype(np.float32)
            np.save(tmp_path / site / f"{name}.npy", both)
    reader = f"{HERE}:read_folder"
    result = trained_on(tmp_path / "run", name=reader, root=str(tmp_path / "one"))
    there = tmp_path / "new"
    rows, masks, said = predicted(result.folder, there, capsys, "--allow", reader)
    assert [row["prediction"] for row in rows] == [f"{number}.npy" for number in range(5)]
    assert np.array_equal(masks, expected(result, np.load(there / "test.npy")[:, :1]))
    assert "5 masks" in said
    words = ["adapt", result.folder, "--data", there, "--allow", f"{HERE}:Pixels", "--allow", reader]
    assert cli.main([*map(str, words), "--out", str(tmp_path / "adapted")]) == 0
    assert re.search(r"--use +mean IoU +predictions changed\n", capsys.readouterr().out)
    words = ["predict", result.folder, "--data", there, "--allow", f"{HERE}:Pixels", "--out", tmp_path / "no.csv"]
    assert f"allow it: --allow {reader}" in refusal(capsys, *words)
    error = refusal(capsys, *words, "--allow", reader, "--id", "patient")
    assert "reads the folder, and names no columns" in error
