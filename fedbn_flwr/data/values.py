"""Columns of values become the inputs of a model and its targets.

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
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from fedbn_flwr.batch import Value
from fedbn_flwr.errors import DataError, SettingsError, did_you_mean, few
from fedbn_flwr.tasks import (
    BINARY,
    CLASSIFICATION,
    MULTILABEL,
    REGRESSION,
    SEGMENTATION,
    TASKS,
    Task,
)

from . import IGNORED
from .dataset import numbers
from .examples import MASK, main_input, main_key
from .source import Source
from .streamed import Streamed
from .table import Column, Names, Tables

_COMMAS = re.compile(r"[+-]?\d+(,\d+)*")
BySplit = dict[str, np.ndarray]  # the values of all examples by split


# --- inputs -------------------------------------------------------------------


def inputs_of(source: Source, tables: Tables, columns: Names) -> tuple[dict[str, Value], Names]:
    """The inputs of each split, and the names of the features."""
    found: dict[str, Value] = {}
    features: Names = ()
    for part, table in tables.items():
        where = f"{source.name!r}: {part}"
        read = {column: table.columns[column].read() for column in columns}
        if all(rows.ndim == 1 for rows in read.values()):
            made = {
                name: values
                for column, rows in read.items()
                for name, values in _features(source, column, table.columns[column], rows).items()
            }
            features, found[part] = tuple(made), torch.from_numpy(np.stack([*made.values()], 1))
        else:
            some = {key: _array(where, key, rows) for key, rows in read.items()}
            found[part] = _several(where, some) if len(some) > 1 else next(iter(some.values()))
        _check(source, part, found[part], features)
    return found, features


def _features(source: Source, name: str, column: Column, rows: np.ndarray) -> dict[str, np.ndarray]:
    """A column of numbers [N] by its name, or one of 0 and 1 for each of its categories; NaN where it has no value."""
    known = list(map(str, source.categories.get(name, ())))
    if known:
        values, absent = _whole(column, rows)
        texts = np.where(absent, known[0], values.astype(str))
        if other := sorted(set(texts.tolist()).difference(known)):
            raise DataError(
                f"data.categories lacks {len(other)} of the values of the column {name!r} of {source.name!r}",
                f", such as {other[0]!r}; {did_you_mean(other[0], known)}",
            )
        return {f"{name}={text}": np.where(absent, np.nan, texts == text).astype(np.float32) for text in known}
    if column.is_text or column.names:
        check_texts(source, name, rows)
        some = sorted({str(row) for row in rows if row is not None})
        if (commas := [text for text in some if "," in text]) and all(map(_COMMAS.fullmatch, some)):
            raise DataError(
                f"{source.name!r}: the column {name!r} has numbers with commas; write 150.5 in place of 150,5 (and "
                "1500 in place of 1,500), or separate the columns by semicolons, between which commas are decimal",
                f": {commas[0]!r}",
            )
        raise DataError(
            f"{source.name!r}: the column {name!r} has texts, which cannot be inputs; leave it out of data.inputs, "
            "or give its values",
            f": data.categories: {{{name}: [{', '.join(some[:4])}]}}",
        )
    return {name: np.asarray(rows, np.float32)}


def check_texts(source: Source, column: str, rows: np.ndarray) -> None:
    """Raise an error for a column of numbers with a few stray texts, which make it a column of texts."""
    import pandas as pd

    texts = pd.Series(rows).dropna()
    wrong = texts[pd.to_numeric(texts, errors="coerce").isna()]
    if 0 < len(wrong) < len(texts) / 2:
        raise DataError(
            f"{source.name!r}: {len(wrong)} of {len(texts)} values of the column {column!r} are not numbers; correct "
            "them, leave their fields empty, or list the inputs in data.inputs without this column",
            f": {wrong.iloc[0]!r} in row {wrong.index[0]}",
        )


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
    if rows.dtype == object:
        with suppress(TypeError, ValueError):
            rows = rows.astype(np.float32)  # None becomes NaN
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
    return torch.from_numpy(np.array(rows, order="C"))


def _check(source: Source, part: str, inputs: Value, names: Names) -> None:
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
                f"{source.name!r}: {part}: {outside} of {len(values)} rows have a value of {column!r} outside of "
                f"data.ranges, {low:g} to {high:g}; correct them, or convert their unit",
                "; here they are from {:g} to {:g}".format(*values[~values.isnan()].aminmax()),
            )
    if found := counts(inputs, torch.isinf, names):
        raise DataError(f"{source.name!r}: {part} has infinite values in {found}; expected numbers")
    for values in inputs.values() if isinstance(inputs, Mapping) else [inputs]:
        if values.dtype is torch.int64 and values.numel() and (source.tokens or values is main):
            smallest, largest = int(values.min()), int(values.max())
            if smallest < 0 or largest >= (source.tokens or math.inf):
                raise DataError(
                    f"{source.name!r}: {part} has tokens other than "
                    + (
                        f"0 to {source.tokens - 1} (data.tokens is {source.tokens})"
                        if source.tokens
                        else "0, 1, 2 and so on"
                    )
                    + ("" if source.tokens else "; give whole numbers that are not tokens as floats"),
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
    """What a model is trained to predict, by split."""

    values: Mapping[str, Value]  # -1 or NaN where an example has no label
    names: Names  # of classes, labels or numbers
    task: Task
    absent: BySplit  # bool, whether an example has no label


def targets_of(source: Source, tables: Tables, label: Names, known: Names, *, keeps: bool) -> Targets:
    """The targets of columns. `known` are the names of the classes, if they are known; others raise an error, unless
    the data set `keeps` only these."""
    rows: BySplit = {}
    absent: BySplit = {}
    for part, table in tables.items():
        read = [_labels(f"{source.name!r}: {part}", name, table.columns[name]) for name in label]
        (rows[part], absent[part]) = read[0]
        if len(read) > 1:
            known = label
            rows[part] = np.stack([values for values, _ in read], 1)
            absent[part] = np.any([gaps for _, gaps in read], 0)
    column, some = ", ".join(label), next(iter(rows.values()))
    task = _task(source, rows)
    if task in (CLASSIFICATION, BINARY):
        return Targets(*_classes(source, column, rows, absent, known, keeps=keeps), task, absent)
    if task is SEGMENTATION:
        return Targets(*_dense(source, rows, known), task, absent)
    if some.dtype.kind in "OSU":
        raise DataError(f"{source.name!r} has texts in {column!r}; expected numbers for {task.name}")
    values = {part: np.array(each, np.float32) for part, each in rows.items()}
    for part, gaps in absent.items():
        values[part][gaps] = np.nan
        if task is MULTILABEL and not np.isin(values[part][~gaps], (0, 1)).all():
            raise DataError(
                f"{source.name!r}: {column!r} has values other than 0 and 1; expected them for several labels"
            )
    names = known or ((column,) if some.ndim == 1 else tuple(map(str, range(some.shape[1]))))
    return Targets({part: torch.from_numpy(each) for part, each in values.items()}, names, task, absent)


def _labels(where: str, name: str, column: Column) -> tuple[np.ndarray, np.ndarray]:
    """The labels of a column, and which are missing."""
    rows = column.read()
    if rows.ndim == 2 and rows.shape[1] == 1:
        rows = rows[:, 0]
    if not rows.size:
        raise DataError(f"{where} has no labels in {name!r}; expected one for each example")
    if rows.dtype.kind not in "OSUiufb" or (rows.dtype.kind in "OSU" and rows.ndim > 1):
        raise DataError(
            f"{where} has labels of type {rows.dtype} and shape {list(rows.shape)}; expected a number or a name for "
            "each example, or masks [examples, height, width]"
        )
    return _whole(column, rows)


def _whole(column: Column, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The values, and which are missing. Whole numbers of a column with gaps, which are floats, become whole again."""
    gaps = (rows != rows) | (rows == np.array(None)) if rows.dtype == object else rows != rows
    absent = np.any(np.reshape(gaps, (len(rows), -1)), axis=1)
    if rows.dtype.kind == "f" and column.kind.startswith(("int", "uint", "bool")):
        rows = np.where(absent, 0, rows).astype(column.kind)
    return rows, absent


def _task(source: Source, parts: BySplit) -> Task:
    rows = next(iter(parts.values()))
    if source.task is not None or rows.dtype.kind == "f":
        return TASKS[source.task] if source.task else REGRESSION
    if rows.ndim == 1:
        return CLASSIFICATION
    is_yes_no = all(np.isin(some, (0, 1)).all() for some in parts.values())
    return MULTILABEL if rows.ndim == 2 and is_yes_no else SEGMENTATION


def _classes(
    source: Source, column: str, parts: BySplit, absent: BySplit, known: Names, *, keeps: bool
) -> tuple[dict[str, Value], Names]:
    """The class number of each example, and the names of the classes.

    Whole numbers are names too, unless the classes have other names: then they are numbers of classes, from 0.
    """
    name, there = repr(source.name), np.concatenate([rows[~absent[part]] for part, rows in parts.items()])
    if there.ndim > 1 or (there.dtype.kind == "f" and (there % 1).any()):
        raise DataError(
            f"{name} has labels of type {there.dtype} and shape {list(there.shape)} in {column!r}, which are not "
            "classes; expected a whole number or a name for each example"
        )
    if there.dtype.kind == "f":
        parts = {part: np.where(absent[part], 0, rows).astype(np.int64) for part, rows in parts.items()}
        there = there.astype(np.int64)
    is_number = there.dtype.kind in "iu" and there.size > 0
    if is_number and not known and source.classes and 0 <= there.min() <= there.max() < source.classes:
        known = tuple(map(str, range(source.classes)))
    if is_number and known and not any(text.lstrip("-").isdecimal() for text in known):
        if not 0 <= there.min() <= there.max() < len(known):
            raise DataError(
                f"{name} has {len(known)} classes, so labels must be 0 to {len(known) - 1}",
                f", but they are {there.min()} to {there.max()}",
            )
        found = {part: torch.from_numpy(rows.astype(np.int64)) for part, rows in parts.items()}
    else:
        # As texts: the column of one split may be of another type.
        ordered = dict.fromkeys(map(str, sorted(set(there.tolist()), key=str if there.dtype.kind == "O" else None)))
        known = known or tuple(ordered)
        if (unknown := [text for text in ordered if text not in known]) and not keeps:
            raise DataError(
                f"data.class_names lacks {len(unknown)} of the classes in {column!r} of {name}",
                f", such as {unknown[0]!r}; {did_you_mean(unknown[0], known)}",
            )
        found = {part: numbers(list(map(str, rows.tolist())), known) for part, rows in parts.items()}
    return {part: rows.masked_fill(torch.from_numpy(absent[part]), -1) for part, rows in found.items()}, known


def _dense(source: Source, parts: BySplit, known: Names) -> tuple[dict[str, Value], Names]:
    counted = np.concatenate([rows[rows != IGNORED] for rows in parts.values()])
    known = known or tuple(map(str, range(source.classes or int(counted.max(initial=0)) + 1)))
    if counted.dtype.kind not in "iub" or not 0 <= counted.min(initial=0) <= counted.max(initial=0) < len(known):
        raise DataError(
            f"{source.name!r} has {len(known)} classes, so labels must be 0 to {len(known) - 1}, or {IGNORED}",
            f", but they are {counted.min(initial=0)} to {counted.max(initial=0)}",
        )
    return {part: torch.from_numpy(rows.astype(np.uint8)) for part, rows in parts.items()}, known
