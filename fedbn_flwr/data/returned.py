"""The data set that a callable of the user returns, by the name `module:callable` in `data.name`.

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
from .dataset import DataSet, Groups
from .folders import Splits
from .images import Images

KEY = "data.name"
PARTS = ("train", "test")
COLUMNS = ("images", "labels", "domains")


def returned(name: str, root: str | None, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the callable returns, checked to have both splits. Random draws in it are the same in every process."""
    offered = {} if root is None or "root" in options else {"root": root}
    with seeding.all_streams(seeding.seed_for(0, "own data")):
        found = named.call(KEY, name, **named.accepted(named.load(KEY, name), offered), **options)
        if not isinstance(found, Mapping) or not all(part in found for part in PARTS):
            keys = f" with {', '.join(map(repr, found))}" if isinstance(found, Mapping) else ""
            raise DataError(
                f"{KEY}={name!r} returned a {type(found).__name__}{keys}; expected a mapping with 'train' and 'test', "
                "such as a datasets.DatasetDict"
            )
        if splits_in(found) is not None:
            return found
        return {**found, **{part: _columns(f"{KEY}={name!r}: {part}", found[part]) for part in PARTS}}


def splits_in(found: Mapping[str, Any]) -> Splits | None:
    """Training and test split, if they are splits of `datasets`."""
    parts = {part: found[part] for part in PARTS}
    return parts if all(hasattr(split, "features") and hasattr(split, "select") for split in parts.values()) else None


def in_memory(
    name: str,
    found: Mapping[str, Any],
    *,
    size: Size | None,
    classes: int | None,
    domains: Sequence[str],
    memory: float,
) -> DataSet:
    """The data set of arrays; `size` resizes the images, `domains` selects among theirs."""
    labels, class_names = _labels(name, {part: found[part]["labels"] for part in PARTS}, found.get("classes"), classes)
    groups = _groups(name, {part: found[part].get("domains") for part in PARTS}, domains)
    splits, kept = {}, {}
    for part in PARTS:
        where = f"{KEY}={name!r}: {part}"
        of = None if groups is None else groups.train if part == "train" else groups.test
        splits[part], kept[part] = _split(where, found[part]["images"], labels[part], of, size, memory)
    if splits["train"].shape != splits["test"].shape:
        shown = " and ".join(str(list(splits[part].shape)) for part in PARTS)
        raise DataError(f"{KEY}={name!r}: training and test images are {shown}; expected one shape (data.size resizes)")
    if splits["train"].dense != splits["test"].dense:
        raise DataError(f"{KEY}={name!r}: only one of training and test data has masks; expected both or none")
    if groups is not None:
        test = None if groups.test is None else groups.test[kept["test"]]
        groups = Groups(groups.column, groups.names, groups.train[kept["train"]], test)
    return DataSet(name, splits["train"], splits["test"], class_names, groups)


def _split(
    where: str, given: Any, labels: Tensor, domains: Tensor | None, size: Size | None, memory: float
) -> tuple[Images, Tensor]:
    """The images of a split that belong to a wanted domain, and whether each of all its images does."""
    images = _sized(where, _images(where, given, memory), size)
    for what, values in (("labels", labels), ("domains", domains)):
        if values is not None and len(values) != len(images):
            raise DataError(f"{where} has {len(images)} images and {len(values)} {what}; expected as many")
    rows = torch.ones(len(images), dtype=torch.bool) if domains is None else domains >= 0
    if not rows.any():
        raise DataError(f"{where} has no images" + ("" if domains is None else " of the domains in data.domains"))
    if labels.ndim == 1:
        return Images(images[rows], labels[rows]), rows
    masks = _sized(where, labels[:, None], size, smooth=False)[:, 0]
    if masks.shape[1:] != images.shape[2:]:
        raise DataError(
            f"{where} has images of {list(images.shape[2:])} pixels and masks of {list(masks.shape[1:])}; expected the "
            "same size"
        )
    return Images(images[rows], torch.zeros(int(rows.sum()), dtype=torch.int64), masks[rows].byte()), rows


def _columns(where: str, split: Any) -> dict[str, Any]:
    """A split as a mapping of columns."""
    if isinstance(split, Mapping):
        if unknown := [str(key) for key in split if key not in COLUMNS]:
            raise DataError(f"{where} has {unknown[0]!r}; {did_you_mean(unknown[0], COLUMNS)}")
        columns = dict(split)
    elif isinstance(split, list | tuple) and len(split) == 2:
        columns = dict(zip(COLUMNS, split, strict=False))
    elif hasattr(split, "__getitem__") and hasattr(split, "__len__"):
        rows = [split[i] for i in range(len(split))]
        if not rows or not isinstance(rows[0], list | tuple) or len(rows[0]) not in (2, 3):
            what = f"items of type {type(rows[0]).__name__}" if rows else "no items"
            raise DataError(f"{where} is a {type(split).__name__} with {what}; expected pairs (image, label)")
        columns = dict(zip(COLUMNS, map(list, zip(*rows, strict=True)), strict=False))
    else:
        raise DataError(
            f"{where} is a {type(split).__name__}; expected a pair (images, labels), a mapping of them, or a Dataset"
        )
    if absent := [key for key in ("images", "labels") if key not in columns]:
        raise DataError(f"{where} has no {absent[0]!r}; expected images and labels")
    return columns


# --- images ------------------------------------------------------------------


def _images(where: str, given: Any, memory: float) -> Tensor | list[Tensor]:
    """Images as one tensor [N, C, H, W], or as a list of tensors [C, H, W] of several sizes; uint8 or float32."""
    if isinstance(given, list | tuple):
        each = [_pixels(where, _tensor(where, image), 3) for image in given]
        one = torch.stack(each) if len({image.shape for image in each}) == 1 else None
    else:
        each = [one := _pixels(where, _tensor(where, given), 4)]
    if sum(image.numel() * image.element_size() for image in each) > memory * 2**30:
        raise DataError(
            f"{where} takes more than data.memory, {memory:g} GiB; return a datasets.DatasetDict, whose images are "
            "decoded when needed, or raise data.memory"
        )
    return each if one is None else one


def _tensor(where: str, values: Any) -> Tensor:
    try:
        return values.cpu() if isinstance(values, Tensor) else torch.from_numpy(np.array(values))
    except (TypeError, ValueError) as error:
        raise DataError(f"{where} has images that are not arrays of numbers: {error}") from None


def _pixels(where: str, values: Tensor, dimensions: int) -> Tensor:
    """One image [C, H, W] or several [N, C, H, W]: the channels may come last or be missing."""
    first = dimensions - 3
    if values.ndim == dimensions - 1:
        values = values.unsqueeze(first)
    if values.ndim != dimensions:
        raise DataError(
            f"{where} has images of shape {list(values.shape)[first:]}; expected channels, height and width"
        )
    if values.shape[first] > 4 >= values.shape[-1]:
        values = values.movedim(-1, first)
    if values.is_floating_point():
        if not values.isfinite().all():
            raise DataError(f"{where} has pixels that are not finite; expected numbers")
        return values.float().contiguous()
    kind = str(values.dtype).removeprefix("torch.")
    if kind in ("uint16", "uint32", "uint64"):  # torch finds no minimum of these; what does not fit becomes negative
        values = values.long()
    if kind.startswith(("bool", "complex")) or (
        values.numel() and not 0 <= int(values.min()) <= int(values.max()) <= 255
    ):
        raise DataError(f"{where} has {kind} pixels; expected whole numbers from 0 to 255, or floating-point numbers")
    return values.to(torch.uint8).contiguous()


def _sized(where: str, images: Tensor | list[Tensor], size: Size | None, *, smooth: bool = True) -> Tensor:
    if isinstance(images, list):
        if size is None:
            few = ", ".join(sorted({"x".join(map(str, image.shape)) for image in images})[:4])
            raise DataError(f"{where} has images of several shapes ({few}, ...); set data.size to resize them")
        return torch.cat([_sized(where, image[None], size) for image in images])
    if size is None or tuple(images.shape[2:]) == size:
        return images
    how: dict[str, Any] = {"mode": "bilinear", "antialias": True} if smooth else {"mode": "nearest"}
    resized = torch.cat([interpolate(some.float(), size, **how) for some in images.split(1_024)])
    return resized if images.is_floating_point() else resized.round().clamp(0, 255).to(images.dtype)


# --- labels and domains ------------------------------------------------------


def _labels(
    name: str, given: Mapping[str, Any], names: Sequence[Any] | None, classes: int | None
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """The class number of each image or pixel, and the names of the classes."""
    arrays = {part: _array(values) for part, values in given.items()}
    known = None if names is None else tuple(map(str, names))
    if all(array.dtype.kind == "U" for array in arrays.values()):
        texts = {part: array.tolist() for part, array in arrays.items()}
        known = known or tuple(sorted({label for labels in texts.values() for label in labels}))
        number = {label: i for i, label in enumerate(known)}
        if unknown := sorted({label for labels in texts.values() for label in labels} - number.keys()):
            raise DataError(f"{KEY}={name!r} has the label {unknown[0]!r}; {did_you_mean(unknown[0], number)}")
        return {part: torch.tensor([number[label] for label in labels]) for part, labels in texts.items()}, known
    numbers, found = {}, []
    for part, array in arrays.items():
        if array.dtype.kind not in "iu" or array.ndim not in (1, 3) or not array.size:
            raise DataError(
                f"{KEY}={name!r}: {part} has labels of type {array.dtype} and shape {list(array.shape)}; expected a "
                "whole number or a name for each image, or masks [images, height, width]"
            )
        numbers[part] = torch.from_numpy(array.astype(np.int64))
        found.append(numbers[part][numbers[part] != IGNORED] if array.ndim == 3 else numbers[part])
    values = torch.cat([part.reshape(-1) for part in found])
    known = known or tuple(str(number) for number in range(classes or int(values.max()) + 1))
    if not 0 <= int(values.min()) <= int(values.max()) < len(known):
        raise DataError(
            f"{KEY}={name!r} has labels from {int(values.min())} to {int(values.max())}, but {len(known)} classes; "
            f"expected 0 to {len(known) - 1}"
        )
    return numbers, known


def _array(values: Any) -> np.ndarray:
    if isinstance(values, list) and values and isinstance(values[0], Tensor):
        values = torch.stack(values)
    return np.asarray(values.cpu() if isinstance(values, Tensor) else values)


def _groups(name: str, given: Mapping[str, Any], wanted: Sequence[str]) -> Groups | None:
    """The domain of each image; -1 where it is not wanted."""
    if given["train"] is None:
        if wanted:
            raise DataError(f"data.domains is {list(wanted)}, but {KEY}={name!r} returned no 'domains'")
        return None
    values = {part: [str(value) for value in domains] for part, domains in given.items() if domains is not None}
    known = sorted({value for some in values.values() for value in some})
    for domain in wanted:
        if domain not in known:
            raise DataError(f"data.domains: {domain!r} is not a domain of {name!r}; {did_you_mean(domain, known)}")
    names = tuple(wanted) or tuple(known)
    number = {value: i for i, value in enumerate(names)}
    found = {part: torch.tensor([number.get(value, -1) for value in some]) for part, some in values.items()}
    return Groups("domains", names, found["train"], found.get("test"))
