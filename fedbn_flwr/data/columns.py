"""The columns of a split: images, labels and groups, found by type or named in the settings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fedbn_flwr.errors import DataError, did_you_mean

from . import IGNORED
from .catalogue import Entry
from .dataset import Groups
from .folders import Splits


def _kinds(split: Any) -> str:
    return ", ".join(f"{key} ({type(feature).__name__})" for key, feature in split.features.items())


def image_and_label(split: Any, name: str, image: str | None, label: str | None, domain: str) -> tuple[str, str]:
    import datasets

    features, kinds = split.features, _kinds(split)
    chosen = []
    for key, given, wanted in (("image", image, datasets.Image), ("label", label, datasets.ClassLabel)):
        if given is not None and given not in features:
            raise DataError(f"data.{key}={given!r} is not a column of {name!r}; its columns: {kinds}")
        candidates = [c for c, feature in features.items() if isinstance(feature, wanted) and c != domain]
        if key == "image":  # masks are images too
            candidates = [c for c in candidates if c != label]
        if given is None and len(candidates) != 1:
            raise DataError(
                f"{name!r} has {len(candidates) or 'no'} columns of type {wanted.__name__}; name one with data.{key}. "
                f"Its columns: {kinds}"
            )
        chosen.append(given if given is not None else candidates[0])
    if not isinstance(features[chosen[0]], datasets.Image):
        raise DataError(f"data.image={chosen[0]!r} of {name!r} contains no images; its columns: {kinds}")
    return chosen[0], chosen[1]


def with_images(split: Any, image: str | None) -> Any:
    """The split, where columns of image files as bytes (with a path or without) have the type Image."""
    import datasets

    for column, feature in split.features.items():
        kinds = feature if isinstance(feature, dict) else {"bytes": feature}
        types = {key: getattr(kind, "dtype", None) for key, kind in kinds.items()}
        is_file = types.keys() <= {"bytes", "path"} and types.get("bytes") in ("binary", "large_binary")
        if is_file or (column == image and types.get("bytes") in ("string", "large_string")):
            split = split.cast_column(column, datasets.Image())
    return split


def is_image(split: Any, column: str) -> bool:
    import datasets

    return isinstance(split.features[column], datasets.Image)


def pixel_classes(name: str, entry: Entry | None, classes: int | None) -> tuple[str, ...]:
    """The class names of a segmentation data set."""
    if entry is not None and entry.names:
        return entry.names
    if classes is None:
        raise DataError(
            f"{name!r} is a segmentation data set; give its number of classes with data.classes (pixels of a mask are "
            f"0 to classes - 1, or {IGNORED} if they are ignored)"
        )
    return tuple(str(number) for number in range(classes))


def check_classes(
    splits: Splits, columns: dict[str, tuple[str, str]], name: str, entry: Entry | None, given: tuple[str, ...] = ()
) -> tuple[str, ...]:
    """The class names: those that are `given`, or else of both splits, as many as the catalogue lists."""
    names = {part: _class_names(split, name, columns[part][1]) for part, split in splits.items()}
    if given:
        if other := next((label for some in names.values() for label in some if label not in given), None):
            raise DataError(
                f"{name!r} has the class {other!r}, which is not in data.class_names; {did_you_mean(other, given)}"
            )
        return given
    typed = [split.features[columns[part][1]] for part, split in splits.items()]
    if not any(hasattr(feature, "names") for feature in typed) and typed[0] == typed[1]:
        values = {value for part, split in splits.items() for value in split.unique(columns[part][1])}
        names = dict.fromkeys(names, tuple(str(value) for value in sorted(values)))
    if names["train"] != names["test"]:
        raise DataError(
            f"data.name={name!r}: the training split has {len(names['train'])} classes in {columns['train'][1]!r}, "
            f"the test split {len(names['test'])}; they must be the same, or the names of data.class_names"
        )
    found = names["train"]
    if entry is None:
        return found
    if entry.keep:
        if absent := [label for label in entry.keep if label not in found]:
            raise DataError(f"data.name={name!r} ({entry.title}): the data has no class {', '.join(absent)}")
        return entry.keep
    if len(found) != entry.classes:
        raise DataError(
            f"data.name={name!r} ({entry.title}) has {entry.classes} classes, the data {len(found)} in "
            f"{columns['train'][1]!r}; choose another column with data.label, or other data by a folder or hub name"
        )
    return found


def _class_names(split: Any, name: str, column: str) -> tuple[str, ...]:
    import datasets

    feature = split.features[column]
    if hasattr(feature, "names"):
        return tuple(feature.names)
    if not isinstance(feature, datasets.Value):
        raise DataError(
            f"data.label={column!r} of {name!r} has the type {type(feature).__name__}; expected a number or a text for "
            f"each image. Its columns: {_kinds(split)}"
        )
    found = split.unique(column)
    if None in found:
        _all_values(split, name, column)  # names the row
    return tuple(str(value) for value in sorted(found))


def _all_values(split: Any, name: str, column: str) -> Sequence[Any]:
    """The values of a column; DataError if one is missing."""
    values: Sequence[Any] = split[column][:]  # all at once: single rows take 0.2 ms each
    for row, value in enumerate(values):
        if value is None:
            raise DataError(f"{name!r}: row {row} has no value in {column!r}; expected one in each row")
    return values


def labels_of(split: Any, name: str, column: str, class_names: tuple[str, ...]) -> Tensor:
    """The class number of each row; -1 for a class that is not in `class_names`."""
    values = _all_values(split, name, column)
    own = _class_names(split, name, column)
    if hasattr(split.features[column], "names"):
        labels = torch.tensor([int(value) for value in values], dtype=torch.int64)
        if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < len(own):
            raise DataError(
                f"{name!r} has labels from {int(labels.min())} to {int(labels.max())} in {column!r}, "
                f"but names {len(own)} classes"
            )
    else:
        order = {value: i for i, value in enumerate(own)}
        labels = torch.tensor([order[str(value)] for value in values], dtype=torch.int64)
    if own == class_names:
        return labels
    number = {label: i for i, label in enumerate(class_names)}
    return torch.tensor([number.get(label, -1) for label in own])[labels]


def domain_column(split: Any, name: str, domain: str | None, domains: Sequence[str]) -> str | None:
    if domain is not None:
        if domain not in split.features:
            raise DataError(f"data.domain={domain!r} is not a column of {name!r}; its columns: {_kinds(split)}")
        return domain
    if "domain" in split.features:
        return "domain"
    if domains:
        raise DataError(
            f"data.domains is {list(domains)}, but {name!r} has no column 'domain'; name one with data.domain. "
            f"Its columns: {_kinds(split)}"
        )
    return None


def _values(split: Any, name: str, column: str) -> list[str]:
    feature = split.features[column]
    values = _all_values(split, name, column)
    if not hasattr(feature, "names"):
        return [str(value) for value in values]
    for row, value in enumerate(values):
        if not 0 <= value < len(feature.names):
            raise DataError(
                f"{name!r}: row {row} has {int(value)} in {column!r}; expected 0 to {len(feature.names) - 1}, the "
                "numbers of its names"
            )
    return [feature.names[value] for value in values]


def rows_of_domains(splits: Splits, name: str, column: str, domains: Sequence[str]) -> dict[str, Tensor]:
    values = {part: _values(split, name, column) for part, split in splits.items() if column in split.features}
    known = {value for some in values.values() for value in some}
    for domain in domains:
        if domain not in known:
            raise DataError(f"data.domains: {domain!r} is not a domain of {name!r}; {did_you_mean(domain, known)}")
    return {part: torch.tensor([value in domains for value in some]) for part, some in values.items()}


def groups_of(splits: Splits, name: str, column: str, order: Sequence[str]) -> Groups:
    if column not in splits["train"].features:
        raise DataError(
            f"data.partition.column={column!r} is not a column of {name!r}; its columns: {_kinds(splits['train'])}"
        )
    values = {part: _values(split, name, column) for part, split in splits.items() if column in split.features}
    names = tuple(order) or tuple(sorted({value for some in values.values() for value in some}))
    number = {value: i for i, value in enumerate(names)}
    found = {part: torch.tensor([number[value] for value in some]) for part, some in values.items()}
    return Groups(column, names, found["train"], found.get("test"))
