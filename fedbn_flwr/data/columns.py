"""Data sets with columns: inputs, labels and groups, found by type or named in the settings.

A split is one of `datasets` (tables and images), or a mapping of arrays by name.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbn_flwr.batch import tensors
from fedbn_flwr.errors import DataError
from fedbn_flwr.tasks import CLASSIFICATION, SEGMENTATION

from . import IGNORED
from .catalogue import Entry
from .dataset import DataSet, Groups, fewer
from .examples import MASK, Examples, main_input
from .series import Long
from .source import Source
from .values import BySplit, Targets, as_rows, check_texts, inputs_of, targets_of

Rows = Any  # a split: a `datasets.Dataset`, or a mapping of arrays
Splits = Mapping[str, Rows]  # "train", and "test" unless a share of "train" is held out
ARRAYS = {"inputs": "inputs", "label": "labels", "domain": "domains", "group": "groups"}  # their usual names
PICTURES = {".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"}
_NUMBERS = ("int", "uint", "float", "double", "bool", "decimal")
_INDEX = re.compile(r"(__index_level_\d+__|Unnamed: \d+)?")  # pandas writes it as a column, in CSV without a name
_SHOWN = 40  # columns in an error


Names = tuple[str, ...]


@dataclass(frozen=True)
class Column:
    """A column of a split."""

    kind: str  # its type in `datasets`, or "array"
    read: Callable[[], Any]  # the values of all examples
    names: Names = ()  # of the classes that its numbers stand for


Columns = Mapping[str, Mapping[str, Column]]  # by split and name


def read(source: Source, splits: Splits, entry: Entry | None = None, known: Sequence[object] = ()) -> DataSet:
    """The data set of these splits; `known` are the names of its classes, if the data have them elsewhere."""
    if source.held_out:
        splits = {"train": splits["train"]}
    is_table = not isinstance(splits["train"], Mapping)
    columns: Columns = {part: _columns(source, split) for part, split in splits.items()}
    inputs, label, domain, group = _chosen(source, columns, entry, is_table=is_table)
    apart = _held_out_by(source)
    keys: dict[str, Sequence[str | None]] = {key: (column,) for key, column in apart.items()}
    keys |= {"label": label, "domain": (domain,), "group": (group,), "series": (source.series,), "time": (source.time,)}
    uses = _uses(source, columns["train"], inputs, keys)
    if source.series is not None:
        columns, inputs = _of_series(source, columns, inputs, [*label, *filter(None, (domain, group)), *apart.values()])
    classes = _known(source, entry, columns, label, tuple(map(str, known)))
    domains = _groups(source, columns, "domain", domain, source.domains)
    groups = _groups(source, columns, "group", group, ())
    held_out_by = next((_groups(source, columns, key, column, ()) for key, column in apart.items()), None)
    image, mask = _files(columns["train"], inputs, label[0])
    # Files are decoded when it is clear which are used: until then inputs are the numbers of rows, and masks zeros.
    numbers = {part: torch.arange(len(split)) for part, split in splits.items()}
    targets: Targets = {part: torch.zeros_like(values) for part, values in numbers.items()}
    names, task = classes, SEGMENTATION
    if mask is None:
        targets, names, task = targets_of(source, _values(columns, label), classes, numbered=not is_table)
    if task is SEGMENTATION and (image is None) != (mask is None):
        raise DataError(
            f"data.label={label[0]!r} of {source.name!r} has the type {columns['train'][label[0]].kind}; expected a "
            f"number or a text for each example, or images and a column of masks. Its columns: {_in_words(columns)}"
        )
    values, features = (numbers, ()) if image else inputs_of(source, _values(columns, inputs))
    examples = {part: Examples(some, targets[part]) for part, some in values.items()}
    for part, split in examples.items():
        of_groups = [getattr(grouping, part) for grouping in (domains, groups) if grouping is not None]
        _check_sizes(f"{source.name!r}: {part}", split, of_groups, dense=task is SEGMENTATION and image is None)
    data = DataSet(
        source.name,
        examples["train"],
        examples.get("test", examples["train"]),
        names,
        domains,
        groups,
        held_out_by,
        commit_of(splits["train"]) if is_table else None,
        task,
        features,
        uses,
        source.tokens,
    )
    _check_entry(source, entry, data, label[0])
    data = _wanted(source, data)
    return _of_one_shape(_decoded(data, source, splits, entry, image, mask) if image else data)


def _files(train: Mapping[str, Column], inputs: Names, label: str) -> tuple[str | None, str | None]:
    """The columns of image files and of masks."""
    images = [column for column in inputs if train[column].kind == "Image"]
    if images and len(inputs) > 1:
        raise DataError(f"data.inputs is {list(inputs)}; expected one column of images, or columns without images")
    return next(iter(images), None), label if train[label].kind == "Image" else None


def _check_entry(source: Source, entry: Entry | None, data: DataSet, label: str) -> None:
    """Raise an error if the data have other classes than their entry in the catalogue."""
    if entry is None or source.class_names or data.task is not CLASSIFICATION or data.classes == entry.classes:
        return
    raise DataError(
        f"data.name={source.name!r} ({entry.title}) has {entry.classes} classes, the data {data.classes} in {label!r}; "
        "choose another column with data.label, or other data by a folder or hub name"
    )


def _wanted(source: Source, data: DataSet) -> DataSet:
    """The examples that the settings ask for, with a test split."""
    data = data.wanted()
    if source.missing == "drop":
        data = data.complete()
    if source.held_out:
        data = data.held_out(source.held_out)
    return fewer(data, source.examples, source.test_examples)


def _of_one_shape(data: DataSet) -> DataSet:
    if data.train.shape != data.test.shape:
        raise DataError(
            f"data.name={data.name!r}: training examples have the shape {data.train.shape}, test examples "
            f"{data.test.shape}; expected the same: set data.size to resize image files, and use colour or "
            "greyscale images in both splits"
        )
    return data


def _decoded(
    data: DataSet, source: Source, splits: Splits, entry: Entry | None, image: str, mask: str | None
) -> DataSet:
    """The data set with the images of the files, where it has the numbers of their rows."""
    from .decoding import Files  # needs packages of the extra `data`

    files = Files(
        splits["train"],
        image,
        source.name,
        source.pixels or (entry.pixels if entry else None),
        source.fit or (entry.fit if entry else "stretch"),
        mask,
        entry.ids if entry else None,
        data.classes,
    )
    of_test = replace(files, split=splits.get("test", splits["train"]))
    return replace(data, train=files.decoded(data.train), test=of_test.decoded(data.test))


def commit_of(split: Rows) -> str | None:
    """The commit of the hub's repository that a split is from; None for files of this machine."""
    for url in getattr(split.info, "download_checksums", None) or ():
        if found := re.search(r"@([0-9a-f]{40})/", url):
            return found[1]
    return None


# --- columns -----------------------------------------------------------------


def _columns(source: Source, split: Rows) -> Mapping[str, Column]:
    """The columns of a split by name. A column of image files, as bytes or as paths, has the type Image."""
    if isinstance(split, Mapping):
        return {
            name: Column("array", functools.partial(as_rows, f"{source.name!r}: {name!r}", given))
            for name, given in split.items()
        }
    found = {}
    for name, feature in split.features.items():
        kinds = feature if isinstance(feature, dict) else {"bytes": feature}
        types = {key: getattr(kind, "dtype", None) for key, kind in kinds.items()}
        is_file = types.keys() <= {"bytes", "path"} and types.get("bytes") in ("binary", "large_binary")
        is_path = source.inputs == (name,) and types.get("bytes") in ("string", "large_string")
        classes = tuple(getattr(feature, "names", ()))
        is_value = type(feature).__name__ == "Value"
        kind = str(feature.dtype) if is_value else type(feature).__name__
        if is_file or (is_path and len(split) and str(split[0][name]).lower().endswith(tuple(PICTURES))):
            kind = "Image"
        is_single = kind != "Image" and (is_value or bool(classes))
        read_ = functools.partial(_single if is_single else _lists, source, split, name)
        found[name] = Column(kind, read_, classes)
    return found


def _lists(source: Source, split: Rows, column: str) -> np.ndarray:
    return as_rows(f"{source.name!r}: {column!r}", split.with_format("numpy")[column][:])


def _single(source: Source, split: Rows, column: str) -> Any:
    """Numbers or texts; the numbers of a column with class names become names."""
    import pyarrow as pa

    values = split.select_columns([column]).with_format("arrow")[:].column(0)
    is_special = pa.types.is_decimal(values.type) or (pa.types.is_boolean(values.type) and values.null_count)
    rows = (values.cast(pa.float64()) if is_special else values).to_numpy()
    names = getattr(split.features[column], "names", None)
    if names is None or values.null_count:
        return rows
    if (wrong := np.flatnonzero((rows < 0) | (rows >= len(names)))).size:
        raise DataError(
            f"{source.name!r}: {column!r} has numbers outside of 0 to {len(names) - 1}, the classes that have names",
            f": {int(rows[wrong[0]])} in row {wrong[0]}",
        )
    return np.array(names)[rows]


def _values(columns: Columns, used: Sequence[str]) -> dict[str, BySplit]:
    """The values of columns by split."""
    return {column: {part: split[column].read() for part, split in columns.items()} for column in used}


def _in_words(columns: Columns) -> str:
    train = columns["train"]
    shown = ", ".join(f"{name} ({train[name].kind})" for name in list(train)[:_SHOWN])
    return shown + (f", ... ({len(train)} columns)" if len(train) > _SHOWN else "")


def _chosen(
    source: Source, columns: Columns, entry: Entry | None, *, is_table: bool
) -> tuple[Names, Names, str | None, str | None]:
    """The columns of inputs, labels, domains and groups."""
    train = columns["train"]
    usual: Mapping[str, str] = ARRAYS
    if is_table:
        of_entry = {} if entry is None else {"inputs": entry.image, "label": entry.label}
        usual = {**of_entry, "domain": (entry and entry.domain) or "domain"}

    def named(key: str) -> Names:
        return (usual[key],) if usual.get(key) in train else ()

    domain = source.domain or (usual["domain"] if source.domains else next(iter(named("domain")), None))
    # A site's own data may lack the column of groups; where it is needed, `partition` reports that.
    group = next((name for name in ([source.group] if source.group else named("group")) if name in train), None)
    label = source.label or named("label")
    if not label:
        label = _only(source, columns, "label", "ClassLabel", (*source.inputs, domain or "domain"), is_table=is_table)
    inputs = source.inputs or named("inputs")
    if not inputs and not any(column.kind == "Image" for name, column in train.items() if name not in label):
        taken = (*label, domain, group, source.series, source.time, *_held_out_by(source).values())
        others = [name for name in train if name not in taken and not _INDEX.fullmatch(name)]
        inputs = tuple(name for name in others if name in source.categories or train[name].kind.startswith(_NUMBERS))
        for name in others:
            if name not in inputs and train[name].kind.endswith("string"):
                check_texts(source, name, train[name].read())
    if not inputs and is_table and not any(column.kind == "Image" for column in train.values()):
        raise DataError(
            f"{source.name!r} has no column left for inputs, data.label names {', '.join(label)}; expected other "
            f"columns of numbers or images, or texts with data.categories. Its columns: {_in_words(columns)}"
        )
    if not inputs:
        inputs = _only(source, columns, "inputs", "Image", label, is_table=is_table)
    used = [("inputs", column) for column in inputs] + [("label", column) for column in label]
    more = [("domain", domain), ("series", source.series), ("time", source.time)]
    more += [("categories", column) for column in source.categories]
    more += _held_out_by(source).items()
    for key, column in (*used, *more):
        if column is not None and column not in train:
            raise DataError(
                f"data.{key}={column!r} is not a column of {source.name!r}; its columns: {_in_words(columns)}"
            )
    for part, split in columns.items():
        if absent := [column for _, column in used if column not in split]:
            raise DataError(f"{source.name!r}: {part} has no column {', '.join(absent)}; expected the columns of train")
    if twice := [column for column in inputs if column in label]:
        raise DataError(f"{twice[0]!r} is in data.inputs and data.label; expected it in one")
    return inputs, label, domain, group


def _held_out_by(source: Source) -> dict[str, str]:
    """The key and the column of `data.test.by` or `data.test.time`."""
    columns = {f"test.{key}": getattr(source.held_out, key, None) for key in ("by", "time")}
    return {key: column for key, column in columns.items() if column is not None}


def _of_series(source: Source, columns: Columns, inputs: Names, others: Sequence[str]) -> tuple[Columns, Names]:
    """The columns of a long table with a value for each series, and the names of the new inputs."""

    def values(part: str, column: str | None) -> Any:
        return None if column is None else columns[part][column].read()

    longs = {
        part: Long.of(f"{source.name!r}: {part}", values(part, source.series), values(part, source.time))
        for part in columns
    }
    lengths = np.concatenate([long.lengths for long in longs.values()])
    length = int(lengths.max())
    # A site whose series happen to have one length gives the network a mask too, if it is for series of any length.
    new = ("inputs", MASK) if lengths.min() < length or source.shape[-1:] == (None,) else ("inputs",)

    def made(part: str, column: str) -> Any:
        long = longs[part]
        if column in others:
            return long.one_each(column, values(part, column))
        return long.mask(length) if column == MASK else long.stacked([values(part, name) for name in inputs], length)

    def of(part: str, column: str) -> Column:
        read = functools.partial(made, part, column)
        return replace(columns[part][column], read=read) if column in others else Column("array", read)

    return {
        part: {name: of(part, name) for name in (*new, *others) if name in (*new, *columns[part])} for part in longs
    }, new


def _uses(
    source: Source, train: Mapping[str, Column], inputs: Names, keys: Mapping[str, Sequence[str | None]]
) -> dict[str, str]:
    """What each column is for, or why it is not an input."""
    used = dict.fromkeys(inputs, "input")
    used |= {column: f"data.{key}" for key, some in keys.items() for column in some if column}
    return {
        name: used.get(name)
        or ("not in data.inputs" if source.inputs else "index of pandas" if _INDEX.fullmatch(name) else column.kind)
        for name, column in train.items()
    }


def _only(
    source: Source, columns: Columns, key: str, kind: str, skipped: Sequence[str | None], *, is_table: bool
) -> Names:
    """The only column of this type."""
    train = columns["train"]
    found = [name for name, column in train.items() if column.kind == kind and name not in skipped]
    if len(found) != 1:
        what = f"columns of type {kind}" if is_table else f"arrays {ARRAYS[key]!r}"
        raise DataError(
            f"{source.name!r} has {len(found) or 'no'} {what}; name one with data.{key}. Its columns: "
            f"{_in_words(columns)}"
        )
    return tuple(found)


def _groups(source: Source, columns: Columns, key: str, column: str | None, wanted: Sequence[str]) -> Groups | None:
    if column is None:
        return None
    values = {}
    for part, split in columns.items():
        if column not in split:
            continue
        if not (split[column].names or split[column].kind[0].islower()):  # the type is a class of `datasets`
            raise DataError(
                f"data.{key}={column!r} of {source.name!r} has the type {split[column].kind}; expected a number or a "
                "text for each example"
            )
        values[part] = split[column].read().tolist()
        if absent := sum(value is None or value != value for value in values[part]):
            raise DataError(
                f"{source.name!r}: {absent} of {len(values[part])} rows of {part} have no value in {column!r}; "
                "expected one in each row"
            )
    if "test" not in columns:
        values["test"] = values["train"]
    return Groups.of(source.name, values, wanted)


# --- classes -----------------------------------------------------------------


def _known(source: Source, entry: Entry | None, columns: Columns, label: Sequence[str], given: Names) -> Names:
    """The names of the classes, if the settings, the data or the catalogue have them."""
    if given or source.class_names:
        return given or source.class_names
    if columns["train"][label[0]].kind == "Image":
        if source.classes is None and not (entry and entry.names):
            raise DataError(
                f"{source.name!r} is a segmentation data set; give its number of classes with data.classes (pixels of "
                f"a mask are 0 to classes - 1, or {IGNORED} if they are ignored)"
            )
        return (entry and entry.names) or tuple(map(str, range(source.classes or 0)))
    found = [split[label[0]].names for split in columns.values()]
    if len(set(found)) > 1:
        raise DataError(
            f"data.name={source.name!r}: the training split has {len(found[0])} classes in {label[0]!r}, the test "
            f"split {len(found[1])}; they must be the same, or the names of data.class_names"
        )
    if entry is None or not entry.keep:
        return found[0]
    there = found[0] or tuple(map(str, columns["train"][label[0]].read().tolist()))
    if absent := [name for name in entry.keep if name not in there]:
        raise DataError(f"data.name={source.name!r} ({entry.title}): the data has no class {', '.join(absent)}")
    return entry.keep


# --- examples ----------------------------------------------------------------


def _check_sizes(where: str, split: Examples, groups: Sequence[Tensor | None], *, dense: bool) -> None:
    """Raise an error if arrays differ in their numbers of rows, or masks in size from the inputs."""
    found = {"inputs": tensors(split.inputs), "labels": tensors(split.targets), "domains or groups": groups}
    for what, values in found.items():
        if wrong := [len(some) for some in values if some is not None and len(some) != len(split)]:
            raise DataError(f"{where} has {len(split)} labels and {wrong[0]} {what}; expected as many")
    size = list(split.shape[1:])
    if dense and (masks := list(main_input(split.targets).shape[1:])) != size:
        raise DataError(f"{where} has inputs of size {size} and masks of {masks}; expected the same size")
