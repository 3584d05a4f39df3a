"""Data sets with columns: images, labels and groups, found by type or named in the settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import datasets
import torch

from fedbn_flwr.errors import DataError, did_you_mean

from . import IGNORED
from .catalogue import CATALOGUE, Entry
from .dataset import DataSet, Groups, numbers
from .decoding import Files, Stream
from .folders import commit_of, open_splits
from .source import PARTS, Source

Splits = Mapping[str, Any]  # "train" and "test"


def read_columns(source: Source, splits: Splits | None = None) -> DataSet:
    """The data set of `source`; that of these splits, if a callable of the user returned them."""
    name, entry = source.name, None
    if splits is None:
        splits, entry = open_splits(source, CATALOGUE.get(name))
    commit = commit_of(splits["train"])
    splits = {part: _with_images(splits[part], source.image) for part in PARTS}
    features = splits["train"].features
    image = _column(splits, source, "image", entry, datasets.Image, (source.label,))
    label = _column(splits, source, "label", entry, datasets.ClassLabel, (image, source.domain or "domain"))
    if not isinstance(features[image], datasets.Image):
        raise DataError(f"data.image={image!r} of {name!r} contains no images; its columns: {_kinds(splits['train'])}")
    masks = label if isinstance(features[label], datasets.Image) else None
    if masks is not None:
        class_names = source.class_names or _pixel_classes(source, entry)
        labels = {part: torch.zeros(len(split), dtype=torch.int64) for part, split in splits.items()}
    else:
        values = {part: _values(split, name, "label", label) for part, split in splits.items()}
        class_names = _class_names(
            source, entry, label, {part: split.features[label] for part, split in splits.items()}, values
        )
        labels = {part: numbers(list(map(str, some)), class_names) for part, some in values.items()}
    size = source.pixels or ((entry.size, entry.size) if entry and entry.size else None)
    fit = source.fit or (entry.fit if entry else "stretch")
    ids = entry.ids if entry and masks else None
    train, test = (
        Stream(Files(split, image, name, size, fit, masks, ids, len(class_names)), labels[part], readers=source.readers)
        for part, split in splits.items()
    )
    domain = source.domain or ("domain" if source.domains or "domain" in features else None)
    data = DataSet(
        name,
        train,
        test,
        class_names,
        _groups(splits, name, "domain", domain, source.domains),
        _groups(splits, name, "partition.column", source.column),
        commit,
    ).wanted()
    train, test = cast(Stream, data.train), cast(Stream, data.test)
    stream = source.stream
    if stream == "auto":
        stream = train.decoded_bytes + test.decoded_bytes > source.memory * 2**30
    if stream:
        return replace(data, train=train.tried(), test=test.tried()).alike()
    return replace(data, train=train.decoded(), test=test.decoded()).alike()


def _with_images(split: Any, image: str | None) -> Any:
    """The split, where columns of image files as bytes (with a path or without) have the type Image."""
    for column, feature in split.features.items():
        kinds = feature if isinstance(feature, dict) else {"bytes": feature}
        types = {key: getattr(kind, "dtype", None) for key, kind in kinds.items()}
        is_file = types.keys() <= {"bytes", "path"} and types.get("bytes") in ("binary", "large_binary")
        if is_file or (column == image and types.get("bytes") in ("string", "large_string")):
            split = split.cast_column(column, datasets.Image())
    return split


# --- columns -----------------------------------------------------------------


def _column(
    splits: Splits, source: Source, key: str, entry: Entry | None, kind: type, skipped: Sequence[str | None]
) -> str:
    """The column that the settings name, or the catalogue, if these data have it, or the only one of this type."""
    features = splits["train"].features
    column = getattr(source, key)
    if column is None and entry is not None and getattr(entry, key) in features:
        column = getattr(entry, key)
    if column is None:
        found = [each for each, feature in features.items() if isinstance(feature, kind) and each not in skipped]
        if len(found) != 1:
            raise DataError(
                f"{source.name!r} has {len(found) or 'no'} columns of type {kind.__name__}; name one with data.{key}. "
                f"Its columns: {_kinds(splits['train'])}"
            )
        column = found[0]
    for split in splits.values():
        _check_column(split, source.name, key, column)
    return column  # type: ignore[no-any-return]


def _check_column(split: Any, name: str, key: str, column: str) -> None:
    if column not in split.features:
        raise DataError(f"data.{key}={column!r} is not a column of {name!r}; its columns: {_kinds(split)}")


def _kinds(split: Any) -> str:
    return ", ".join(f"{key} ({type(feature).__name__})" for key, feature in split.features.items())


def _values(split: Any, name: str, key: str, column: str) -> Sequence[Any]:
    """The number or text of each row; the name, if the column has names."""
    feature = split.features[column]
    names = getattr(feature, "names", None)
    if names is None and not isinstance(feature, datasets.Value):
        raise DataError(
            f"data.{key}={column!r} of {name!r} has the type {type(feature).__name__}; expected a number or a text for "
            f"each image. Its columns: {_kinds(split)}"
        )
    values: Sequence[Any] = split[column][:]  # all at once: single rows take 0.2 ms each
    for row, value in enumerate(values):
        if value is None:
            raise DataError(f"{name!r}: row {row} has no value in {column!r}; expected one in each row")
        if names is not None and not 0 <= value < len(names):
            raise DataError(
                f"{name!r}: row {row} has {int(value)} in {column!r}; expected 0 to {len(names) - 1}, the numbers of "
                "its names"
            )
    return values if names is None else [names[value] for value in values]


def _groups(splits: Splits, name: str, key: str, column: str | None, wanted: Sequence[str] = ()) -> Groups | None:
    if column is None:
        return None
    _check_column(splits["train"], name, key, column)
    values = {part: _values(split, name, key, column) for part, split in splits.items() if column in split.features}
    return Groups.of(name, values, wanted)


# --- classes -----------------------------------------------------------------


def _pixel_classes(source: Source, entry: Entry | None) -> tuple[str, ...]:
    """The class names of a segmentation data set."""
    if entry is not None and entry.names:
        return entry.names
    if source.classes is None:
        raise DataError(
            f"{source.name!r} is a segmentation data set; give its number of classes with data.classes (pixels of a "
            f"mask are 0 to classes - 1, or {IGNORED} if they are ignored)"
        )
    return tuple(map(str, range(source.classes)))


def _class_names(
    source: Source, entry: Entry | None, column: str, features: Mapping[str, Any], values: Mapping[str, Sequence[Any]]
) -> tuple[str, ...]:
    """The class names: those of the settings, or else of both splits, as many as the catalogue lists."""
    name, given = source.name, source.class_names
    both = tuple(map(str, sorted({value for some in values.values() for value in some})))
    train, test = (tuple(getattr(feature, "names", both)) for feature in features.values())
    if given:
        if other := next((label for label in (*train, *test) if label not in given), None):
            raise DataError(
                f"{name!r} has the class {other!r}, which is not in data.class_names; {did_you_mean(other, given)}"
            )
        return given
    if train != test:
        raise DataError(
            f"data.name={name!r}: the training split has {len(train)} classes in {column!r}, the test split "
            f"{len(test)}; they must be the same, or the names of data.class_names"
        )
    if entry is None:
        return train
    if entry.keep:
        if absent := [label for label in entry.keep if label not in train]:
            raise DataError(f"data.name={name!r} ({entry.title}): the data has no class {', '.join(absent)}")
        return entry.keep
    if len(train) != entry.classes:
        raise DataError(
            f"data.name={name!r} ({entry.title}) has {entry.classes} classes, the data {len(train)} in {column!r}; "
            "choose another column with data.label, or other data by a folder or hub name"
        )
    return train
