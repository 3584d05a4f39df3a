"""Data sets of arrays: what a callable of the user returns, by the name `module:callable` in `data.name`.

It returns a mapping with `train` and `test`, and perhaps `classes`, the names of the classes. Both are splits of
`datasets`, which are read like those of the hub; or each is one of these, which are kept in memory:

- a pair (images, labels), or a mapping with `images`, `labels` and perhaps `domains`, of arrays or tensors
- a torch `Dataset` of pairs (image, label), or of triples with a domain
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from fedbn_flwr import named, seeding
from fedbn_flwr.errors import DataError, did_you_mean

from . import IGNORED, Size
from .dataset import DataSet, Groups, numbers
from .images import Images
from .source import PARTS, Source

KEY = "data.name"
COLUMNS = ("images", "labels", "domains")


def returned(source: Source) -> Mapping[str, Any]:
    """What the callable returns, checked to have both splits. Random draws in it are the same in every process."""
    name = source.name
    offered = {} if source.root is None or "root" in source.options else {"root": source.root}
    with seeding.all_streams(seeding.seed_for(0, "own data")):
        found = named.call(KEY, name, **named.accepted(named.load(KEY, name), offered), **source.options)
        if not isinstance(found, Mapping) or not all(part in found for part in PARTS):
            keys = f" with {', '.join(map(repr, found))}" if isinstance(found, Mapping) else ""
            raise DataError(
                f"{KEY}={name!r} returned a {type(found).__name__}{keys}; expected a mapping with 'train' and 'test', "
                "such as a datasets.DatasetDict"
            )
        if all(hasattr(found[part], "features") for part in PARTS):  # splits of `datasets`
            return found
        # Read here, where its draws are seeded.
        return {**found, **{part: _columns(f"{KEY}={name!r}: {part}", found[part]) for part in PARTS}}


def in_memory(source: Source, found: Mapping[str, Any]) -> DataSet:
    """The data set of two mappings with images, labels and perhaps domains, and perhaps of names of classes."""
    source.check_in_memory()
    name, splits = f"{KEY}={source.name!r}", {part: found[part] for part in PARTS}
    classes = found.get("classes") or source.class_names or None
    labels, class_names = _labels(name, {part: splits[part]["labels"] for part in PARTS}, classes, source.classes)
    if labels["train"].ndim != labels["test"].ndim:
        raise DataError(f"{name}: only one of training and test data has masks; expected both or none")
    domains = {part: split["domains"] for part, split in splits.items() if split.get("domains") is not None}
    if source.domains and "train" not in domains:
        raise DataError(f"data.domains is {list(source.domains)}, but {name} has no 'domains'")
    groups = Groups.of(source.name, domains, source.domains) if "train" in domains else None
    parts = {}
    for part, split in splits.items():
        where = f"{name}: {part}"
        images = _images(where, split["images"], source)
        targets = labels[part]
        for what, values in (("labels", targets), ("domains", domains.get(part))):
            if values is not None and len(values) != len(images):
                raise DataError(f"{where} has {len(images)} images and {len(values)} {what}; expected as many")
        if targets.ndim > 1:
            targets = _sized(targets[:, None], source.pixels, smooth=False)[:, 0].byte()
            if targets.shape[1:] != images.shape[2:]:
                raise DataError(
                    f"{where} has images of {list(images.shape[2:])} pixels and masks of {list(targets.shape[1:])}; "
                    "expected the same size"
                )
        parts[part] = Images(images, targets)
    return DataSet(source.name, parts["train"], parts["test"], class_names, groups).wanted().alike()


def _columns(where: str, split: Any) -> Mapping[str, Any]:
    """A split as a mapping of columns."""
    if isinstance(split, Mapping):
        if unknown := [str(key) for key in split if key not in COLUMNS]:
            raise DataError(f"{where} has {unknown[0]!r}; {did_you_mean(unknown[0], COLUMNS)}")
        if absent := [key for key in COLUMNS[:2] if key not in split]:
            raise DataError(f"{where} has no {absent[0]!r}; expected images and labels")
        return split
    if isinstance(split, list | tuple) and len(split) == 2:
        return dict(zip(COLUMNS, split, strict=False))
    if not (hasattr(split, "__getitem__") and hasattr(split, "__len__")):
        raise DataError(
            f"{where} is a {type(split).__name__}; expected a pair (images, labels), a mapping of them, or a Dataset"
        )
    rows = [split[i] for i in range(len(split))]
    if not rows or not isinstance(rows[0], list | tuple) or len(rows[0]) not in (2, 3):
        what = f"items of type {type(rows[0]).__name__}" if rows else "no items"
        raise DataError(f"{where} is a {type(split).__name__} with {what}; expected pairs (image, label)")
    return dict(zip(COLUMNS, map(list, zip(*rows, strict=True)), strict=False))


# --- images ------------------------------------------------------------------


def _images(where: str, given: Any, source: Source) -> Tensor:
    """Images of one size, uint8 or float32 [N, C, H, W]."""
    parts = (
        [_tensor(where, image)[None] for image in given] if isinstance(given, list | tuple) else [_tensor(where, given)]
    )
    parts = [_pixels(where, part) for part in parts]
    if sum(part.nbytes for part in parts) > source.memory * 2**30:
        raise DataError(
            f"{where} takes more than data.memory, {source.memory:g} GiB; return a datasets.DatasetDict, whose images "
            "are decoded when needed, or raise data.memory"
        )
    shapes = {part.shape[1:] for part in parts}
    if len(shapes) > 1 and source.pixels is None:
        few = ", ".join(sorted("x".join(map(str, shape)) for shape in shapes)[:4])
        raise DataError(f"{where} has images of several shapes ({few}, ...); set data.size to resize them")
    if len(shapes) == 1 < len(parts):
        parts = [torch.cat(parts)]
    parts = [_sized(part, source.pixels) for part in parts]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _tensor(where: str, values: Any) -> Tensor:
    try:
        return values.cpu() if isinstance(values, Tensor) else torch.from_numpy(np.array(values))
    except (TypeError, ValueError) as error:
        raise DataError(f"{where} has images that are not arrays of numbers: {error}") from None


def _pixels(where: str, values: Tensor) -> Tensor:
    """Images [N, C, H, W], whose channels may come last or be missing."""
    if values.ndim == 3:
        values = values.unsqueeze(1)
    if values.ndim != 4:
        raise DataError(f"{where} has images of shape {list(values.shape)[1:]}; expected channels, height and width")
    if values.shape[1] > 4 >= values.shape[-1]:
        values = values.movedim(-1, 1)
    if values.is_floating_point():
        if not values.isfinite().all():
            raise DataError(f"{where} has pixels that are not finite; expected numbers")
        return values.float().contiguous()
    kind = str(values.dtype).removeprefix("torch.")
    if kind in ("uint16", "uint32", "uint64"):  # torch finds no minimum of these; what does not fit becomes negative
        values = values.long()
    if kind.startswith(("bool", "complex")) or (values.numel() and not 0 <= values.min() <= values.max() <= 255):
        raise DataError(f"{where} has {kind} pixels; expected whole numbers from 0 to 255, or floating-point numbers")
    return values.to(torch.uint8).contiguous()


def _sized(images: Tensor, size: Size | None, *, smooth: bool = True) -> Tensor:
    if size is None or tuple(images.shape[2:]) == size:
        return images
    how: dict[str, Any] = {"mode": "bilinear", "antialias": True} if smooth else {"mode": "nearest"}
    resized = torch.cat([interpolate(some.float(), size, **how) for some in images.split(1_024)])
    return resized if images.is_floating_point() else resized.round().clamp(0, 255).to(images.dtype)


# --- labels ------------------------------------------------------------------


def _labels(
    name: str, given: Mapping[str, Any], names: Sequence[Any] | None, classes: int | None
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """The class number of each image or pixel, and the names of the classes."""
    arrays = {part: _array(values) for part, values in given.items()}
    known = tuple(map(str, names or ()))
    if all(array.dtype.kind == "U" for array in arrays.values()):
        texts = {label for array in arrays.values() for label in array.tolist()}
        known = known or tuple(sorted(texts))
        if unknown := sorted(texts.difference(known)):
            raise DataError(f"{name} has the label {unknown[0]!r}; {did_you_mean(unknown[0], known)}")
        return {part: numbers(array.tolist(), known) for part, array in arrays.items()}, known
    for part, array in arrays.items():
        if array.dtype.kind not in "iu" or array.ndim not in (1, 3) or not array.size:
            raise DataError(
                f"{name}: {part} has labels of type {array.dtype} and shape {list(array.shape)}; expected a whole "
                "number or a name for each image, or masks [images, height, width]"
            )
    found = {part: torch.from_numpy(array.astype(np.int64)) for part, array in arrays.items()}
    values = torch.cat([part[part != IGNORED] if part.ndim == 3 else part for part in found.values()])
    known = known or tuple(map(str, range(classes or int(values.max()) + 1)))
    if not 0 <= int(values.min()) <= int(values.max()) < len(known):
        raise DataError(
            f"{name} has labels from {int(values.min())} to {int(values.max())}, but {len(known)} classes; expected 0 "
            f"to {len(known) - 1}"
        )
    return found, known


def _array(values: Any) -> np.ndarray:
    if isinstance(values, list) and values and isinstance(values[0], Tensor):
        values = torch.stack(values)
    return np.asarray(values.cpu() if isinstance(values, Tensor) else values)
