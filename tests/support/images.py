"""Small image files and data sets in the formats that users have."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from PIL import Image


def png(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(array).save(buffer, "PNG")
    return buffer.getvalue()


def pixels(count: int, shape: tuple[int, ...], seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, shape, dtype=np.uint8) for _ in range(count)]


def picture(seed: int, shape: tuple[int, ...]) -> dict[str, Any]:
    return {"bytes": png(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)), "path": None}


def write_pictures(folder: Path, images: Iterable[np.ndarray], *places: str) -> Path:
    """The images as 0.png, 1.png and so on in each of these folders below `folder`."""
    images = list(images)
    for place in places:
        (folder / place).mkdir(parents=True, exist_ok=True)
        for number, image in enumerate(images):
            (folder / place / f"{number}.png").write_bytes(png(image))
    return folder


def write_split(folder: Path, split: str, images: list[bytes | None], labels: list[int], *, classes: int = 3) -> None:
    features = datasets.Features(
        {
            "picture": datasets.Image(),
            "kind": datasets.ClassLabel(names=[f"kind {i}" for i in range(classes)]),
            "number": datasets.Value("int64"),
        }
    )
    rows = {
        "picture": [None if image is None else {"bytes": image, "path": None} for image in images],
        "kind": labels,
        "number": [10 * label for label in labels],
    }
    datasets.Dataset.from_dict(rows, features=features).to_parquet(folder / f"{split}.parquet")


def write_parquet(
    file: Path, shape: tuple[int, ...], rows: dict[str, list[int] | list[str]], names: dict[str, list[str]], image: str
) -> None:
    """A Parquet file with a column of images beside `rows`; `names` are the columns that are ClassLabels."""
    count = len(next(iter(rows.values())))
    features: dict[str, Any] = {image: datasets.Image()}
    for column, values in rows.items():
        label = datasets.ClassLabel(names=names[column]) if column in names else None
        features[column] = label or datasets.Value("string" if isinstance(values[0], str) else "int64")
    columns = {image: [picture(i, shape) for i in range(count)], **rows}
    file.parent.mkdir(parents=True, exist_ok=True)
    datasets.Dataset.from_dict(columns, features=datasets.Features(features)).to_parquet(file)


def write_splits(
    folder: Path,
    shape: tuple[int, ...],
    rows: dict[str, list[int] | list[str]],
    names: dict[str, list[str]],
    image: str = "image",
    files: Sequence[str] = ("train.parquet", "test.parquet"),
) -> None:
    """The same rows as training and as test split."""
    for file in files:
        write_parquet(folder / file, shape, rows, names, image)


def numbered(count: int) -> list[str]:
    return [f"c{i}" for i in range(count)]
