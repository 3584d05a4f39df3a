"""Data sets with columns: inputs, labels and groups, found by type or named in the settings.

A split is one of `datasets` (tables and images), or a mapping of arrays by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fedbn_flwr.batch import Value, tensors
from fedbn_flwr.errors import DataError
from fedbn_flwr.tasks import CLASSIFICATION, SEGMENTATION, Task

from . import IGNORED
from .catalogue import Entry
from .dataset import DataSet, Groups
from .examples import InMemory, main
from .inputs import Rows, as_rows, inputs_of, resized
from .source import Source, names_of
from .targets import several, targets_of

if TYPE_CHECKING:
    from .decoding import Stream

Splits = Mapping[str, Any]  # "train", and "test" unless a share of "train" is held out
ARRAYS = {"inputs": "inputs", "label": "labels", "domain": "domains", "group": "groups"}  # their usual names
PICTURES = {".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"}
_NUMBERS = ("int", "uint", "float", "double", "bool", "decimal")
_SHOWN = 40  # columns in an error


@dataclass(frozen=True)
class Columns:
    """The names of the columns that are used."""

    inputs: tuple[str, ...]
    label: tuple[str, ...]
    domain: str | None
    group: str | None


def read(source: Source, splits: Splits, entry: Entry | None = None, known: Sequence[Any] = ()) -> DataSet:
    """The data set of these splits; `known` are the names of its classes, if the data have them elsewhere."""
    if source.held_out:
        splits = {"train": splits["train"]}
    is_table = not isinstance(splits["train"], Mapping)
    if is_table:
        splits = {part: _with_images(split, names_of(source.inputs)) for part, split in splits.items()}
    used = _chosen(source, splits, entry, is_table=is_table)
    known = _known(source, entry, splits, used.label, tuple(map(str, known)))
    groups = {
        key: _groups(source, splits, key, column, source.domains if key == "domain" else ())
        for key, column in (("domain", used.domain), ("group", used.group))
    }
    examples: Mapping[str, InMemory | Stream]
    if is_table and _kind(splits, used.inputs[0]) == "Image":
        features: tuple[str, ...] = ()
        examples, names, task = _images(source, splits, entry, used, known)
    else:
        examples, names, task, features = _in_memory(source, splits, used, known, is_table=is_table)
    if entry is not None and not source.class_names and task is CLASSIFICATION and len(names) != entry.classes:
        raise DataError(
            f"data.name={source.name!r} ({entry.title}) has {entry.classes} classes, the data {len(names)} in "
            f"{used.label[0]!r}; choose another column with data.label, or other data by a folder or hub name"
        )
    for part, split in examples.items():
        for what, group in groups.items():
            values = None if group is None else getattr(group, part)
            if values is not None and len(values) != len(split):
                raise DataError(
                    f"{source.name!r}: {part} has {len(split)} examples and {len(values)} {what}s; expected as many"
                )
    commit = commit_of(splits["train"]) if is_table else None
    data = DataSet(
        source.name,
        examples["train"],
        examples.get("test", examples["train"]),
        names,
        groups["domain"],
        groups["group"],
        commit,
        task,
        features,
        tuple(splits["train"].features if is_table else splits["train"]),
        source.tokens,
    ).wanted()
    if source.held_out:
        data = data.held_out(source.held_out)
    return _decoded(source, data).alike()


def commit_of(split: Any) -> str | None:
    """The commit of the hub's repository that a split is from; None for files of this machine."""
    for url in getattr(split.info, "download_checksums", None) or ():
        if found := re.search(r"@([0-9a-f]{40})/", url):
            return found[1]
    return None


# --- columns -----------------------------------------------------------------


def _with_images(split: Any, inputs: Sequence[str]) -> Any:
    """The split, where columns of image files as bytes (with a path or without) have the type Image."""
    import datasets

    for column, feature in split.features.items():
        kinds = feature if isinstance(feature, dict) else {"bytes": feature}
        types = {key: getattr(kind, "dtype", None) for key, kind in kinds.items()}
        is_file = types.keys() <= {"bytes", "path"} and types.get("bytes") in ("binary", "large_binary")
        is_path = len(inputs) == 1 and column in inputs and types.get("bytes") in ("string", "large_string")
        if is_file or (is_path and _is_picture(split, column)):
            split = split.cast_column(column, datasets.Image())
    return split


def _is_picture(split: Any, column: str) -> bool:
    return len(split) > 0 and str(split[0][column]).lower().endswith(tuple(PICTURES))


def _kind(splits: Splits, column: str) -> str:
    """The type of a column in words; of an array "array"."""
    if isinstance(splits["train"], Mapping):
        return "array"
    feature = splits["train"].features[column]
    name = type(feature).__name__
    return str(feature.dtype) if name == "Value" else name


def _kinds(splits: Splits) -> str:
    names = _names(splits)
    shown = ", ".join(f"{column} ({_kind(splits, column)})" for column in names[:_SHOWN])
    return shown + (f", ... ({len(names)} columns)" if len(names) > _SHOWN else "")


def _names(splits: Splits) -> Sequence[str]:
    train = splits["train"]
    return list(train if isinstance(train, Mapping) else train.features)


def _chosen(source: Source, splits: Splits, entry: Entry | None, *, is_table: bool) -> Columns:
    names = _names(splits)

    def usual(key: str) -> str | None:
        """The name of a column that is not set: that of the catalogue, or of arrays."""
        listed = getattr(entry, "image" if key == "inputs" else key, None) if is_table else ARRAYS[key]
        return listed if listed in names else None

    domain = source.domain or usual("domain") or ("domain" if is_table and "domain" in names else None)
    group = source.group or (None if is_table else usual("group"))
    label = names_of(source.label) or names_of(usual("label"))
    if not label:
        label = _only(source, splits, "label", "ClassLabel", (*names_of(source.inputs), domain or "domain"))
    inputs = names_of(source.inputs) or names_of(usual("inputs"))
    if not inputs and is_table and not any(_kind(splits, name) == "Image" for name in names if name not in label):
        inputs = tuple(
            name for name in names if name not in (*label, domain, group) and _is_number(source, splits, name)
        )
    if not inputs:
        inputs = _only(source, splits, "inputs", "Image", label)
    if source.domains and domain is None:
        domain = "domain" if is_table else ARRAYS["domain"]
    used = [("inputs", column) for column in inputs] + [("label", column) for column in label]
    for key, column in (*used, ("domain", domain), ("group", group)):
        if column is not None and column not in names:
            raise DataError(f"data.{key}={column!r} is not a column of {source.name!r}; its columns: {_kinds(splits)}")
    for part, split in splits.items():
        if absent := [column for _, column in used if column not in (split if not is_table else split.features)]:
            raise DataError(f"{source.name!r}: {part} has no column {', '.join(absent)}; expected those of train")
    if twice := [column for column in inputs if column in label]:
        raise DataError(f"{twice[0]!r} is in data.inputs and data.label; expected it in one")
    return Columns(inputs, label, domain, group)


def _only(source: Source, splits: Splits, key: str, kind: str, skipped: Sequence[str | None]) -> tuple[str, ...]:
    """The only column of this type."""
    found = [name for name in _names(splits) if _kind(splits, name) == kind and name not in skipped]
    if len(found) != 1:
        what = f"columns of type {kind}" if _kind(splits, _names(splits)[0]) != "array" else f"arrays {ARRAYS[key]!r}"
        raise DataError(
            f"{source.name!r} has {len(found) or 'no'} {what}; name one with data.{key}. Its columns: {_kinds(splits)}"
        )
    return tuple(found)


def _is_number(source: Source, splits: Splits, column: str) -> bool:
    """Whether a column may be an input: numbers, and texts whose values are given."""
    return column in source.categories or _kind(splits, column).startswith(_NUMBERS)


def _rows(source: Source, split: Any, key: str, column: str) -> Rows:
    """The values of a column; names in place of the numbers of a column with names."""
    if isinstance(split, Mapping):
        return as_rows(f"{source.name!r}: {column!r}", split[column])
    import pyarrow as pa

    feature = split.features[column]
    names = getattr(feature, "names", None)
    if names is None and type(feature).__name__ != "Value":
        if key not in ("inputs", "label"):
            raise DataError(
                f"data.{key}={column!r} of {source.name!r} has the type {type(feature).__name__}; expected a number or "
                "a text for each example"
            )
        return as_rows(f"{source.name!r}: {column!r}", split.with_format("numpy")[column][:])
    values = split.select_columns([column]).with_format("arrow")[:].column(0)
    is_special = pa.types.is_decimal(values.type) or (pa.types.is_boolean(values.type) and values.null_count)
    rows = (values.cast(pa.float64()) if is_special else values).to_numpy()
    if names is None or values.null_count:
        return rows
    if (wrong := np.flatnonzero((rows < 0) | (rows >= len(names)))).size:
        raise DataError(
            f"{source.name!r}: row {wrong[0]} has {int(rows[wrong[0]])} in {column!r}; expected 0 to {len(names) - 1}, "
            "the numbers of its names"
        )
    return np.array(names)[rows]


def _groups(source: Source, splits: Splits, key: str, column: str | None, wanted: Sequence[str]) -> Groups | None:
    if column is None:
        return None
    values = {}
    for part, split in splits.items():
        if column in (split if isinstance(split, Mapping) else split.features):
            values[part] = _rows(source, split, key, column).tolist()
            if absent := sum(value is None or value != value for value in values[part]):
                raise DataError(
                    f"{source.name!r}: {absent} of {len(values[part])} rows of {part} have no value in {column!r}; "
                    "expected one in each row"
                )
    if "test" not in splits:
        values["test"] = values["train"]
    return Groups.of(source.name, values, wanted)


# --- classes -----------------------------------------------------------------


def _known(
    source: Source, entry: Entry | None, splits: Splits, label: Sequence[str], given: tuple[str, ...]
) -> tuple[str, ...]:
    """The names of the classes, if the settings, the data or the catalogue have them."""
    if given or source.class_names or isinstance(splits["train"], Mapping):
        return given or source.class_names
    found = [tuple(getattr(split.features[label[0]], "names", ())) for split in splits.values()]
    if len(set(found)) > 1:
        raise DataError(
            f"data.name={source.name!r}: the training split has {len(found[0])} classes in {label[0]!r}, the test "
            f"split {len(found[1])}; they must be the same, or the names of data.class_names"
        )
    if entry is None or not entry.keep:
        return found[0]
    there = found[0] or tuple(map(str, _rows(source, splits["train"], "label", label[0]).tolist()))
    if absent := [name for name in entry.keep if name not in there]:
        raise DataError(f"data.name={source.name!r} ({entry.title}): the data has no class {', '.join(absent)}")
    return entry.keep


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


# --- examples ----------------------------------------------------------------


def _in_memory(
    source: Source, splits: Splits, used: Columns, known: tuple[str, ...], *, is_table: bool
) -> tuple[Mapping[str, InMemory], tuple[str, ...], Task, tuple[str, ...]]:
    """The examples of tables and arrays, the names of classes, the task, and the names of the features."""
    if any(_kind(splits, column) == "Image" for column in used.inputs):
        raise DataError(f"data.inputs is {list(used.inputs)}; expected one column of images, or columns without images")
    inputs = {part: _given(split, used.inputs) for part, split in splits.items()}
    columns = {
        key: {part: _rows(source, inputs[part] or split, "inputs", key) for part, split in splits.items()}
        for key in inputs["train"] or used.inputs
    }
    values, features = inputs_of(source, columns, is_table=is_table)
    if any(labels := {part: _given(split, used.label) for part, split in splits.items()}.values()):
        read_ = {
            part: {key: as_rows(source.name, rows) for key, rows in some.items()}
            for part, some in zip(splits, labels, strict=True)
        }
        targets, names, task = several(source, read_)
    else:
        rows = {key: {part: _rows(source, split, "label", key) for part, split in splits.items()} for key in used.label}
        targets, names, task = targets_of(source, rows, known, numbered=not is_table)
    found = {}
    for part, some in values.items():
        made = InMemory(some, _sized(source, task, targets[part]))
        _check_lengths(f"{source.name!r}: {part}", made, task)
        found[part] = made
    if sum(made.nbytes for made in found.values()) > source.memory * 2**30:
        raise DataError(
            f"{source.name!r} takes more than data.memory, {source.memory:g} GiB; raise data.memory (images that are "
            "a column of image files, for instance of a datasets.DatasetDict, are decoded when needed)"
        )
    return found, names, task, features


def _given(split: Any, columns: Sequence[str]) -> Any:
    """The arrays of a split whose only value is a mapping of arrays."""
    if isinstance(split, Mapping) and len(columns) == 1 and isinstance(split[columns[0]], Mapping):
        return split[columns[0]]
    return None


def _sized(source: Source, task: Task, targets: Value) -> Value:
    if task is SEGMENTATION and isinstance(targets, Tensor) and targets.ndim == 3:
        return resized(targets[:, None], source.pixels, smooth=False)[:, 0].byte()
    return targets


def _check_lengths(where: str, made: InMemory, task: Task) -> None:
    for part in (*tensors(made.inputs), *tensors(made.targets)):
        if len(part) != len(made):
            raise DataError(f"{where} has {len(made)} examples and {len(part)} labels or masks; expected as many")
    shape = main(made.inputs).shape
    if task is SEGMENTATION and isinstance(made.targets, Tensor) and made.targets.shape[1:] != shape[2:]:
        raise DataError(
            f"{where} has inputs of size {list(shape[2:])} and masks of {list(made.targets.shape[1:])}; expected the "
            "same size"
        )


def _images(
    source: Source, splits: Splits, entry: Entry | None, used: Columns, known: tuple[str, ...]
) -> tuple[Mapping[str, Stream], tuple[str, ...], Task]:
    """Images that are decoded later, the names of classes, and the task."""
    from .decoding import Files, Stream

    (image,), label = used.inputs, used.label
    masks = label[0] if _kind(splits, label[0]) == "Image" else None
    targets: dict[str, Any]
    if masks is not None:
        names, task = _pixel_classes(source, entry), SEGMENTATION
        targets = {part: torch.zeros(len(split), dtype=torch.int64) for part, split in splits.items()}
    else:
        rows = {key: {part: _rows(source, split, "label", key) for part, split in splits.items()} for key in label}
        found, names, task = targets_of(source, rows, known, numbered=False)
        targets = dict(found)
        if task is SEGMENTATION:
            raise DataError(
                f"data.label={label[0]!r} of {source.name!r} has the type {_kind(splits, label[0])}; expected a number "
                "or a text for each image, or a column of masks. Its columns: " + _kinds(splits)
            )
    size = source.pixels or ((entry.size, entry.size) if entry and entry.size else None)
    fit = source.fit or (entry.fit if entry else "stretch")
    ids = entry.ids if entry and masks else None
    return (
        {
            part: Stream(
                Files(split, image, source.name, size, fit, masks, ids, len(names)),
                targets[part],
                readers=source.readers,
            )
            for part, split in splits.items()
        },
        names,
        task,
    )


def _decoded(source: Source, data: DataSet) -> DataSet:
    """With its images in memory, or tried if they stay on the disk."""
    train, test = data.train, data.test
    if isinstance(train, InMemory) or isinstance(test, InMemory):
        return data
    stream = source.stream
    if stream == "auto":
        stream = train.decoded_bytes + test.decoded_bytes > source.memory * 2**30
    if stream:
        return replace(data, train=train.tried(), test=test.tried())
    return replace(data, train=train.decoded(), test=test.decoded())
