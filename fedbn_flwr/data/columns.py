"""Reads a table: finds the columns of inputs, labels and groups by the settings or by their types, and their values.

Inputs:

- columns with one number for each example are features: float32 [N, columns]; texts only as `data.categories`
- arrays, and columns of lists, keep their shape: [N, features], [N, channels, T], [N, channels, height, width] and so
  on. Whole numbers are tokens in [N, T], and pixels from 0 to 255 in arrays of more dimensions
- several arrays become a dict of tensors

Targets, by the types of the label columns: texts and whole numbers are classes, floats are regression targets.
Several columns of floats are several targets, several of 0 and 1 several labels. `data.task` decides otherwise.
An array [N, 1] is [N].
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from fedbn_flwr.batch import Value
from fedbn_flwr.errors import DataError, SettingsError, did_you_mean, few, log_once
from fedbn_flwr.tasks import BINARY, CLASSIFICATION, MULTILABEL, REGRESSION, SEGMENTATION, TASKS, Task

from . import IGNORED
from .catalogue import Entry
from .dataset import DataSet, Groups, fewer, in_order, numbers
from .examples import MASK, Examples, Streamed, main_input, main_key
from .source import Source
from .table import Names, Table, array_column

_INDEX = re.compile(r"(__index_level_\d+__|Unnamed: \d+)?")  # pandas writes it as a column, in CSV without a name
_COMMAS = re.compile(r"[+-]?\d+(,\d+)*")


# A table with a row for each example; a data set with all of them in each split; which have no label (bool); and what
# decodes image files, whose inputs are the numbers of their rows until it is clear which are used.
Opened = tuple[Table, DataSet, Tensor, Callable[[DataSet], DataSet]]


def read(source: Source, table: Table, entry: Entry | None = None, known: Sequence[object] = ()) -> DataSet:
    """The data set of this table; `known` are the names of its classes, if the data have them elsewhere."""
    table, data, absent, decoded = open_examples(source, table, entry, known)
    drops = source.missing == "drop"
    if source.missing is None and (gaps := counts(data.train.inputs, torch.isnan, data.input_names)):
        raise DataError(
            f"{source.name!r}: of the {len(table)} rows some have no value (NaN or null) in {gaps}; set data.missing: "
            "mean, which puts the mean of the column in their place, or drop, which leaves out the rows"
        )
    if not drops and absent.any():
        raise DataError(
            f"{source.name!r}: {int(absent.sum())} of {len(table)} rows have no value in "
            f"{', '.join(map(repr, data.labels))}, the first is {table.place(int(absent.int().argmax()))}; expected "
            "one in each row, or data.missing: drop, which leaves out these rows"
        )
    is_fixed = entry is not None and not source.class_names and data.task is CLASSIFICATION
    if entry is not None and is_fixed and data.classes != entry.classes:
        raise DataError(
            f"data.name={source.name!r} ({entry.title}) has {entry.classes} classes, the data {data.classes} in "
            f"{data.labels[0]!r}; choose another column with data.label, or other data by a folder or hub name"
        )
    rows = [
        data.usable(part, torch.arange(len(table))[chosen], absent if drops else None)
        for part, chosen in table.splits.items()
    ]
    data = data.select(rows[0], rows[-1])
    data = data.held_out(source.held_out) if source.held_out else data
    data = decoded(fewer(data, source.examples, source.test_examples))
    if not source.held_out and data.test.rows is not None:
        data = replace(data, test=replace(data.test, rows=data.test.rows - table.counts[0]))
    if data.train.shape != data.test.shape:
        raise DataError(
            f"data.name={data.name!r}: training examples have the shape {data.train.shape}, test examples "
            f"{data.test.shape}; expected the same: set data.size to resize image files, and use colour or "
            "greyscale images in both splits"
        )
    return data


def open_examples(given: Source, table: Table, entry: Entry | None = None, known: Sequence[object] = ()) -> Opened:
    """All examples of the table, those without a label too."""
    source = _complete(given, table, entry)
    name, inputs, label = source.name, source.inputs, source.label
    types = {column: table.kind(column) for column in inputs}
    used = dict.fromkeys(inputs, "input") | {column: f"data.{key}" for key, column in _named(source)}
    other = "not in data.inputs" if given.inputs else ""
    uses = {
        column: used.get(column) or other or ("index of pandas" if _INDEX.fullmatch(column) else table.kind(column))
        for column in table.names
    }
    if source.series is not None:
        table, inputs = of_series(source, table)
    units = () if source.window is None else ("series",)  # windows may overlap, so a series is not split
    grouping = [(key, column) for key, column in _named(source) if key in ("domain", "group", *units) or "." in key]
    groups = {key: _groups(name, table, key, column, source.domains) for key, column in grouping}
    images = [column for column in inputs if table.kind(column) == "Image"]
    if images and len(inputs) > 1:
        raise DataError(f"data.inputs is {list(inputs)}; expected one column of images, or columns without images")
    masks = table.kind(label[0]) == "Image"
    classes = _known(source, entry, table, tuple(map(str, known)))
    if masks:  # zeros until files are decoded
        zeros = torch.zeros(len(table), dtype=torch.int64)
        targets = Targets(zeros, classes, SEGMENTATION, zeros.bool())
    else:
        keeps = entry is not None and bool(entry.keep) and not source.class_names
        targets = targets_of(source, table, label, classes, keeps=keeps)
    is_dense = targets.task is SEGMENTATION
    if is_dense and bool(images) != masks:
        raise DataError(
            f"data.label={label[0]!r} of {name!r} has the type {table.kind(label[0])}; expected a number or a "
            f"text for each example, or images and a column of masks. Its columns: {table}"
        )
    if targets.task in (CLASSIFICATION, BINARY) and len(targets.names) == 1:
        log_once(
            f"data.label: all examples of {name!r} have one class, {targets.names[0]!r}, so there is nothing to "
            "learn; list all classes in data.class_names, or choose another column"
        )
    rows = torch.arange(len(table))
    values, features = (rows, ()) if images else inputs_of(source, table, inputs)
    every = Examples(values, targets.values, rows=rows)
    if is_dense and not images and (size := main_input(every.targets).shape[1:]) != (whole := every.shape[1:]):
        raise DataError(f"{name!r} has inputs of size {list(whole)} and masks of {list(size)}; expected the same size")
    data = DataSet(
        name,
        every,
        every,
        targets.names,
        groups.get("domain"),
        groups.get("group"),
        groups.get("test.by") or groups.get("test.time") or groups.get("series"),
        table.commit,
        targets.task,
        features,
        uses,
        source.tokens,
        types,
        label,
    )
    mask = label[0] if masks else None
    decoded = partial(_decoded, source, table, entry, images[0], mask) if images else lambda data: data
    return table, data, targets.absent, decoded


def _decoded(source: Source, table: Table, entry: Entry | None, image: str, mask: str | None, data: DataSet) -> DataSet:
    """The data set with the images of the files, where it has the numbers of their rows."""
    from .decoding import Files  # which imports Pillow

    files = Files(
        table,
        image,
        source.name,
        source.pixels or (entry.pixels if entry else None),
        source.fit or (entry.fit if entry else "stretch"),
        mask,
        entry.ids if entry else None,
        data.classes,
        source.channels or 1,
    )
    return replace(data, train=files.decoded(data.train), test=files.decoded(data.test))


# --- columns -----------------------------------------------------------------


def _named(source: Source) -> list[tuple[str, str]]:
    """The keys that name columns which are no inputs, each with its column."""
    found = [(f"test.{key}", getattr(source.held_out, key, None)) for key in ("by", "time")]
    found += [("label", column) for column in source.label]
    found += [(key, getattr(source, key)) for key in ("domain", "group", "series", "time")]
    return [(key, column) for key, column in found if column is not None]


def _complete(source: Source, table: Table, entry: Entry | None) -> Source:
    """With the columns of inputs, labels, domains and groups that the settings leave open."""
    columns = {name: table.kind(name) for name in table.names}

    def usual(*names: str | None) -> str | None:
        return next((name for name in names if name is not None and name in columns), None)

    def only(key: str, kind: str, skipped: Sequence[str | None] = ()) -> Names:
        """The only column of this type."""
        found = [name for name, found in columns.items() if found == kind and name not in skipped]
        if len(found) != 1:
            raise DataError(f"{source.name!r}: name the column with data.{key}; its columns: {table}")
        return tuple(found)

    listed = Entry("", 0, 0, None, image="inputs", label="labels") if entry is None else entry
    domain = source.domain or usual(listed.domain, "domain", "domains") or ("domain" if source.domains else None)
    # A site's own data may lack the column of groups; where it is needed, `partition` reports that.
    group = usual(source.group or "groups")
    named = source.model_copy(update={"domain": domain, "group": group})
    wanted = [("inputs", name) for name in source.inputs] + [("categories", name) for name in source.categories]
    for key, name in (*wanted, *_named(named)):
        if name not in columns:
            raise DataError(f"data.{key}={name!r} is not a column of {source.name!r}; its columns: {table}")
    found = usual(listed.label, "labels")
    label = source.label or ((found,) if found else only("label", "ClassLabel", [*source.inputs, domain]))
    inputs = source.inputs or tuple(filter(None, [usual(listed.image, "inputs")]))
    has_arrays = any(found in ("Image", "array") for name, found in columns.items() if name not in label)
    if not inputs and not has_arrays:
        taken = {column for _, column in _named(named)} | {*label}
        others = [name for name in columns if name not in taken and not _INDEX.fullmatch(name)]
        inputs = tuple(name for name in others if name in source.categories or table.is_number(name))
        for name in others:
            if name not in inputs and table.is_text(name):
                check_texts(source, table, name)
        if not inputs and "Image" not in columns.values():
            raise DataError(
                f"{source.name!r} has no column left for inputs, data.label names {', '.join(label)}; expected other "
                f"columns of numbers or images, or texts with data.categories. Its columns: {table}"
            )
    inputs = inputs or only("inputs", "Image", label)
    if absent := [column for column in (*inputs, *label) if column in table.only_train]:
        raise DataError(f"{source.name!r}: test has no column {', '.join(absent)}; expected the columns of train")
    if twice := [column for column in inputs if column in label]:
        raise DataError(f"{twice[0]!r} is in data.inputs and data.label; expected it in one")
    return named.model_copy(update={"inputs": inputs, "label": label})


def _groups(name: str, table: Table, key: str, column: str, wanted: Names) -> Groups:
    if table.is_array(column):
        raise DataError(
            f"data.{key}={column!r} of {name!r} has the type {table.kind(column)}; expected a number or a text for "
            "each example"
        )
    values, codes = table.coded(column)
    rows = np.flatnonzero(codes[: table.counts[0] if column in table.only_train else None] < 0)
    if len(rows):
        raise DataError(
            f"{name!r}: {len(rows)} of {len(table)} rows have no value in {column!r}, the first is "
            f"{table.place(rows[0])}; expected one in each row"
        )
    known = in_order(texts := list(map(str, values)))
    names = wanted if wanted and key == "domain" else tuple(known)
    if unknown := [text for text in names if text not in known]:
        hint = did_you_mean(unknown[0], known)
        raise DataError(f"data.domains: {unknown[0]!r} is not a domain of {name!r}", f"; {hint}")
    places = numbers([*texts, ""], names)[codes]
    return Groups(names, places, None if column in table.only_train else places)


def _known(source: Source, entry: Entry | None, table: Table, given: Names) -> Names:
    """The names of the classes, if the settings, the data or the catalogue have them."""
    column = source.label[0]
    if given or source.class_names:
        return given or source.class_names
    if table.kind(column) == "Image":
        if source.classes is None and not (entry and entry.names):
            raise DataError(
                f"{source.name!r} is a segmentation data set; give its number of classes with data.classes (pixels of "
                f"a mask are 0 to classes - 1, or {IGNORED} if they are ignored)"
            )
        return (entry and entry.names) or tuple(map(str, range(source.classes or 0)))
    found = table.classes.get(column, ())
    if entry is None or not entry.keep:
        return found
    there = found or tuple(map(str, table.coded(column)[0]))
    if absent := [name for name in entry.keep if name not in there]:
        raise DataError(f"data.name={source.name!r} ({entry.title}): the data has no class {', '.join(absent)}")
    return entry.keep


# --- series -------------------------------------------------------------------


def of_series(source: Source, table: Table) -> tuple[Table, Names]:
    """A long table, which has a row for each time of a series, with a row for each series; and its inputs [N, C, T]."""
    rows, lengths = _cut(source, table)
    first = np.cumsum(lengths) - lengths
    series = np.repeat(np.arange(len(lengths)), lengths)  # of each of the rows
    others = [*dict.fromkeys(name for key, name in _named(source) if key != "time" and name in table.names)]
    for column in others:
        _, codes = table.coded(column)
        if wrong := len(np.unique(series[codes[rows] != codes[rows[first]][series]])):
            raise DataError(
                f"{source.name!r}: {wrong} of {len(first)} series have several values in {column!r}; expected one for "
                "each series"
            )
    length = int(lengths.max())
    values = np.zeros((len(lengths), len(source.inputs), length), np.float32)  # zero behind the end of a series
    columns = [table.rows(repr(source.name), column) for column in source.inputs]
    try:
        given = np.stack([column.astype(np.float32) for column in columns], 1)
    except (TypeError, ValueError):
        raise DataError(f"{source.name!r} has texts in a column of inputs; series need numbers") from None
    values[series, :, np.arange(len(rows)) - first[series]] = given[rows]
    new = {"inputs": array_column(values)}
    # A site whose series happen to have one length gives the network a mask too, if it is for series of any length.
    if lengths.min() < length or source.shape[-1:] == (None,):
        new[MASK] = array_column(np.arange(length) < lengths[:, None])
    counts = np.bincount(rows[first] >= table.counts[0], minlength=2)[: len(table.counts)]
    made = replace(table, columns=table.columns.select(others).take(rows[first]), counts=tuple(counts.tolist()))
    return made.with_columns(new), tuple(new)


def _cut(source: Source, table: Table) -> tuple[np.ndarray, np.ndarray]:
    """The rows in the order of their series and times, and how many each series has.

    The series are in the order of their ids, those of the training split first; without times, rows keep their order.
    If they are cut into windows, each window is a series. Rows behind the last window of a series are left out, and so
    are rows of series shorter than a window.
    """
    name, window = repr(source.name), source.window
    is_test = np.arange(len(table)) >= table.counts[0]  # a series may be in both splits
    keys = [is_test, *(_ranks(name, table, column) for column in (source.series, source.time) if column is not None)]
    if source.time is not None and (twice := len(table) - len(np.unique(keys, axis=1).T)):
        raise DataError(f"{name} has {twice} rows with the series and the time of another row; expected one each")
    rows = np.lexsort(keys[::-1])
    ids = np.array(keys[:2])[:, rows]
    first = np.flatnonzero(np.append(True, (ids[:, 1:] != ids[:, :-1]).any(0)))
    lengths = np.diff(first, append=len(table))
    if window is None:
        return rows, lengths
    counts = np.maximum(0, (lengths - window.length) // window.step + 1)
    if not counts.any():
        raise DataError(
            f"{name}: no series has the {window.length} rows of a window (data.window.length); the longest has "
            f"{lengths.max()}"
        )
    if short := int((counts == 0).sum()):
        log_once(f"data.window leaves out {short} of {len(counts)} series of {name}, shorter than a window")
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)  # its number in its series
    starts = np.repeat(first, counts) + window.step * within
    return rows[starts[:, None] + np.arange(window.length)].ravel(), np.full(len(starts), window.length)


def _ranks(name: str, table: Table, column: str) -> np.ndarray:
    """The places of numbers or texts in their order."""
    values, codes = table.coded(column)
    if absent := int((codes < 0).sum()):
        raise DataError(f"{name} has {absent} rows without a series or a time; expected both in each row")
    ranks: np.ndarray = np.argsort(np.argsort(np.array(values)))[codes]
    return ranks


# --- inputs -------------------------------------------------------------------


def inputs_of(source: Source, table: Table, columns: Names) -> tuple[Value, Names]:
    """The inputs of all examples, and the names of the features."""
    if not any(map(table.is_array, columns)):
        made = {name: rows for column in columns for name, rows in _features(source, table, column).items()}
        found: Value = torch.from_numpy(np.stack([*made.values()], 1))
        _check(source, found, names := tuple(made))
        return found, names
    arrays = {key: _array(repr(source.name), key, table.rows(repr(source.name), key)) for key in columns}
    found = _several(repr(source.name), arrays) if len(arrays) > 1 else arrays[columns[0]]
    _check(source, found, ())
    return found, ()


def _features(source: Source, table: Table, name: str) -> dict[str, np.ndarray]:
    """A column of numbers [N] by its name, or one of 0 and 1 for each of its categories; NaN where it has no value."""
    if known := source.categories.get(name, ()):
        values, codes = table.coded(name)
        texts = np.array([*map(str, values), ""])[codes]
        if other := sorted({*map(str, values)}.difference(known)):
            raise DataError(
                f"data.categories lacks {len(other)} of the values of the column {name!r} of {source.name!r}",
                f", such as {other[0]!r}; {did_you_mean(other[0], known)}",
            )
        return {f"{name}={text}": np.where(codes < 0, np.nan, texts == text).astype(np.float32) for text in known}
    if not table.is_number(name) and table.kind(name) != "null":
        check_texts(source, table, name)
        some = sorted(map(str, table.coded(name)[0]))
        if (commas := [text for text in some if "," in text]) and all(map(_COMMAS.fullmatch, some)):
            raise DataError(
                f"{source.name!r}: the column {name!r} has numbers with commas; write 150.5 in place of 150,5 (and "
                "1500 in place of 1,500), or separate the columns by semicolons, between which commas are decimal",
                f": {commas[0]!r}",
            )
        raise DataError(
            f"{source.name!r}: the column {name!r} has {'texts' if table.is_text(name) else table.kind(name)}, which "
            "cannot be inputs; leave it out of data.inputs, or give its values",
            f": data.categories: {{{name}: [{', '.join(some[:4])}]}}",
        )
    return {name: np.asarray(table.rows(repr(source.name), name), np.float32)}


def check_texts(source: Source, table: Table, column: str) -> None:
    """Raise an error for a column of numbers with a few stray texts, which make it a column of texts."""
    values, codes = table.coded(column)
    wrong = np.flatnonzero(np.isin(codes, [place for place, text in enumerate(values) if not _is_number(text)]))
    total = int((codes >= 0).sum())
    if 0 < len(wrong) < total / 2:
        raise DataError(
            f"{source.name!r}: {len(wrong)} of {total} values of the column {column!r} are not numbers; correct "
            "them, leave their fields empty, or list the inputs in data.inputs without this column",
            f": {values[codes[wrong[0]]]!r} in {table.place(wrong[0])}",
        )


def _is_number(text: object) -> bool:
    with suppress(ValueError):
        return float(str(text)) is not None
    return False


def _several(where: str, arrays: dict[str, Tensor]) -> dict[str, Tensor]:
    """Give the normalised array a dimension of features, and make the mask bool: numbers would select rows."""
    key, mask = main_key(arrays), arrays.get(MASK)
    values = arrays[key].reshape(len(arrays[key]), -1) if arrays[key].ndim == 1 else arrays[key]
    if mask is None:
        return {**arrays, key: values}
    expected = [len(values), values.shape[-1]]
    if list(mask.shape) != expected or not ((mask == 0) | (mask == 1)).all():
        raise DataError(
            f"{where} has a {MASK!r} of shape {list(mask.shape)}; expected {expected}, as {key!r} without its "
            "channels, and 1 or true at real positions, 0 or false at padded ones"
        )
    return {**arrays, key: values, MASK: mask.bool()}


def _array(where: str, key: str, rows: Any) -> Tensor:
    """float32, int64, or uint8 where whole numbers are pixels; truth values and bytes of a volume as they are."""
    if isinstance(rows, Streamed):
        return cast(Tensor, replace(rows, made=partial(_array, where, key)))
    is_image = key != MASK and (rows.ndim == 4 or (rows.ndim == 3 and rows.dtype.kind != "f"))
    is_byte = rows.dtype.kind in "iu" and (not rows.size or 0 <= rows.min() <= rows.max() <= 255)
    if is_image and not (is_byte or rows.dtype.kind == "f"):
        raise DataError(
            f"{where} has {rows.dtype} pixels; expected whole numbers from 0 to 255, or floating-point numbers"
        )
    if rows.dtype.kind not in "biuf":
        raise DataError(f"{where} has inputs of type {rows.dtype}; expected numbers")
    if is_image:  # [N, C, H, W]; the channels may come last or be missing
        rows = rows[:, None] if rows.ndim == 3 else rows
        rows = np.moveaxis(rows, -1, 1) if rows.shape[1] > 4 >= rows.shape[-1] else rows
    if not (rows.dtype == bool or (rows.dtype == np.uint8 and rows.ndim > 2)):
        rows = rows.astype(np.uint8 if is_image and is_byte else np.int64 if rows.dtype.kind in "iu" else np.float32)
    return torch.from_numpy(np.require(rows, requirements=["C", "W"]))


def _check(source: Source, inputs: Value, names: Names) -> None:
    """Raise an error for a wrong shape, infinite values, and values out of range.

    Errors count such values instead of showing them, because a site's errors are sent to the server.
    """
    main = main_input(inputs)
    shape, wanted = list(main.shape[1:]), list(source.shape)
    if wanted and (len(wanted) != len(shape) or any(b not in (None, a) for a, b in zip(shape, wanted, strict=True))):
        raise DataError(f"data.shape is {wanted}, but {source.name!r} has inputs of shape {shape}")
    for column, (low, high) in source.ranges.items():
        if column not in names:
            raise SettingsError(f"data.ranges has {column!r}; {did_you_mean(column, names)}")
        values = main[:, names.index(column)]
        if outside := int(((values < low) | (values > high)).sum()):
            raise DataError(
                f"{source.name!r}: {outside} of {len(values)} rows have a value of {column!r} outside of "
                f"data.ranges, {low:g} to {high:g}; correct them, or convert their unit",
                "; here they are from {:g} to {:g}".format(*values[~values.isnan()].aminmax()),
            )
    if found := counts(inputs, torch.isinf, names):
        raise DataError(f"{source.name!r} has infinite values in {found}; expected numbers")
    for values in inputs.values() if isinstance(inputs, Mapping) else [inputs]:
        if values.dtype is torch.int64 and values.numel() and (source.tokens or values is main):
            smallest, largest = int(values.min()), int(values.max())
            if smallest < 0 or largest >= (source.tokens or math.inf):
                raise DataError(
                    f"{source.name!r} has tokens other than "
                    + (
                        f"0 to {source.tokens - 1} (data.tokens is {source.tokens})"
                        if source.tokens
                        else "0, 1, 2 and so on; give whole numbers that are not tokens as floats"
                    ),
                    f": from {smallest} to {largest}",
                )


def counts(inputs: Value, where: Callable[[Tensor], Tensor], names: Names) -> str:
    """The columns with such values, and how many each has; empty if there are none."""
    found: list[tuple[str, int]] = []
    for key, values in inputs.items() if isinstance(inputs, Mapping) else [("inputs", inputs)]:
        if isinstance(values, Tensor) and values.is_floating_point():  # not those that are read later
            wrong = where(values)
            found += zip(names, wrong.sum(0).tolist(), strict=True) if names else [(key, int(wrong.sum()))]
    return few((f"{name} ({number})" for name, number in found if number), 8)


# --- targets ------------------------------------------------------------------


class Targets(NamedTuple):
    """What a model is trained to predict."""

    values: Value  # -1 or NaN where an example has no label
    names: Names  # of classes, labels or numbers
    task: Task
    absent: Tensor  # bool, whether an example has no label


def targets_of(source: Source, table: Table, label: Names, known: Names, *, keeps: bool) -> Targets:
    """The targets of columns. `known` are the names of the classes, if they are known; others raise an error, unless
    the data set `keeps` only these."""
    name, column = source.name, ", ".join(label)
    absent = np.any([table.absent(each) for each in label], 0)
    rows, default = np.empty(0), CLASSIFICATION
    if all(table.is_array(each) or table.is_number(each) for each in label):  # neither texts nor dates
        columns = [table.rows(repr(name), each) for each in label]
        rows = columns[0] if len(label) == 1 else np.stack(columns, 1)
        rows = rows[:, 0] if rows.shape[1:] == (1,) else rows
        known = known if len(label) == 1 else label
        is_whole = rows.dtype.kind != "f" or all(table.kind(each).startswith(("int", "uint", "bool")) for each in label)
        if not is_whole:
            default = REGRESSION
        elif rows.ndim > 1:
            default = MULTILABEL if rows.ndim == 2 and np.isin(rows[~absent], (0, 1)).all() else SEGMENTATION
    task = TASKS[source.task] if source.task else default
    if task in (CLASSIFICATION, BINARY):
        if len(label) > 1 or rows.ndim > 1:
            raise DataError(f"{name!r} has several values in {column!r}; expected one class for each example")
        values, known = _classes(source, table, label, known, keeps=keeps)
        return Targets(values, known, task, torch.from_numpy(absent))
    if not rows.size or rows.dtype.kind not in "iufb":
        raise DataError(f"{name!r} has no numbers in {column!r}; expected numbers for {task.name}")
    if task is SEGMENTATION:
        return Targets(*_dense(source, rows, known), task, torch.from_numpy(absent))
    found = np.array(rows, np.float32)
    found[absent] = np.nan
    if task is MULTILABEL and not np.isin(found[~absent], (0, 1)).all():
        raise DataError(f"{name!r}: {column!r} has values other than 0 and 1; expected them for several labels")
    names = known or ((column,) if rows.ndim == 1 else tuple(map(str, range(rows.shape[-1]))))
    return Targets(torch.from_numpy(found), names, task, torch.from_numpy(absent))


def _classes(source: Source, table: Table, label: Names, known: Names, *, keeps: bool) -> tuple[Tensor, Names]:
    """The class number of each example, -1 where it has none, and the names of the classes.

    Whole numbers are names too, unless the classes have other names: then they are numbers of classes, from 0.
    """
    name, column = source.name, label[0]
    values, codes = table.coded(column)
    if any(isinstance(value, float) and value % 1 for value in values):
        raise DataError(
            f"{name!r} has labels of type {table.kind(column)} in {column!r}, which are not classes; expected a whole "
            "number or a name for each example"
        )
    values = [int(value) if isinstance(value, float) else value for value in values]
    is_number = bool(values) and all(type(value) is int for value in values)
    if is_number and not known and source.classes and 0 <= min(values) <= max(values) < source.classes:
        known = tuple(map(str, range(source.classes)))
    if is_number and known and not any(text.lstrip("-").isdecimal() for text in known):
        if not 0 <= min(values) <= max(values) < len(known):
            raise DataError(
                f"{name!r} has {len(known)} classes, so labels must be 0 to {len(known) - 1}",
                f", but they are {min(values)} to {max(values)}",
            )
        return torch.tensor([*values, -1])[codes], known
    ordered = dict.fromkeys(map(str, sorted(values)))
    known = known or tuple(ordered)
    if (unknown := [text for text in ordered if text not in known]) and not keeps:
        raise DataError(
            f"data.class_names lacks {len(unknown)} of the classes in {column!r} of {name!r}",
            f", such as {unknown[0]!r}; {did_you_mean(unknown[0], known)}",
        )
    return numbers([*map(str, values), ""], known)[codes], known


def _dense(source: Source, rows: np.ndarray, known: Names) -> tuple[Tensor, Names]:
    counted = rows[rows != IGNORED]
    known = known or tuple(map(str, range(source.classes or int(counted.max(initial=0)) + 1)))
    if counted.dtype.kind not in "iub" or not 0 <= counted.min(initial=0) <= counted.max(initial=0) < len(known):
        raise DataError(
            f"{source.name!r} has {len(known)} classes, so labels must be 0 to {len(known) - 1}, or {IGNORED}",
            f", but they are {counted.min(initial=0)} to {counted.max(initial=0)}",
        )
    return torch.from_numpy(rows.astype(np.uint8)), known
