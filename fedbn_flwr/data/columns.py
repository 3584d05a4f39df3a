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
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple, cast

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from fedbn_flwr.batch import Value, first
from fedbn_flwr.errors import DataError, SettingsError, did_you_mean, error_if, few, log_once
from fedbn_flwr.tasks import BINARY, CLASSIFICATION, MULTILABEL, REGRESSION, SEGMENTATION, TASKS, Task

from . import IGNORED
from .catalogue import Entry
from .dataset import DataSet, Groups, fewer, in_order, numbers
from .examples import MASK, Examples, main_input, main_key
from .source import Source
from .table import Names, Table, array_column

_INDEX = re.compile(r"(__index_level_\d+__|Unnamed: \d+)?")  # pandas writes it as a column, in CSV without a name
_AT_ONCE = 1_024  # rows, of which a copy may be made
_COMMAS = re.compile(r"[+-]?\d+(,\d+)*")


def read(
    source: Source, table: Table, entry: Entry | None = None, known: Sequence[object] = (), *, trains: bool = True
) -> DataSet:
    """The data set of this table; `known` are the names of its classes, if the data have them elsewhere.

    With `trains=False` it has all rows of the table, labels may be missing, and a test split is not drawn. Image files
    are decoded last, when it is clear which are used: until then the inputs are the places of their rows.
    """
    error_if(not len(table), f"{source.name!r} has no rows")
    if not trains:
        source, table = _with_labels(source, table)
    given, source = source, _complete(source, table, entry)
    kinds, uses = {column: table.kind(column) for column in source.inputs}, _uses(given, source, table)
    if source.series is not None:
        source, table = of_series(source, table)
    targets = targets_of(source, table, entry, tuple(map(str, known)))
    data = replace(_every(source, table, targets), types=kinds, columns=uses)
    _check_values(source, table, entry, data, targets, trains=trains)
    rows = [torch.arange(len(table))[chosen] for chosen in table.splits.values()]
    if trains:
        drops = targets.absent if source.missing == "drop" else None
        rows = [data.usable(part, some, drops) for part, some in zip(table.splits, rows, strict=True)]
    data = data.select(rows[0], rows[-1])
    data = data.held_out(source.held_out) if source.held_out else data
    data = fewer(data, source.examples, source.test_examples)
    data = _decoded(source, table, entry, data) if _images(source, table) else data
    error_if(
        data.train.shape != data.test.shape,
        f"data.name={data.name!r}: training examples have the shape {data.train.shape}, test examples "
        f"{data.test.shape}; expected the same: set data.size to resize image files, and use colour or "
        "greyscale images in both splits",
    )
    return data


def _with_labels(source: Source, table: Table) -> tuple[Source, Table]:
    """The table with columns of labels that have no value, where it has none; and how to read it."""
    there = [label for label in source.label if label in table.names and table.kind(label) != "null"]
    if source.task == SEGMENTATION.name and not any(map(table.is_array, there)):  # no masks
        source, there = source.model_copy(update={"task": CLASSIFICATION.name}), []
    absent = pa.nulls(len(table), pa.string() if source.class_names else pa.float64())
    table = replace(table, only_train=tuple(name for name in table.only_train if name not in source.label))
    table = table.with_columns({label: absent for label in source.label if label not in there})
    return source.model_copy(update={"test": None}), table


def _images(source: Source, table: Table) -> list[str]:
    return [column for column in source.inputs if table.kind(column) == "Image"]


def _every(source: Source, table: Table, targets: Targets) -> DataSet:
    """All examples of the table, as both splits."""
    units = () if source.window is None else ("series",)  # windows may overlap, so a series is not split
    grouping = [(key, column) for key, column in _named(source) if key in ("domain", "group", *units) or "." in key]
    groups = {key: _groups(source, table, key, column) for key, column in grouping}
    inputs, features = (torch.arange(len(table)), ()) if _images(source, table) else inputs_of(source, table)
    every = Examples(inputs, targets.values, rows=torch.cat([*map(torch.arange, table.counts)]))
    apart = groups.get("test.by") or groups.get("test.time") or groups.get("series")
    if targets.task in (CLASSIFICATION, BINARY) and len(targets.names) == 1:
        log_once(
            f"data.label: all examples of {source.name!r} have one class, {targets.names[0]!r}, so there is nothing to "
            "learn; list all classes in data.class_names, or choose another column"
        )
    return DataSet(
        source.name,
        every,
        every,
        targets.names,
        groups.get("domain"),
        groups.get("group"),
        apart,
        table.commit,
        targets.task,
        features,
        given_tokens=source.tokens,
        labels=source.label,
        names_from_rows=targets.from_rows,
    )


def _check_values(
    source: Source, table: Table, entry: Entry | None, data: DataSet, targets: Targets, *, trains: bool
) -> None:
    """Raise an error for masks of another size, other classes, and missing values that `data.missing` doesn't allow."""
    name, every, absent = repr(source.name), data.train, targets.absent
    size, masks = list(every.shape[1:]), list(first(every.targets).shape[1:])
    error_if(
        data.dense and not _images(source, table) and size != masks,
        f"{name} has inputs of size {size} and masks of {masks}; expected the same size",
    )
    gaps = "" if source.missing else counts(every.inputs, torch.isnan, data.input_names)
    cure = "set data.missing: mean, which puts the mean of the column there, or drop, which leaves out the rows"
    cure = cure if trains else "fill them in or leave out the rows: the run was trained without data.missing"
    error_if(gaps, f"{name}: of the {len(table)} rows some have no value (NaN or null) in {gaps}; {cure}")
    error_if(
        trains and source.missing != "drop" and absent.any(),
        f"{name}: {int(absent.sum())} of {len(table)} rows have no value in {', '.join(map(repr, data.labels))}, "
        f"the first is {table.first(absent.numpy())}; expected one in each row, or data.missing: drop, which "
        "leaves out these rows",
    )
    if entry is not None and not source.class_names and data.task is CLASSIFICATION:
        error_if(
            data.classes != entry.classes,
            f"data.name={name} ({entry.title}) has {entry.classes} classes, the data {data.classes} in "
            f"{data.labels[0]!r}; choose another column with data.label, or other data by a folder or hub name",
        )


def _decoded(source: Source, table: Table, entry: Entry | None, data: DataSet) -> DataSet:
    """The data set with the images of the files, where it has the places of their rows."""
    from .decoding import Files  # which imports Pillow

    files = Files(
        table,
        source.inputs[0],
        source.name,
        source.pixels or (entry.pixels if entry else None),
        source.fit or (entry.fit if entry else "stretch"),
        source.label[0] if data.dense else None,
        entry.ids if entry else None,
        data.classes,
        source.channels or 1,
    )
    return replace(data, train=files.decoded(data.train), test=files.decoded(data.test))


# --- columns -----------------------------------------------------------------


def _named(source: Source) -> list[tuple[str, str]]:
    """The keys that name columns which are no inputs, each with its column."""
    found = (
        *((f"test.{key}", getattr(source.held_out, key, None)) for key in ("by", "time")),
        *(("label", column) for column in source.label),
        *((key, getattr(source, key)) for key in ("domain", "group", "series", "time")),
    )
    return [(key, column) for key, column in found if column is not None]


def _complete(source: Source, table: Table, entry: Entry | None) -> Source:
    """With the columns of inputs, labels, domains and groups that the settings leave open."""
    listed = entry or Entry("", 0, 0, None, image="inputs", label="labels")

    def usual(*names: str | None) -> str | None:
        return next((name for name in names if name in table.names), None)

    domain = source.domain or usual(listed.domain, "domain", "domains") or ("domain" if source.domains else None)
    # A site's own data may lack the column of groups; where it is needed, `partition` reports that.
    source = source.model_copy(update={"domain": domain, "group": usual(source.group or "groups")})
    wanted = [("inputs", name) for name in source.inputs] + [("categories", name) for name in source.categories]
    for key, name in (*wanted, *_named(source)):
        problem = f"data.{key}={name!r} is not a column of {source.name!r}; its columns: {table}"
        error_if(name not in table.names, problem)
    found = usual(listed.label, "labels")
    label = source.label or (
        (found,) if found else _only(source, table, "label", "ClassLabel", (*source.inputs, domain))
    )
    source = source.model_copy(update={"label": label})
    inputs = source.inputs or tuple(filter(None, [usual(listed.image, "inputs")])) or _numeric(source, table)
    absent = ", ".join(column for column in (*inputs, *label) if column in table.only_train)
    twice = ", ".join(repr(column) for column in inputs if column in label)
    error_if(absent, f"{source.name!r}: test has no column {absent}; expected the columns of train")
    error_if(twice, f"{twice} is in data.inputs and data.label; expected it in one")
    source = source.model_copy(update={"inputs": inputs})
    several = len(inputs) > 1 and _images(source, table)
    error_if(several, f"data.inputs is {list(inputs)}; expected one column of images, or columns without images")
    return source


def _only(source: Source, table: Table, key: str, kind: str, others: Sequence[str | None]) -> Names:
    """The only column of this type besides others."""
    found = tuple(name for name in table.names if table.kind(name) == kind and name not in others)
    error_if(len(found) != 1, f"{source.name!r}: name the column with data.{key}; its columns: {table}")
    return found


def _numeric(source: Source, table: Table) -> Names:
    """All columns of numbers and categories without another use; if there are images or arrays, those of images."""
    others = [name for name in table.names if name not in source.label]
    if any(table.kind(name) in ("Image", "array") for name in others):
        return _only(source, table, "inputs", "Image", source.label)
    taken = {column for _, column in _named(source)}
    others = [name for name in others if name not in taken and not _INDEX.fullmatch(name)]
    inputs = tuple(name for name in others if name in source.categories or table.is_number(name))
    for name in others:
        if name not in inputs and table.is_text(name):
            check_texts(source, table, name)
    error_if(
        not inputs,
        f"{source.name!r} has no column left for inputs, data.label names {', '.join(source.label)}; expected other "
        f"columns of numbers or images, or texts with data.categories. Its columns: {table}",
    )
    return inputs


def _uses(given: Source, source: Source, table: Table) -> dict[str, str]:
    """What each column is for, or why it is not an input."""
    used = dict.fromkeys(source.inputs, "input") | {column: f"data.{key}" for key, column in _named(source)}
    other = "not in data.inputs" if given.inputs else ""
    return {
        column: used.get(column) or other or ("index of pandas" if _INDEX.fullmatch(column) else table.kind(column))
        for column in table.names
    }


def _groups(source: Source, table: Table, key: str, column: str) -> Groups:
    name, train_only = repr(source.name), column in table.only_train
    error_if(
        table.is_array(column),
        f"data.{key}={column!r} of {name} has the type {table.kind(column)}; expected a number or a text for "
        "each example",
    )
    values, codes = table.coded(column)
    absent = codes[: table.counts[0] if train_only else None] < 0
    if absent.any():
        raise DataError(
            f"{name}: {absent.sum()} of {len(table)} rows have no value in {column!r}, the first is "
            f"{table.first(absent)}; expected one in each row"
        )
    known = in_order(texts := list(map(str, values)))
    names = source.domains if source.domains and key == "domain" else tuple(known)
    if unknown := [text for text in names if text not in known]:
        hint = did_you_mean(unknown[0], known)
        raise DataError(f"data.domains: {unknown[0]!r} is not a domain of {name}", f"; {hint}")
    places = numbers([*texts, ""], names)[codes]
    return Groups(names, places, None if train_only else places)


def _known(source: Source, entry: Entry | None, table: Table, given: Names) -> Names:
    """The names of the classes, if the settings, the data or the catalogue have them."""
    column, wanted = source.label[0], entry.keep if entry else ()
    if given or source.class_names:
        return given or source.class_names
    if table.kind(column) == "Image":
        found = (entry and entry.names) or tuple(map(str, range(source.classes or 0)))
        error_if(
            not found,
            f"{source.name!r} is a segmentation data set; give its number of classes with data.classes (pixels of "
            f"a mask are 0 to classes - 1, or {IGNORED} if they are ignored)",
        )
        return found
    found = table.classes.get(column, ())
    there = found or (tuple(map(str, table.coded(column)[0])) if wanted else ())
    if absent := [name for name in wanted if name not in there]:
        raise DataError(f"data.name={source.name!r}: the data has no class {', '.join(absent)}")
    return wanted or found


# --- series -------------------------------------------------------------------


def of_series(source: Source, table: Table) -> tuple[Source, Table]:
    """A long table, which has a row for each time of a series, with a row for each series; its inputs are [N, C, T]."""
    rows, lengths = _cut(source, table)
    first = np.cumsum(lengths) - lengths
    series = np.repeat(np.arange(len(lengths)), lengths)  # of each of the rows
    others = [*dict.fromkeys(name for key, name in _named(source) if key != "time" and name in table.names)]
    for column in others:
        _, codes = table.coded(column)
        wrong = len(np.unique(series[codes[rows] != codes[rows[first]][series]]))
        error_if(
            wrong,
            f"{source.name!r}: {wrong} of {len(first)} series have several values in {column!r}; expected one for "
            "each series",
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
    return source.model_copy(update={"inputs": tuple(new)}), made.with_columns(new)


def _cut(source: Source, table: Table) -> tuple[np.ndarray, np.ndarray]:
    """The rows in the order of their series and times, and how many each series has.

    The series are in the order of their ids, those of the training split first; without times, rows keep their order.
    If they are cut into windows, each window is a series. Rows behind the last window of a series are left out, and so
    are rows of series shorter than a window.
    """
    name, window = repr(source.name), source.window
    is_test = np.arange(len(table)) >= table.counts[0]  # a series may be in both splits
    keys = [is_test, *(_ranks(name, table, column) for column in (source.series, source.time) if column is not None)]
    twice = 0 if source.time is None else len(table) - len(np.unique(keys, axis=1).T)
    error_if(twice, f"{name} has {twice} rows with the series and the time of another row; expected one each")
    rows = np.lexsort(keys[::-1])
    ids = np.array(keys[:2])[:, rows]
    first = np.flatnonzero(np.append(True, (ids[:, 1:] != ids[:, :-1]).any(0)))
    lengths = np.diff(first, append=len(table))
    if window is None:
        return rows, lengths
    counts = np.maximum(0, (lengths - window.length) // window.step + 1)
    error_if(
        not counts.any(),
        f"{name}: no series has the {window.length} rows of a window (data.window.length); the longest has "
        f"{lengths.max()}",
    )
    if short := int((counts == 0).sum()):
        log_once(f"data.window leaves out {short} of {len(counts)} series of {name}, shorter than a window")
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)  # its number in its series
    starts = np.repeat(first, counts) + window.step * within
    return rows[starts[:, None] + np.arange(window.length)].ravel(), np.full(len(starts), window.length)


def _ranks(name: str, table: Table, column: str) -> np.ndarray:
    """The places of numbers or texts in their order."""
    values, codes = table.coded(column)
    absent = int((codes < 0).sum())
    error_if(absent, f"{name} has {absent} rows without a series or a time; expected both in each row")
    return cast(np.ndarray, np.argsort(np.argsort(np.array(values)))[codes])


# --- inputs -------------------------------------------------------------------


def inputs_of(source: Source, table: Table) -> tuple[Value, Names]:
    """The inputs of all examples, and the names of the features."""
    name, columns, names = repr(source.name), source.inputs, Names()
    if any(map(table.is_array, columns)):
        arrays = {key: _array(name, key, table.rows(name, key)) for key in columns}
        found: Value = _several(name, arrays) if len(arrays) > 1 else arrays[columns[0]]
    else:
        made = {name: rows for column in columns for name, rows in _features(source, table, column).items()}
        found, names = torch.from_numpy(np.stack([*made.values()], 1)), tuple(made)
    _check(source, found, names)
    return found, names


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
    is_wrong = np.isin(codes, [place for place, text in enumerate(values) if not _is_number(text)])
    number, total = int(is_wrong.sum()), int((codes >= 0).sum())
    if 0 < number < total / 2:
        raise DataError(
            f"{source.name!r}: {number} of {total} values of the column {column!r} are not numbers; correct "
            "them, leave their fields empty, or list the inputs in data.inputs without this column",
            f": {values[codes[is_wrong.argmax()]]!r} in {table.first(is_wrong)}",
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
    error_if(
        list(mask.shape) != expected or not ((mask == 0) | (mask == 1)).all(),
        f"{where} has a {MASK!r} of shape {list(mask.shape)}; expected {expected}, as {key!r} without its "
        "channels, and 1 or true at real positions, 0 or false at padded ones",
    )
    return {**arrays, key: values, MASK: mask.bool()}


def _array(where: str, key: str, rows: Any) -> Tensor:
    """float32, int64, or uint8 where whole numbers are pixels; truth values and bytes of a volume as they are."""
    is_image = key != MASK and (rows.ndim == 4 or (rows.ndim == 3 and rows.dtype.kind != "f"))
    is_byte = rows.dtype.kind in "iu" and (not rows.size or 0 <= rows.min() <= rows.max() <= 255)
    error_if(
        is_image and not (is_byte or rows.dtype.kind == "f"),
        f"{where} has {rows.dtype} pixels; expected whole numbers from 0 to 255, or floating-point numbers",
    )
    error_if(rows.dtype.kind not in "biuf", f"{where} has inputs of type {rows.dtype}; expected numbers")
    if is_image:  # [N, C, H, W]; the channels may come last or be missing
        rows = rows[:, None] if rows.ndim == 3 else rows
        rows = np.moveaxis(rows, -1, 1) if rows.shape[1] > 4 >= rows.shape[-1] else rows
    if not (rows.dtype == bool or (rows.dtype == np.uint8 and rows.ndim > 2)):
        kind = np.uint8 if is_image and is_byte else np.int64 if rows.dtype.kind in "iu" else np.float32
        rows = rows.astype(kind, copy=False)
    with warnings.catch_warnings(action="ignore"):  # an array may be the user's, and is only read
        return torch.from_numpy(np.require(rows, requirements=["C"]))


def _check(source: Source, inputs: Value, names: Names) -> None:
    """Raise an error for a wrong shape, infinite values, and values out of range.

    Errors count such values instead of showing them, because a site's errors are sent to the server.
    """
    main = main_input(inputs)
    shape, wanted = list(main.shape[1:]), list(source.shape)
    error_if(
        wanted and (len(wanted) != len(shape) or any(b not in (None, a) for a, b in zip(shape, wanted, strict=True))),
        f"data.shape is {wanted}, but {source.name!r} has inputs of shape {shape}",
    )
    for column, (low, high) in source.ranges.items():
        if column not in names:
            raise SettingsError(f"data.ranges has {column!r}; {did_you_mean(column, names)}")
        values = main[:, names.index(column)]
        outside, known = int(((values < low) | (values > high)).sum()), values[~values.isnan()].tolist()
        if outside:
            raise DataError(
                f"{source.name!r}: {outside} of {len(values)} rows have a value of {column!r} outside of "
                f"data.ranges, {low:g} to {high:g}; correct them, or convert their unit",
                f"; here they are from {min(known):g} to {max(known):g}",
            )
    found = counts(inputs, torch.isinf, names)
    error_if(found, f"{source.name!r} has infinite values in {found}; expected numbers")
    for values in inputs.values() if isinstance(inputs, Mapping) else [inputs]:
        if values.dtype is torch.int64 and values.numel() and (source.tokens or values is main):
            smallest, largest, most = int(values.min()), int(values.max()), source.tokens
            allowed = "0, 1, 2 and so on; give whole numbers that are not tokens as floats"
            allowed = f"0 to {most - 1} (data.tokens is {most})" if most else allowed
            error_if(
                smallest < 0 or largest >= (most or math.inf),
                f"{source.name!r} has tokens other than {allowed}",
                f": from {smallest} to {largest}",
            )


def counts(inputs: Value, where: Callable[[Tensor], Tensor], names: Names) -> str:
    """The columns with such values, and how many each has; empty if there are none."""
    found: list[tuple[str, int]] = []
    for key, values in inputs.items() if isinstance(inputs, Mapping) else [("inputs", inputs)]:
        if values.is_floating_point():
            wrong = torch.stack([where(some).sum(0) for some in values.split(_AT_ONCE)]).sum(0)
            found += zip(names, wrong.tolist(), strict=True) if names else [(key, int(wrong.sum()))]
    return few((f"{name} ({number})" for name, number in found if number), 8)


# --- targets ------------------------------------------------------------------


class Targets(NamedTuple):
    """What a model is trained to predict."""

    values: Value  # -1 or NaN where an example has no label
    names: Names  # of classes, labels or numbers
    task: Task
    absent: Tensor  # bool, whether an example has no label
    from_rows: bool = False  # whether the names of the classes are values of the column


def targets_of(source: Source, table: Table, entry: Entry | None, given: Names) -> Targets:
    """The targets of the columns of labels; `given` are the names of the classes, if the data have them elsewhere."""
    label, masks = source.label, table.kind(source.label[0]) == "Image"
    known = _known(source, entry, table, given)
    if masks:  # zeros until files are decoded
        zeros = torch.zeros(len(table), dtype=torch.int64)
        found = Targets(zeros, known, SEGMENTATION, zeros.bool())
    else:
        found = _of_columns(
            source, table, known, keeps=entry is not None and bool(entry.keep and not source.class_names)
        )
    error_if(
        found.task is SEGMENTATION and bool(_images(source, table)) != masks,
        f"data.label={label[0]!r} of {source.name!r} has the type {table.kind(label[0])}; expected a number or a "
        f"text for each example, or images and a column of masks. Its columns: {table}",
    )
    return found


def _of_columns(source: Source, table: Table, known: Names, *, keeps: bool) -> Targets:
    """Other classes than the known ones raise an error, unless the data set `keeps` only these."""
    name, label, column = repr(source.name), source.label, ", ".join(source.label)
    absent = np.any([table.absent(each) for each in label], 0)
    rows, default = np.empty(0), CLASSIFICATION
    if all(table.is_array(each) or table.is_number(each) for each in label):  # neither texts nor dates
        columns = [table.rows(name, each) for each in label]
        rows = columns[0] if len(label) == 1 else np.stack(columns, 1)
        rows = rows[:, 0] if rows.shape[1:] == (1,) else rows
        known = known if len(label) == 1 else label
        is_whole = rows.dtype.kind != "f" or all(table.kind(each).startswith(("int", "uint", "bool")) for each in label)
        if not is_whole:
            default = REGRESSION
        elif rows.ndim > 1:
            default = MULTILABEL if rows.ndim == 2 and np.isin(rows[~absent], (0, 1)).all() else SEGMENTATION
    task, without = TASKS[source.task] if source.task else default, torch.from_numpy(absent)
    if task in (CLASSIFICATION, BINARY):
        several = len(label) > 1 or rows.ndim > 1
        error_if(several, f"{name} has several values in {column!r}; expected one class for each example")
        values, names = _classes(source, table, label, known, keeps=keeps)
        return Targets(values, names, task, without, names not in (known, (*map(str, range(len(names))),)))
    no_numbers = not rows.size or rows.dtype.kind not in "iufb"
    error_if(no_numbers, f"{name} has no numbers in {column!r}; expected numbers for {task.name}")
    if task is SEGMENTATION:
        return Targets(*_dense(source, rows, known), task, without)
    found = np.array(rows, np.float32)
    found[absent] = np.nan
    error_if(
        task is MULTILABEL and not np.isin(found[~absent], (0, 1)).all(),
        f"{name}: {column!r} has values other than 0 and 1; expected them for several labels",
    )
    names = known or ((column,) if rows.ndim == 1 else tuple(map(str, range(rows.shape[-1]))))
    return Targets(torch.from_numpy(found), names, task, without)


def _classes(source: Source, table: Table, label: Names, known: Names, *, keeps: bool) -> tuple[Tensor, Names]:
    """The class number of each example, -1 where it has none, and the names of the classes.

    Whole numbers are names too, unless the classes have other names: then they are numbers of classes, from 0.
    """
    name, column = source.name, label[0]
    values, codes = table.coded(column)
    error_if(
        any(isinstance(value, float) and value % 1 for value in values),
        f"{name!r} has labels of type {table.kind(column)} in {column!r}, which are not classes; expected a whole "
        "number or a name for each example",
    )
    values = [int(value) if isinstance(value, float) else value for value in values]
    is_number = bool(values) and all(type(value) is int for value in values)
    if is_number and not known and source.classes and 0 <= min(values) <= max(values) < source.classes:
        known = tuple(map(str, range(source.classes)))
    if is_number and known and not any(text.lstrip("-").isdecimal() for text in known):
        error_if(
            not 0 <= min(values) <= max(values) < len(known),
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
    least, most = counted.min(initial=0), counted.max(initial=0)
    error_if(
        counted.dtype.kind not in "iub" or not 0 <= least <= most < len(known),
        f"{source.name!r} has {len(known)} classes, so labels must be 0 to {len(known) - 1}, or {IGNORED}",
        f", but they are {least} to {most}",
    )
    return torch.from_numpy(rows.astype(np.uint8)), known
