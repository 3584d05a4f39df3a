"""The one form of data: an Arrow table, whose columns have names and types. The rows of the training split come first.

Files, folders, data sets of the hub and arrays become a table when they are opened. Arrays are not copied, and files
larger than the memory stay on the disk. A column has numbers, texts or dates, arrays of one shape, or image files, by
their bytes or by their paths. Whatever comes later finds its columns by name.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from fedbn_flwr.errors import DataError, error_if, few

PICTURES = {".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"}
FILE = pa.struct({"bytes": pa.binary(), "path": pa.string()})  # an image: its content, or where it is
_SHOWN = 40  # columns in an error

Names = tuple[str, ...]


@dataclass(frozen=True)
class Table:
    columns: pa.Table
    counts: tuple[int, ...]  # the rows of the training split, and of the test split, if there is one
    classes: Mapping[str, Names] = field(default_factory=dict)  # all names of classes, by the columns that have them
    fingerprint: str = ""  # of the content of image files in columns
    commit: str | None = None  # of the hub's repository that it is from
    only_train: Names = ()  # the columns that the test split does not have

    def __len__(self) -> int:
        return len(self.columns)

    def __str__(self) -> str:
        shown = [f"{name if name == name.strip() else repr(name)} ({self.kind(name)})" for name in self.names[:_SHOWN]]
        return ", ".join(shown) + (f", ... ({len(self.names)} columns)" if len(self.names) > _SHOWN else "")

    @cached_property
    def names(self) -> list[str]:
        return list(self.columns.column_names)

    @property
    def splits(self) -> dict[str, slice]:
        """The rows of each split."""
        rows = slice(0, self.counts[0]), slice(self.counts[0], len(self))
        return dict(zip(("train", "test")[: len(self.counts)], rows, strict=False))

    def of(self, part: str) -> Table:
        """The table of one split."""
        columns = self.columns[self.splits[part]]
        return replace(self, columns=columns, counts=(len(columns),))

    def first(self, is_so: np.ndarray) -> str:
        """The place of the first row of which this is so."""
        row, train = int(is_so.argmax()), self.counts[0]
        return f"row {row} of train" if row < train else f"row {row - train} of test"

    def with_columns(self, new: Mapping[str, Any]) -> Table:
        old = {name: self.columns[name] for name in self.names}
        return replace(self, columns=pa.table(old | dict(new)))

    # --- types ---

    def kind(self, column: str) -> str:
        """The type of a column in words, on which sites agree: int64, string and so on; Image; array; or list."""
        kind = self.columns.schema.field(column).type
        if column in self.classes:
            return "ClassLabel"
        if kind == FILE:
            return "Image"
        if pa.types.is_fixed_size_list(kind) or isinstance(kind, pa.BaseExtensionType):
            return "array"
        if pa.types.is_nested(kind):
            return "list"
        return {"double": "float64", "float": "float32", "halffloat": "float16"}.get(str(kind), str(kind))

    def is_number(self, column: str) -> bool:
        return self.kind(column).startswith(("int", "uint", "float", "bool", "decimal"))

    def is_text(self, column: str) -> bool:
        return bool(self.columns.schema.field(column).type == pa.string())

    def is_array(self, column: str) -> bool:
        """Whether each example has an array or an image, instead of one number, text or date."""
        return self.kind(column) in ("array", "list", "Image")

    # --- values ---

    def rows(self, where: str, column: str) -> Any:
        """The values of all rows, NaN where a number is missing."""
        values, shape = self.columns[column], [len(self)]
        if pa.types.is_decimal(values.type) or (pa.types.is_boolean(values.type) and values.null_count):
            values = values.cast(pa.float64())
        if isinstance(values.type, pa.BaseExtensionType):
            values = values.cast(values.type.storage_type)
        while pa.types.is_nested(values.type):
            sides = pc.unique(pc.list_value_length(values)).to_pylist() or [0]
            error_if(
                len(sides) > 1,
                f"{where}: {column!r} has arrays of several shapes, with sides of {few(map(str, sides), 4)}; "
                "expected one shape; pad series to one length, and give their masks too: data.inputs: [inputs, mask]",
            )
            shape.append(sides[0])
            values = pc.list_flatten(values)
        return _numpy(values).reshape(shape)

    def coded(self, column: str) -> tuple[list[Any], np.ndarray]:
        """The different values of a column, and the place of each row's value among them, -1 where it has none."""
        values = _whole(self.columns[column])
        if pa.types.is_null(values.type):
            return [], np.full(len(self), -1)
        if self.is_array(column):  # an array [N, 1] is [N]
            values = pa.array(self.rows("", column).reshape(len(self), -1)[:, 0])
        if pa.types.is_floating(values.type):
            values = pc.if_else(pc.is_nan(values), None, values)
        found = values.dictionary_encode()
        codes = found.indices.fill_null(-1) if found.null_count else found.indices
        return found.dictionary.to_pylist(), _numpy(codes).astype(np.int64)

    def absent(self, column: str) -> np.ndarray:
        """Which rows have no value, or an array that lacks one."""
        if not self.is_array(column):
            return _numpy(pc.is_null(self.columns[column], nan_is_null=True).cast(pa.uint8())) > 0
        values = self.rows("", column)
        return cast(np.ndarray, (values != values).reshape(len(self), -1).any(1))


def _whole(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _numpy(values: pa.ChunkedArray | pa.Array) -> np.ndarray:
    """NumPy's array of these values; a conversion of other than plain numbers imports pandas, if it is installed."""
    whole = _whole(values) if isinstance(values, pa.ChunkedArray) else values
    is_plain = (pa.types.is_integer(whole.type) or pa.types.is_floating(whole.type)) and not whole.null_count
    return np.from_dlpack(whole) if is_plain else whole.to_numpy(zero_copy_only=False)


# --- tables of arrays, of `datasets`, and of both splits ----------------------


def table_of(name: str, split: Any, inputs: Names = (), folder: Path = Path()) -> Table:
    """The table of a mapping of arrays, a split of `datasets`, or an Arrow table; paths of images begin in `folder`.

    `name` is the data set's, for errors.
    """
    if isinstance(split, Table):
        return split
    if isinstance(split, Mapping):
        # A file may have other arrays than columns: single numbers, and empty ones.
        given = {
            key: each
            for key, each in split.items()
            if not isinstance(each, np.ndarray) or (each.ndim > 0 and each.size > 0)
        }
        columns = {key: _column(f"{name!r}: {key!r}", each) for key, each in given.items()}
        lengths = {len(column) for column in columns.values()}
        found = ", ".join(f"{len(column)} {key}" for key, column in columns.items())
        error_if(len(lengths) > 1, f"{name!r} has {found}; expected as many")
        return Table(pa.table(columns), tuple(lengths or (0,)))
    if isinstance(split, pa.Table):
        features = (
            json.loads((split.schema.metadata or {}).get(b"huggingface", "{}")).get("info", {}).get("features", {})
        )
        classes = {column: tuple(kind["names"]) for column, kind in features.items() if "names" in kind}
        table = Table(split, (len(split),), classes)
    else:
        split = split if split._indices is None else split.flatten_indices()
        classes = {column: tuple(kind.names) for column, kind in split.features.items() if hasattr(kind, "names")}
        urls = "\n".join(getattr(split.info, "download_checksums", None) or ())
        commit = re.search(r"@([0-9a-f]{40})/", urls)
        table = Table(split.data.table, (len(split),), classes, split._fingerprint, commit and commit[1])
    return table.with_columns({column: _typed(table, column, inputs, folder) for column in table.names})


def _typed(table: Table, column: str, inputs: Names, folder: Path) -> Any:
    """A column with names instead of numbers of classes, and with image files as such."""
    found = table.columns[column]
    if names := table.classes.get(column):
        is_known = pc.and_(pc.greater_equal(found, 0), pc.less(found, len(names)))
        return pa.array(names).take(pc.if_else(is_known, found, None))
    if pa.types.is_large_string(found.type) or pa.types.is_dictionary(found.type):
        found = found.cast(pa.string())
    if found.type in (pa.binary(), pa.large_binary()) or (
        pa.types.is_struct(found.type) and "bytes" in found.type.names and {*found.type.names} <= {*FILE.names}
    ):
        return pa.chunked_array(map(_as_files, found.chunks), FILE)
    if inputs == (column,) and found.type == pa.string():
        texts = found.to_pylist()
        if texts and str(texts[0]).lower().endswith(tuple(PICTURES)):
            return pa.array([{"path": text and os.path.join(folder, text)} for text in texts], FILE)
    return found


def _as_files(given: pa.Array) -> pa.Array:
    fields = dict(zip(given.type.names, given.flatten(), strict=True)) if pa.types.is_struct(given.type) else {}
    content, paths = fields.get("bytes", given), fields.get("path", pa.nulls(len(given), pa.string()))
    return pa.StructArray.from_arrays([content.cast(pa.binary()), paths.cast(pa.string())], fields=[*FILE])


def _column(where: str, given: Any) -> pa.Array:
    """The values of all examples; arrays of numbers are not copied."""
    try:
        if isinstance(given, Mapping):
            raise TypeError("a mapping; several arrays are columns, whose names are in data.inputs, such as [a, b]")
        if isinstance(given, Tensor):
            given = (given.float() if given.dtype is torch.bfloat16 else given).cpu().numpy()
        if not isinstance(given, np.ndarray) or given.dtype == object:
            given = np.stack([np.asarray(row.cpu() if isinstance(row, Tensor) else row) for row in given])
        return array_column(given)
    except (TypeError, ValueError, KeyError, pa.ArrowException) as error:
        raise DataError(
            f"{where} has values that are not numbers, texts, or arrays of one shape; pad series to one length, and "
            "give their masks too: data.inputs: [inputs, mask]",
            f" ({error})",
        ) from None


def array_column(rows: np.ndarray) -> pa.Array:
    """A column of numbers, texts or dates, [N], or of arrays of numbers, [N, ...]."""
    flat = np.ascontiguousarray(rows, rows.dtype.newbyteorder("=")).reshape(-1)
    if flat.dtype.kind in "iuf":
        column = pa.Array.from_buffers(pa.from_numpy_dtype(flat.dtype), flat.size, [None, pa.py_buffer(flat)])
    else:
        column = pa.array(flat, from_pandas=True)  # which imports pandas
    for side in reversed(rows.shape[1:]):
        column = pa.FixedSizeListArray.from_arrays(column, side)
    return column


def joined(name: str, train: Table, test: Table | None = None) -> Table:
    """The rows of the training split, followed by those of the test split, if there is one."""
    if test is None:
        return train
    known = {*test.names}
    shared = [column for column in train.names if column in known]
    for column in shared:
        kinds = {part.columns[column].type for part in (train, test)}
        if len(kinds) > 1 and pa.string() in kinds and not any(map(pa.types.is_nested, kinds)):
            # The texts of one split happen to be numbers.
            train, test = (
                part.with_columns({column: part.columns[column].cast(pa.string())}) for part in (train, test)
            )
    try:
        columns = pa.concat_tables([train.columns, test.columns.select(shared)], promote_options="permissive")
    except pa.ArrowException as error:
        raise DataError(
            f"{name!r}: train and test have columns of different types; expected the same",
            f": {error}",
        ) from None
    return replace(
        train,
        columns=columns,
        counts=(len(train), len(test)),
        fingerprint=train.fingerprint + test.fingerprint,
        only_train=tuple(column for column in train.names if column not in known),
    )
