"""Loads a data set: the embedded digits, an entry of the catalogue, a folder, or a name on the Hugging Face hub.

Small data sets are decoded into memory, one uint8 tensor per split; large ones stay on disk (see images.py).
"""

from __future__ import annotations

import gzip
import importlib.util
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedbn_flwr.errors import DataError, needs
from fedbn_flwr.named import is_name

from . import Size
from .catalogue import CATALOGUE
from .columns import (
    check_classes,
    domain_column,
    groups_of,
    image_and_label,
    is_image,
    labels_of,
    pixel_classes,
    rows_of_domains,
    with_images,
)
from .dataset import DataSet, spread
from .decoding import Files
from .folders import commit_of, open_splits
from .images import Images, Source, Stream
from .returned import in_memory, returned, splits_in

_TRIED = 16  # images of a streamed split that are checked before training


def load(
    name: str,
    *,
    root: str | None = None,
    revision: str | None = None,
    image: str | None = None,
    label: str | None = None,
    domain: str | None = None,
    domains: Sequence[str] = (),
    natural: str | None = None,
    train: str | None = None,
    test: str | None = None,
    size: int | Size | None = None,
    fit: Literal["stretch", "crop"] | None = None,
    classes: int | None = None,
    class_names: tuple[str, ...] = (),
    stream: bool | Literal["auto"] = "auto",
    memory: float = 8.0,
    readers: int = 2,
    options: Mapping[str, Any] | None = None,
) -> DataSet:
    """The data set `name`: `digits`, an entry of the catalogue, a folder, or a name on the Hugging Face hub.

    It may also be `module:callable`, which is called with `options`; see returned.py.

    `root` (by default $FEDBN_DATA) is a folder of local copies: `root/name` is read if it exists. `revision` is the
    commit, tag or branch of a data set on the hub.
    `image`, `label` and `domain` name columns; by default they are found by type (`domain` by name). A `label` column
    of images contains segmentation masks. `domains` selects domains; `natural` is the column of a natural partition;
    `train` and `test` are names of splits.

    All images are resized to `size`, a side or height and width (by default the catalogue's). `fit` is `stretch`, or
    `crop`, which keeps the centre. `classes` is the number of classes of a segmentation data set. `class_names` are
    the classes in the order of their numbers; images of a part of them are enough.

    With `stream`, `readers` threads decode images on request; `auto` does so if all images together would take more
    than `memory` GiB.
    """
    if revision is not None and (name == "digits" or is_name(name)):
        raise DataError(f"data.revision is {revision!r}, which is for data sets of the hub, not for {name!r}")
    if name == "digits":
        if size not in (None, 8, (8, 8)):
            raise DataError(f"data.size is {size}; the embedded digits are 8 by 8 and are not resized")
        if column := image or label or domain or natural or ", ".join(domains):
            raise DataError(
                f"the embedded digits have neither domains nor other columns, but the settings name {column!r}"
            )
        if split := train or test:
            raise DataError(f"the embedded digits have one split for training and one for tests, found {split!r}")
        if stream is True:
            raise DataError("data.stream is true, but the embedded digits are in memory; leave it out")
        return _digits()
    if is_name(name):
        found = returned(name, root, options or {})
        if (own := splits_in(found)) is None:
            given = {"image": image, "label": label, "train": train, "test": test, "fit": fit, "partition": natural}
            if wrong := [key for key, value in given.items() if value is not None]:
                raise DataError(
                    f"data.{wrong[0]} is {given[wrong[0]]!r}, which is for data sets with columns of image files, but "
                    f"{name!r} returned arrays; leave it out, or return a datasets.DatasetDict"
                )
            if stream is True:
                raise DataError(f"data.stream is true, but {name!r} returned arrays in memory; leave it out")
            pixels = (size, size) if isinstance(size, int) else size
            if class_names and "classes" not in found:
                found = {**found, "classes": class_names}
            return in_memory(name, found, size=pixels, classes=classes, domains=domains, memory=memory)
        splits, entry = own, None
    else:
        with needs("data", f"data.name={name!r}"):
            import datasets  # noqa: F401
        splits, entry = open_splits(name, CATALOGUE.get(name), root, train, test, revision)
    commit = commit_of(next(iter(splits.values())))
    splits = {part: with_images(split, image) for part, split in splits.items()}
    first = next(iter(splits.values()))
    if entry is not None:
        # A copy may have other column names; its columns are then found by type.
        image = image or (entry.image if entry.image in first.features else None)
        label = label or (entry.label if entry.label in first.features else None)
        size = size or entry.size
        fit = fit or entry.fit
    columns = {part: image_and_label(split, name, image, label, domain or "domain") for part, split in splits.items()}
    dense = is_image(first, columns["train"][1])
    if dense:
        class_names = class_names or pixel_classes(name, entry, classes)
    else:
        class_names = check_classes(splits, columns, name, entry, class_names)
    domain = domain_column(first, name, domain, domains)
    keep = rows_of_domains(splits, name, domain, domains) if domains and domain else {}
    files: dict[str, Files] = {}
    labels: dict[str, Tensor] = {}
    for part, split in splits.items():
        image_column, label_column = columns[part]
        if dense:
            labels[part] = torch.zeros(len(split), dtype=torch.int64)
        else:
            labels[part] = labels_of(split, name, label_column, class_names)
        rows = torch.ones(len(labels[part]), dtype=torch.bool) if part not in keep else keep[part]
        rows &= labels[part] >= 0  # without the classes that are not kept
        if not rows.any():
            raise DataError(f"{name!r} has no {part} images" + (f" of {', '.join(domains)}" if domains else ""))
        if not rows.all():
            split = splits[part] = split.select(rows.nonzero()[:, 0].numpy())
            labels[part] = labels[part][rows]
        files[part] = Files(
            split,
            image_column,
            name,
            (size, size) if isinstance(size, int) else size,
            fit or "stretch",
            label_column if dense else None,
            entry.ids if dense and entry else None,
            len(class_names),
        )
    if stream == "auto":
        stream = _decoded(files) > memory * 2**30
    parts: Mapping[str, Source]
    parts = _streams(files, labels, name, readers) if stream else _in_memory(files, labels, name)
    return DataSet(
        name,
        parts["train"],
        parts["test"],
        class_names,
        groups_of(splits, name, domain, domains) if domain is not None else None,
        groups_of(splits, name, natural, ()) if natural is not None else None,
        commit,
    )


# --- in memory or on disk -------------------------------------------------------


def _decoded(files: dict[str, Files]) -> int:
    """Bytes of all decoded images, if each has the size of the first of its split."""
    total = 0
    for each in files.values():
        pixels, mask = each.pair(0) if each.masks is not None else (each.pixels(0), None)
        total += len(each) * (pixels.size + (0 if mask is None else mask.size))
    return total


def _in_memory(files: dict[str, Files], labels: dict[str, Tensor], name: str) -> dict[str, Images]:
    parts = {}
    for part, each in files.items():
        images, masks = each.decode(), each.decode_masks() if each.masks is not None else None
        if masks is not None and images.shape[2:] != masks.shape[1:]:
            raise DataError(
                f"{name!r} has images of {images.shape[2]}x{images.shape[3]} pixels, but masks of "
                f"{masks.shape[1]}x{masks.shape[2]}"
            )
        parts[part] = Images(images, labels[part], masks)
    return _same_shape(parts, name)


def _streams(files: dict[str, Files], labels: dict[str, Tensor], name: str, readers: int) -> dict[str, Stream]:
    """Splits that stay on disk. Some images of each are decoded now, to count channels and to find broken files."""
    channels = 0
    sizes: dict[str, Size] = {}
    for part, each in files.items():
        rows = spread(len(each), _TRIED).tolist()
        with ThreadPoolExecutor(readers) as pool:
            tried = list(pool.map(each.look, rows))
        channels = max(channels, *(len(pixels) for pixels in tried))
        found = {pixels.shape[1:]: row for row, pixels in zip(rows, tried, strict=True)}
        if len(found) > 1:
            few = ", ".join(f"{h}x{w} in row {row}" for (h, w), row in list(found.items())[:3])
            raise DataError(f"{name!r} has images of several sizes ({few}); set data.size to resize them")
        sizes[part] = next(iter(found))
    if sizes["train"] != sizes["test"]:
        raise _other_shape(name, (channels, *sizes["train"]), (channels, *sizes["test"]))
    return {part: Stream(each, labels[part], (channels, *sizes[part]), readers) for part, each in files.items()}


def _same_shape(parts: dict[str, Images], name: str) -> dict[str, Images]:
    """Greyscale becomes RGB if the other split has colour; other differences are an error."""
    train, test = (parts[part].images.shape[1:] for part in ("train", "test"))
    if train[1:] == test[1:] and {train[0], test[0]} == {1, 3}:
        return {
            part: replace(images, images=images.images.expand(-1, 3, -1, -1).contiguous())
            for part, images in parts.items()
        }
    if train != test:
        raise _other_shape(name, tuple(train), tuple(test))
    return parts


def _other_shape(name: str, train: tuple[int, ...], test: tuple[int, ...]) -> DataError:
    return DataError(
        f"data.name={name!r}: training images are {train}, test images {test} (channels, height, width); set "
        "data.size to resize them"
    )


def _digits() -> DataSet:
    """1,797 handwritten digits of 8 by 8 pixels, part of scikit-learn; every fifth is a test image."""
    # Importing scikit-learn would take longer than reading its file.
    package = importlib.util.find_spec("sklearn")
    if package is None or not package.submodule_search_locations:
        raise DataError("data.name='digits' needs scikit-learn, which contains them: pip install scikit-learn")
    file = Path(package.submodule_search_locations[0]) / "datasets" / "data" / "digits.csv.gz"
    with gzip.open(file, "rt") as lines:
        rows = np.loadtxt(lines, delimiter=",")
    pixels = torch.from_numpy(np.rint(rows[:, :-1] * (255 / 16)).astype(np.uint8)).reshape(-1, 1, 8, 8)
    labels = torch.from_numpy(rows[:, -1].astype(np.int64))
    is_test = torch.arange(len(labels)) % 5 == 4
    return DataSet(
        "digits",
        Images(pixels[~is_test], labels[~is_test]),
        Images(pixels[is_test], labels[is_test]),
        tuple(str(digit) for digit in range(10)),
    )
