"""Columns of values become the inputs of a model and its targets.

Inputs:

- columns with one number for each example are features: float32 [N, columns]; texts only as `data.categories`
- arrays, and columns of lists, keep their shape: [N, features], [N, channels, T], [N, channels, height, width] and so
  on. Whole numbers are tokens in [N, T], and pixels from 0 to 255 in arrays of more dimensions
- several arrays become a dict of tensors

Targets, by the types of the label columns: texts and whole numbers are classes, floats are regression targets.
Several columns of floats are several targets, several of 0 and 1 several labels. `data.task` decides otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

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

BySplit = dict[str, np.ndarray]  # the values of all examples by split
Targets = dict[str, Value]  # by split


def as_rows(where: str, given: Any) -> np.ndarray:
    """The values of all examples."""
    if isinstance(given, Mapping):
        raise DataError(
            f"{where} is a mapping; expected an array, or several whose names are in data.inputs, such as [a, b]"
        )
    if isinstance(given, np.ndarray) and given.dtype != object:
        return given
    if isinstance(given, Tensor):
        return (given.float() if given.dtype is torch.bfloat16 else given).cpu().numpy()
    try:
        return np.stack([np.asarray(row.cpu() if isinstance(row, Tensor) else row) for row in given])
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{where} has values that are not arrays of one shape; pad series to one length, and give their masks too: "
            "data.inputs: [inputs, mask]",
            f" ({error})",
        ) from None


# --- inputs -------------------------------------------------------------------


def inputs_of(source: Source, columns: Mapping[str, BySplit]) -> tuple[dict[str, Value], tuple[str, ...]]:
    """The inputs of each split, and the names of the features."""
    splits = next(iter(columns.values()))
    names: tuple[str, ...] = ()
    found: dict[str, Value] = {}
    if all(rows.ndim == 1 for parts in columns.values() for rows in parts.values()):
        known = {column: list(map(str, source.categories.get(column, ()))) for column in columns}
        names = tuple(
            name for column, texts in known.items() for name in [f"{column}={text}" for text in texts] or [column]
        )
        for part in splits:
            made = [_feature(source, column, parts[part], known[column]) for column, parts in columns.items()]
            found[part] = torch.from_numpy(np.concatenate(made, 1))
    else:
        for part in splits:
            where = f"{source.name!r}: {part}"
            some = {key: _array(where, key, parts[part]) for key, parts in columns.items()}
            found[part] = _several(where, some) if len(some) > 1 else next(iter(some.values()))
    for part, inputs in found.items():
        _check(source, part, inputs, names)
    return found, names


def _feature(source: Source, column: str, rows: np.ndarray, known: Sequence[str]) -> np.ndarray:
    """A column [N, 1]; texts become a column of 0 and 1 for each known value, with NaN where the text is missing."""
    if known:
        absent = np.array([row is None or row != row for row in rows])
        texts = np.where(absent, known[0], rows.astype(str))
        if other := sorted(set(texts.tolist()).difference(known)):
            raise DataError(
                f"data.categories lacks {len(other)} of the values of the column {column!r} of {source.name!r}",
                f", such as {other[0]!r}; {did_you_mean(other[0], known)}",
            )
        rows = np.where(absent[:, None], np.nan, texts[:, None] == np.array(known))
    elif rows.dtype.kind in "OSU" and (few := sorted({str(row) for row in rows if row is not None})[:4]):
        check_texts(source, column, rows)
        raise DataError(
            f"{source.name!r}: the column {column!r} has texts, which cannot be inputs; leave it out of data.inputs, "
            "or give its values",
            f": data.categories: {{{column}: [{', '.join(few)}]}}",
        )
    return np.asarray(rows, np.float32).reshape(len(rows), -1)


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
    values = arrays[key]
    values = values[:, None] if values.ndim == 1 else values
    if mask is None:
        return {**arrays, key: values}
    expected = [len(values), values.shape[-1]]
    if list(mask.shape) != expected or not ((mask == 0) | (mask == 1)).all():
        raise DataError(
            f"{where} has a {MASK!r} of shape {list(mask.shape)}; expected {expected}, as {key!r} without its "
            "channels, and 1 or true at real positions, 0 or false at padded ones"
        )
    return {**arrays, key: values, MASK: mask.bool()}


def _array(where: str, key: str, rows: np.ndarray) -> Tensor:
    is_image = rows.ndim == 4 or (rows.ndim == 3 and rows.dtype.kind != "f")
    return _images(where, rows) if is_image and key != MASK else _number(where, rows)


def _number(where: str, rows: np.ndarray) -> Tensor:
    """float32, int64, or as they are: truth values and bytes of more than two dimensions."""
    if rows.dtype == object:
        with suppress(TypeError, ValueError):
            rows = rows.astype(np.float32)  # None becomes NaN
    if rows.dtype.kind not in "biuf":
        raise DataError(f"{where} has inputs of type {rows.dtype}; expected numbers")
    if rows.dtype == bool or (rows.dtype == np.uint8 and rows.ndim > 2):
        return torch.from_numpy(np.array(rows))
    return torch.from_numpy(np.array(rows, np.int64 if rows.dtype.kind in "iu" else np.float32))


def _check(source: Source, part: str, inputs: Value, names: Sequence[str]) -> None:
    """Raise an error for a wrong shape, infinite values, missing values that aren't replaced, and values out of range.

    Errors count such values instead of showing them, because a site's errors are sent to the server.
    """
    shape, wanted = list(main_input(inputs).shape[1:]), list(source.shape)
    if wanted and (len(wanted) != len(shape) or any(b not in (None, a) for a, b in zip(shape, wanted, strict=True))):
        raise DataError(f"data.shape is {wanted}, but {source.name!r} has inputs of shape {shape}")
    for column, (low, high) in source.ranges.items():
        if column not in names:
            raise SettingsError(f"data.ranges has {column!r}; {did_you_mean(column, names)}")
        values = main_input(inputs)[:, names.index(column)]
        if outside := int(((values < low) | (values > high)).sum()):
            raise DataError(
                f"{source.name!r}: {part}: {outside} of {len(values)} rows have a value of {column!r} outside of "
                f"data.ranges, {low:g} to {high:g}"
            )
    for key, values in inputs.items() if isinstance(inputs, Mapping) else [("", inputs)]:
        if values.is_floating_point():
            absent = values.isnan()
            if values.isinf().any():
                found = _counts(values.isinf(), names, key)
                raise DataError(f"{source.name!r}: {part} has infinite values in {found}; expected numbers")
            if absent.any() and not source.missing:
                raise DataError(
                    f"{source.name!r}: of the {len(values)} rows of {part} some have no value (NaN or null) in "
                    f"{_counts(absent, names, key)}; set data.missing: mean, which puts the mean of the column in "
                    "their place, or drop, which leaves out the rows"
                )
        elif values.dtype is torch.int64 and values.numel() and (source.tokens or values is main_input(inputs)):
            low, high = int(values.min()), int(values.max())
            if low < 0 or high >= (source.tokens or math.inf):
                limit = (
                    f"0 to {source.tokens - 1} (data.tokens is {source.tokens})"
                    if source.tokens
                    else ("0, 1, 2 and so on; give whole numbers that are not tokens as floats")
                )
                raise DataError(f"{source.name!r}: {part} has tokens other than {limit}", f": from {low} to {high}")


def _counts(wrong: Tensor, names: Sequence[str], key: str) -> str:
    """The columns with such values, and how many each has."""
    counts = wrong.sum(0) if names else wrong.sum().reshape(1)
    found = zip(names or (key or "inputs",), counts.tolist(), strict=True)
    return few((f"{name} ({number})" for name, number in found if number), 8)


# --- images -------------------------------------------------------------------


def _images(where: str, array: np.ndarray) -> Tensor:
    """uint8 or float32 [N, C, H, W], of images whose channels may come last or be missing."""
    is_byte = array.dtype.kind in "iu" and (not array.size or 0 <= array.min() <= array.max() <= 255)
    if not is_byte and array.dtype.kind != "f":
        raise DataError(
            f"{where} has {array.dtype} pixels; expected whole numbers from 0 to 255, or floating-point numbers"
        )
    if array.ndim == 3:
        array = array[:, None]
    if array.shape[1] > 4 >= array.shape[-1]:
        array = np.moveaxis(array, -1, 1)
    return torch.from_numpy(np.array(array, np.uint8 if is_byte else np.float32, order="C"))


# --- targets ------------------------------------------------------------------


def targets_of(
    source: Source, label: Mapping[str, BySplit], known: Sequence[str], *, numbered: bool
) -> tuple[Targets, tuple[str, ...], Task]:
    """The targets of each split, the names of the classes, labels or numbers, and the task.

    `known` are the names of the classes, if they are known. Whole numbers are indices into them if `numbered`, else
    names.
    """
    for column, parts in label.items():
        for part, rows in parts.items():
            _check_rows(source, part, column, rows)
    columns = list(label.values())
    column, parts = ", ".join(label), columns[0]
    if len(columns) > 1:
        known, parts = tuple(label), {part: np.stack([column[part] for column in columns], 1) for part in parts}
    task = _task(source, parts)
    rows = next(iter(parts.values()))
    if task in (CLASSIFICATION, BINARY):
        return *_classes(source, column, parts, tuple(known), numbered), task
    if task is SEGMENTATION:
        return *_dense(source, parts, tuple(known)), task
    if task is MULTILABEL and not all(np.isin(some, (0, 1)).all() for some in parts.values()):
        raise DataError(f"{source.name!r}: {column!r} has values other than 0 and 1; expected them for several labels")
    names = tuple(known) or ((column,) if rows.ndim == 1 else tuple(map(str, range(rows.shape[1]))))
    return {part: torch.from_numpy(some.astype(np.float32)) for part, some in parts.items()}, names, task


def _task(source: Source, parts: BySplit) -> Task:
    if source.task is not None:
        return TASKS[source.task]
    rows = next(iter(parts.values()))
    if rows.dtype.kind == "f":
        return REGRESSION
    if rows.ndim == 1 or rows.dtype.kind in "OSU":
        return CLASSIFICATION
    is_yes_no = rows.dtype.kind == "b" or all(np.isin(some, (0, 1)).all() for some in parts.values())
    return MULTILABEL if rows.ndim == 2 and is_yes_no else SEGMENTATION


def _check_rows(source: Source, part: str, column: str, rows: np.ndarray) -> None:
    if not rows.size:
        raise DataError(f"{source.name!r}: {part} has no labels in {column!r}; expected one for each example")
    absent = np.isnan(rows) if rows.dtype.kind == "f" else rows == np.array(None) if rows.dtype.kind == "O" else None
    if absent is not None and absent.any():
        first = int(np.argwhere(absent)[0][0])
        raise DataError(
            f"{source.name!r}: {int(absent.sum())} of {len(rows)} rows of {part} have no value in {column!r}, the "
            f"first is row {first}; expected one in each row"
        )
    if rows.dtype.kind not in "OSUiufb" or (rows.dtype.kind in "OSU" and rows.ndim > 1):
        raise DataError(
            f"{source.name!r}: {part} has labels of type {rows.dtype} and shape {list(rows.shape)}; expected a number "
            "or a name for each example, or masks [examples, height, width]"
        )


def _classes(
    source: Source, column: str, parts: BySplit, known: tuple[str, ...], numbered: bool
) -> tuple[Targets, tuple[str, ...]]:
    """The class number of each example, and the names of the classes."""
    name, rows = repr(source.name), np.concatenate([*parts.values()])
    if rows.ndim > 1 or (rows.dtype.kind == "f" and (rows % 1).any()):
        raise DataError(
            f"{name} has labels of type {rows.dtype} and shape {list(rows.shape)} in {column!r}, which are not "
            "classes; expected a whole number or a name for each example"
        )
    if rows.dtype.kind == "f":
        parts, rows = {part: some.astype(np.int64) for part, some in parts.items()}, rows.astype(np.int64)
    if numbered and rows.dtype.kind in "iu":
        if not known and source.classes is None and len(some := np.unique(rows)) <= rows.max():
            raise DataError(
                f"{name} has class numbers in {column!r} that leave out some from 0 to the largest; set data.classes, "
                "the number of classes, if these data lack some, or give the labels as texts if these are all",
                f": found {few(map(str, some), 12)}",
            )
        known = known or tuple(map(str, range(source.classes or int(rows.max()) + 1)))
        if not 0 <= int(rows.min()) <= int(rows.max()) < len(known):
            raise DataError(
                f"{name} has {len(known)} classes, so labels must be 0 to {len(known) - 1}",
                f", but they are {int(rows.min())} to {int(rows.max())}",
            )
        found: Targets = {part: torch.from_numpy(some.astype(np.int64)) for part, some in parts.items()}
        return found, known
    # Texts and whole numbers are compared as texts: the column of one split may be of another type.
    ordered = sorted(set(rows.tolist()), key=str if rows.dtype.kind == "O" else None)
    known = known or tuple(dict.fromkeys(map(str, ordered)))
    texts = {part: list(map(str, some.tolist())) for part, some in parts.items()}
    unknown = sorted({text for some in texts.values() for text in some}.difference(known))
    if unknown and (source.class_names or numbered):
        raise DataError(
            f"data.class_names lacks {len(unknown)} of the classes in {column!r} of {name}",
            f", such as {unknown[0]!r}; {did_you_mean(unknown[0], known)}",
        )
    return {part: numbers(some, known) for part, some in texts.items()}, known


def _dense(source: Source, parts: BySplit, known: tuple[str, ...]) -> tuple[Targets, tuple[str, ...]]:
    counted = np.concatenate([rows[rows != IGNORED] for rows in parts.values()])
    known = known or tuple(map(str, range(source.classes or int(counted.max(initial=0)) + 1)))
    if counted.dtype.kind not in "iub" or not 0 <= counted.min(initial=0) <= counted.max(initial=0) < len(known):
        raise DataError(
            f"{source.name!r} has {len(known)} classes, so labels must be 0 to {len(known) - 1}, or {IGNORED}",
            f", but they are {counted.min(initial=0)} to {counted.max(initial=0)}",
        )
    return {part: torch.from_numpy(rows.astype(np.uint8)) for part, rows in parts.items()}, known
