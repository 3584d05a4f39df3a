"""The one form of data: a table, whose columns have names and types.

Files, folders, data sets of the hub and arrays become tables when they are opened. Whatever comes later finds its
columns by name.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, bfloat16

from fedbn_flwr.errors import DataError

from .streamed import Streamed

PICTURES = {".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"}
_NUMBERS = ("int", "uint", "float", "double", "bool", "decimal")
_SHOWN = 40  # columns in an error

Names = tuple[str, ...]


@dataclass(frozen=True)
class Column:
    """A column: the type of its values, and a function that reads all of them."""

    # "int64", "string" and so on; "Image" of image files; "array", or a class of `datasets`, of several values
    kind: str
    read: Callable[[], np.ndarray]  # NaN or None where a value is missing
    names: Names = ()  # of the classes for which its numbers stand

    @property
    def is_number(self) -> bool:
        return self.kind.startswith(_NUMBERS)

    @property
    def is_text(self) -> bool:
        return self.kind.endswith("string")

    @property
    def is_single(self) -> bool:
        """Whether each example has one number, text or date."""
        return bool(self.names) or not (self.kind == "array" or self.kind[0].isupper())


@dataclass(frozen=True)
class Table:
    """The examples of a split by columns."""

    columns: Mapping[str, Column]
    files: Any = None  # the `datasets.Dataset` with its image files
    commit: str | None = None  # of the hub's repository that it is from

    def __len__(self) -> int:
        return len(self.files if self.files is not None else next(iter(self.columns.values())).read())

    def __str__(self) -> str:
        shown = ", ".join(f"{name} ({self.columns[name].kind})" for name in list(self.columns)[:_SHOWN])
        return shown + (f", ... ({len(self.columns)} columns)" if len(self.columns) > _SHOWN else "")


Tables = Mapping[str, Table]  # by split: "train", and "test" unless a share of "train" is held out


def table_of(name: str, split: Any, inputs: Names = ()) -> Table:
    """A split of `datasets`, or a mapping of arrays, as a table. `name` is the data set's, for errors."""
    where = repr(name)
    if isinstance(split, Mapping):
        return Table({column: _of_array(f"{where}: {column!r}", given) for column, given in split.items()})
    columns = {column: _of_feature(f"{where}: {column!r}", split, column, inputs) for column in split.features}
    return Table(columns, split, _commit(split))


def _commit(split: Any) -> str | None:
    for url in getattr(split.info, "download_checksums", None) or ():
        if found := re.search(r"@([0-9a-f]{40})/", url):
            return found[1]
    return None


# --- arrays ------------------------------------------------------------------


def _of_array(where: str, given: Any) -> Column:
    read = functools.partial(as_rows, where, given)
    with suppress(TypeError, DataError):  # no rows; an error if the column is used
        if not isinstance(given, Mapping) and len(given) > 0 and as_rows(where, given[:1]).ndim == 1:
            rows = read()
            present = rows
            if rows.dtype == object:
                present = np.array([value for value in rows.tolist() if value is not None and value == value])
                rows = rows if present.dtype.kind in "OSU" else rows.astype(np.float64)  # None becomes NaN
            kind = "string" if present.dtype.kind in "OSU" else present.dtype.name
            return Column(kind, lambda: rows)
    return Column("array", read)


def as_rows(where: str, given: Any) -> np.ndarray:
    """The values of all examples."""
    if isinstance(given, Mapping):
        raise DataError(
            f"{where} is a mapping; expected an array, or several whose names are in data.inputs, such as [a, b]"
        )
    if isinstance(given, Streamed) or (isinstance(given, np.ndarray) and given.dtype != object):
        return given  # type: ignore[return-value]
    if isinstance(given, Tensor):
        return (given.float() if given.dtype is bfloat16 else given).cpu().numpy()
    try:
        return np.stack([np.asarray(row.cpu() if isinstance(row, Tensor) else row) for row in given])
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{where} has values that are not arrays of one shape; pad series to one length, and give their masks too: "
            "data.inputs: [inputs, mask]",
            f" ({error})",
        ) from None


# --- columns of `datasets` ---------------------------------------------------


def _of_feature(where: str, split: Any, column: str, inputs: Names) -> Column:
    """A column of image files, as bytes or as paths, has the type Image."""
    feature = split.features[column]
    kinds = feature if isinstance(feature, dict) else {"bytes": feature}
    types = {key: getattr(kind, "dtype", None) for key, kind in kinds.items()}
    is_file = types.keys() <= {"bytes", "path"} and types.get("bytes") in ("binary", "large_binary")
    is_path = inputs == (column,) and types.get("bytes") in ("string", "large_string")
    names = tuple(getattr(feature, "names", ()))
    is_value = type(feature).__name__ == "Value"
    kind = str(feature.dtype) if is_value else type(feature).__name__
    if is_file or (is_path and len(split) and str(split[0][column]).lower().endswith(tuple(PICTURES))):
        kind, is_value = "Image", False
    if not (is_value or names):
        return Column(kind, lambda: as_rows(where, split.with_format("numpy")[column][:]))
    return Column(kind, functools.partial(_single, where, split, column, names), names)


def _single(where: str, split: Any, column: str, names: Names) -> np.ndarray:
    """Numbers or texts; the numbers of a column with class names become names."""
    import pyarrow as pa

    values = split.select_columns([column]).with_format("arrow")[:].column(0)
    is_special = pa.types.is_decimal(values.type) or (pa.types.is_boolean(values.type) and values.null_count)
    rows = (values.cast(pa.float64()) if is_special else values).to_numpy()
    if not names:
        return np.asarray(rows)
    if (wrong := np.flatnonzero((rows < 0) | (rows >= len(names)))).size:
        raise DataError(
            f"{where} has numbers outside of 0 to {len(names) - 1}, the classes that have names",
            f": {int(rows[wrong[0]])} in row {wrong[0]}",
        )
    texts = [None if row != row else names[int(row)] for row in rows.tolist()]
    return np.array(texts, object if values.null_count else None)
