"""Label columns become targets, by their types: texts and whole numbers are classes, floats are numbers to predict.

Several columns of floats are several numbers, several of 0 and 1 several labels. `data.task` decides otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbn_flwr.batch import Value
from fedbn_flwr.errors import DataError, did_you_mean
from fedbn_flwr.tasks import (
    BINARY,
    CLASSIFICATION,
    MULTILABEL,
    REGRESSION,
    SEGMENTATION,
    SEVERAL,
    TASKS,
    Task,
)

from . import IGNORED
from .dataset import numbers
from .inputs import Parts
from .source import Source

Targets = dict[str, Value]  # by split


def targets_of(
    source: Source, label: Mapping[str, Parts], known: Sequence[str], *, numbered: bool
) -> tuple[Targets, tuple[str, ...], Task]:
    """The targets of each split, the names of the classes, labels or numbers, and the task.

    `known` are the names of the classes, if something gives them. Whole numbers are places among them if `numbered`,
    and else names.
    """
    for column, parts in label.items():
        for part, rows in parts.items():
            _check_rows(source, part, column, rows)
    columns = list(label.values())
    column, parts = ", ".join(label), columns[0]
    if len(columns) > 1:
        if len({rows.dtype.kind == "f" for each in columns for rows in each.values()}) > 1 and source.task is None:
            raise DataError(
                f"data.label has whole numbers and floats in {column} of {source.name!r}; expected all floats, or all "
                "0 and 1; data.task: regression takes any numbers"
            )
        known, parts = tuple(label), {part: np.stack([each[part] for each in columns], 1) for part in parts}
    task = _task(source, parts)
    rows = next(iter(parts.values()))
    if task in (CLASSIFICATION, BINARY):
        return *_classes(source, column, parts, tuple(known), numbered), task
    if task is SEGMENTATION:
        return *_dense(source, parts, tuple(known)), task
    if task is MULTILABEL and not all(np.isin(some, (0, 1)).all() for some in parts.values()):
        raise DataError(f"{source.name!r}: {column!r} has values other than 0 and 1; expected them for several labels")
    names = tuple(known) or ((column,) if rows.ndim == 1 else tuple(map(str, range(rows.shape[1]))))
    return {part: _floats(some) for part, some in parts.items()}, names, task


def _task(source: Source, parts: Parts) -> Task:
    if source.task is not None:
        return TASKS[source.task]
    rows = next(iter(parts.values()))
    if rows.dtype.kind == "f":
        return REGRESSION
    if rows.ndim == 1 or rows.dtype.kind in "OSU":
        return CLASSIFICATION
    is_yes_no = rows.dtype.kind == "b" or all(np.isin(some, (0, 1)).all() for some in parts.values())
    return MULTILABEL if rows.ndim == 2 and is_yes_no else SEGMENTATION


def several(label: Mapping[str, Parts]) -> tuple[Targets, tuple[str, ...], Task]:
    """Targets of several kinds, which only a loss of the user compares with a model's outputs."""
    found: dict[str, dict[str, Tensor]] = {}
    for key, parts in label.items():
        for part, rows in parts.items():
            is_whole = rows.dtype.kind in "iu"
            found.setdefault(part, {})[key] = torch.from_numpy(rows.astype(np.int64)) if is_whole else _floats(rows)
    return dict(found), tuple(label), SEVERAL


def _floats(rows: np.ndarray) -> Tensor:
    return torch.from_numpy(rows.astype(np.float32))


def _check_rows(source: Source, part: str, column: str, rows: Any) -> None:
    if not isinstance(rows, np.ndarray) or not rows.size:
        raise DataError(f"{source.name!r}: {part} has labels of different shapes in {column!r}; expected one shape")
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
    source: Source, column: str, parts: Parts, known: tuple[str, ...], numbered: bool
) -> tuple[Targets, tuple[str, ...]]:
    """The class number of each example, and the names of the classes."""
    name, rows = repr(source.name), np.concatenate([*parts.values()])
    if rows.ndim > 1 or (rows.dtype.kind == "f" and (rows % 1).any()):
        raise DataError(
            f"{name} has labels of type {rows.dtype} and shape {list(rows.shape)} in {column!r}, which are no classes; "
            "expected a whole number or a name for each example"
        )
    if rows.dtype.kind == "f":
        parts, rows = {part: some.astype(np.int64) for part, some in parts.items()}, rows.astype(np.int64)
    if numbered and rows.dtype.kind in "iu":
        known = known or tuple(map(str, range(source.classes or int(rows.max()) + 1)))
        if not 0 <= int(rows.min()) <= int(rows.max()) < len(known):
            raise DataError(
                f"{name} has labels from {int(rows.min())} to {int(rows.max())}, but {len(known)} classes; expected 0 "
                f"to {len(known) - 1}"
            )
        found: Targets = {part: torch.from_numpy(some.astype(np.int64)) for part, some in parts.items()}
        return found, known
    known = known or tuple(map(str, sorted(set(rows.tolist()))))
    texts = {part: list(map(str, some.tolist())) for part, some in parts.items()}
    unknown = sorted({text for some in texts.values() for text in some}.difference(known))
    if unknown and (source.class_names or numbered):
        raise DataError(
            f"{name} has the class {unknown[0]!r} in {column!r}, which is not in data.class_names; "
            f"{did_you_mean(unknown[0], known)}"
        )
    return {part: numbers(some, known) for part, some in texts.items()}, known


def _dense(source: Source, parts: Parts, known: tuple[str, ...]) -> tuple[Targets, tuple[str, ...]]:
    counted = np.concatenate([rows[rows != IGNORED] for rows in parts.values()])
    known = known or tuple(map(str, range(source.classes or int(counted.max(initial=0)) + 1)))
    if counted.dtype.kind not in "iub" or not 0 <= counted.min(initial=0) <= counted.max(initial=0) < len(known):
        raise DataError(
            f"{source.name!r} has labels from {counted.min(initial=0)} to {counted.max(initial=0)}, but {len(known)} "
            f"classes; expected 0 to {len(known) - 1}, or {IGNORED}"
        )
    return {part: torch.from_numpy(rows.astype(np.uint8)) for part, rows in parts.items()}, known
