"""Converts named arrays to Flower's records and back, without unnecessary copies.

Flower stores an array as the bytes of a .npy file, so a model that is passed between functions of one process is
written and parsed for every message. Here an array stays a NumPy array until a network or a file needs its bytes. The
arrays of a model are stored consecutively in one `FlatArrays`, so that a mean or a check is one operation instead of
one for each key. To Flower and to other code the record is an ordinary ArrayRecord.
"""

from __future__ import annotations

import functools
import io
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord as FlowerRecord
from flwr.app import ConfigRecord, MetricRecord, RecordDict
from flwr.common.constant import SType
from numpy.lib import format as npy
from numpy.typing import NDArray

from fedbn_flwr.errors import MessageError
from fedbn_flwr.norms.roles import Role, is_variance, roles

Values = NDArray[Any]  # `aggregate.Array` elsewhere; here it has the name of Flower's class
Arrays = Mapping[str, Values]
DType = np.dtype[Any]


@dataclass(frozen=True)
class Layout:
    """The keys, shapes and offsets of arrays in a flat block; `layout_of` returns one object for equal layouts."""

    dtype: DType
    shapes: dict[str, tuple[int, ...]] = field(hash=False)
    places: dict[str, slice] = field(hash=False)
    size: int
    name: str  # the dtype's; NumPy formats it again on each access

    @functools.cached_property
    def variances(self) -> NDArray[np.intp]:
        """The indices of the running variances in the block."""
        places = [np.arange(self.places[key].start, self.places[key].stop) for key in variance_keys(self.places)]
        return np.concatenate([np.empty(0, np.intp), *places])

    def __reduce__(self) -> tuple[object, ...]:
        return layout_of, (self.dtype.str, tuple(self.shapes), tuple(self.shapes.values()))


# A layout lives as long as a block uses it, such as the server's model: a reply may have keys of any length.
_LAYOUTS: WeakValueDictionary[tuple[str, tuple[str, ...], tuple[tuple[int, ...], ...]], Layout] = WeakValueDictionary()


def layout_of(dtype: str, keys: tuple[str, ...], shapes: tuple[tuple[int, ...], ...]) -> Layout:
    if (known := _LAYOUTS.get((dtype, keys, shapes))) is not None:
        return known
    places, end = {}, 0
    for key, shape in zip(keys, shapes, strict=True):
        places[key] = slice(end, end + math.prod(shape))
        end = places[key].stop
    made = Layout(np.dtype(dtype), dict(zip(keys, shapes, strict=True)), places, end, str(np.dtype(dtype)))
    return _LAYOUTS.setdefault((dtype, keys, shapes), made)


def variance_keys(keys: Mapping[str, object]) -> list[str]:
    """The keys of running variances. A `running_var` counts only along with its layer's `running_mean`."""
    return [key for key, role in roles(keys).items() if role is Role.STATISTICS and is_variance(key)]


class FlatArrays(Mapping[str, Values]):
    """Read-only arrays of one dtype, stored one after another in `flat`."""

    __slots__ = ("flat", "layout")

    def __init__(self, where: Layout, flat: Values) -> None:
        assert (flat.shape, flat.dtype) == ((where.size,), where.dtype)
        flat.flags.writeable = False
        self.layout = where
        self.flat = flat

    def __getitem__(self, key: str) -> Values:
        return self.flat[self.layout.places[key]].reshape(self.layout.shapes[key])

    def __iter__(self) -> Iterator[str]:
        return iter(self.layout.places)

    def __len__(self) -> int:
        return len(self.layout.places)

    def __contains__(self, key: object) -> bool:
        return key in self.layout.places  # Mapping would make the array

    def __or__(self, other: Arrays) -> dict[str, Values]:
        return {**self, **other}

    def __ror__(self, other: Arrays) -> dict[str, Values]:
        return {**other, **self}

    __eq__, __hash__ = object.__eq__, object.__hash__  # the methods of Mapping would compare the arrays

    def __reduce__(self) -> tuple[object, ...]:
        return FlatArrays, (self.layout, self.flat)


class Array(FlowerArray):
    """Flower's Array for an array in memory; the bytes are created on first access.

    It has the name of Flower's class because Flower serialises the name of the class with the bytes.
    """

    place: tuple[FlatArrays, str]  # the block, and the key in it

    def __init__(self, owner: FlatArrays, key: str) -> None:
        # Setting attributes one by one would call Flower's __setattr__ for each.
        where = owner.layout
        self.__dict__.update(dtype=where.name, shape=where.shapes[key], stype=SType.NUMPY, place=(owner, key))

    @property
    def value(self) -> Values:
        """The array itself; callers must not write to it."""
        return self.place[0][self.place[1]]

    def numpy(self) -> Values:
        return self.value.copy()  # Flower's method returns a copy too

    @property
    def data(self) -> bytes:  # type: ignore[override]
        if "_bytes" not in self.__dict__:
            self.__dict__["_bytes"] = FlowerArray(self.value).data
        return self.__dict__["_bytes"]  # type: ignore[no-any-return]

    def __reduce__(self) -> tuple[object, ...]:
        return Array, self.place


class Entries(dict[str, FlowerArray]):
    """The entries of a record. `block` has exactly these arrays; None without such a block, or once one is replaced."""

    block: FlatArrays | None = None

    def __setitem__(self, key: str, array: FlowerArray) -> None:
        self.block = None
        super().__setitem__(key, array)

    def __delitem__(self, key: str) -> None:
        self.block = None
        super().__delitem__(key)

    def copy(self) -> Entries:
        return entries_of(self, self.block)


def entries_of(arrays: Mapping[str, FlowerArray], block: FlatArrays | None) -> Entries:
    made = Entries(arrays)
    made.block = block
    return made


class ArrayRecord(FlowerRecord):
    """Flower's ArrayRecord without its check of each entry: for a model, these checks are most of the time of packing.

    It has the name of Flower's class for the same reason as Array.
    """

    def __init__(self, entries: Entries) -> None:
        super().__init__()
        self.__dict__["_data"] = entries

    def __reduce__(self) -> tuple[object, ...]:
        entries: Entries = self.__dict__["_data"]
        return (ArrayRecord, (entries,)) if entries.block is None else (pack, (entries.block,))


# These replace RecordDict.array_records etc. Flower's properties build a mapping that writes back to the RecordDict,
# and building it takes longer than handling most messages.


def arrays_in(content: Mapping[str, object]) -> dict[str, FlowerRecord]:
    return {name: record for name, record in content.items() if isinstance(record, FlowerRecord)}


def metrics_in(content: RecordDict) -> dict[str, MetricRecord]:
    return {name: record for name, record in content.items() if isinstance(record, MetricRecord)}


def configs_in(content: RecordDict) -> dict[str, ConfigRecord]:
    return {name: record for name, record in content.items() if isinstance(record, ConfigRecord)}


def config_of(content: RecordDict) -> ConfigRecord:
    """The config of a message; empty if it has none."""
    return next(iter(configs_in(content).values()), None) or ConfigRecord()


def pack(arrays: Arrays) -> FlowerRecord:
    """An ArrayRecord with copies of these arrays; FlatArrays are not copied."""
    packed = blocks(arrays)
    entries = {key: Array(block, key) for block in packed for key in block.layout.places}
    if len(packed) == 1:  # in the order of its keys
        return ArrayRecord(entries_of(entries, packed[0]))
    return ArrayRecord(Entries({key: entries[key] for key in arrays}))


def unpack(arrays: Mapping[str, FlowerArray]) -> Arrays:
    """The arrays of a record, not copied: callers must not change them. MessageError names an array that is invalid."""
    if isinstance(arrays, ArrayRecord) and (block := arrays.__dict__["_data"].block) is not None:
        return block  # type: ignore[no-any-return]
    return {key: array.value if isinstance(array, Array) else _read(key, array) for key, array in arrays.items()}


def size_of(*records: Arrays) -> tuple[int, int]:
    """The number of elements and of bytes of all arrays in records, without names and headers."""
    values: list[Values] = []
    for arrays in records:
        values += [arrays.flat] if isinstance(arrays, FlatArrays) else arrays.values()
    return sum(value.size for value in values), sum(value.nbytes for value in values)


def record_of(arrays: Mapping[str, FlowerArray]) -> FlowerRecord:
    """An ArrayRecord of Flower's Arrays, without the copies that Flower's constructor makes."""
    return pack(unpack(arrays))


def blocks(values: Arrays) -> list[FlatArrays]:
    """Copies of the arrays, with one block for each dtype."""
    if isinstance(values, FlatArrays):
        return [values]
    if other := [key for key, value in values.items() if not isinstance(value, (np.ndarray, np.generic))]:
        raise TypeError(f"{other[0]!r} is a {type(values[other[0]]).__name__}; expected a NumPy array")
    made = []
    for dtype in dict.fromkeys(value.dtype for value in values.values()):
        own = {key: value for key, value in values.items() if value.dtype == dtype}
        if dtype.hasobject:
            raise TypeError(f"{next(iter(own))!r} holds Python objects; expected an array of numbers")
        where = layout_of(dtype.str, tuple(own), tuple(value.shape for value in own.values()))
        parts = [value.reshape(-1) for value in own.values()]
        made.append(FlatArrays(where, np.concatenate(parts, dtype=where.dtype)))
    return made


def in_memory(record: FlowerRecord) -> FlowerRecord:
    """The record with all its arrays in memory; the same record if nothing had to be read."""
    return record if {*map(type, record.values())} <= {Array} else pack(unpack(record))


def _read(key: str, array: FlowerArray) -> Values:
    try:
        if array.stype != SType.NUMPY:
            raise MessageError("it is not serialised as an array")
        value, shape = read_npy(array.data), tuple(array.shape)
    except Exception as error:  # others are of Python or NumPy: the attributes may be of any type
        reason = f": {error}" if isinstance(error, MessageError) else ""
        raise MessageError(f"its array {key!r} cannot be read{reason}") from None
    if (array.dtype, shape) != (str(value.dtype), value.shape):
        raise MessageError(
            f"its array {key!r} is declared as {array.dtype!r:.40} of shape {shape!s:.80}, "
            f"but its bytes are {value.dtype} of shape {value.shape}"
        )
    return value


def read_npy(data: bytes) -> Values:
    """The array of numbers in the bytes of a .npy file, not copied; MessageError for other bytes.

    Nothing is allocated for a shape that does not fit the bytes, as numpy.load would.
    """
    start = 10 + int.from_bytes(data[8:10], "little")
    shape, fortran_order, dtype = _header(data[:start])
    if math.prod(shape) * dtype.itemsize == len(data) - start and min(shape, default=0) >= 0:
        values = np.frombuffer(data, dtype, offset=start) if len(data) > start else np.empty(0, dtype)
        with suppress(ValueError):  # too many axes, or one of no size and others too long
            return values.reshape(shape, order="F" if fortran_order else "C")
    raise MessageError(f"its header says {dtype} of shape {shape!s:.80}, which doesn't match its {len(data)} bytes")


_LONGEST_HEADER = 2048  # bytes; 64 axes fit


@functools.lru_cache(maxsize=4096)  # NumPy parses the header as a Python literal
def _header(start: bytes) -> tuple[tuple[int, ...], bool, DType]:
    """Shape, whether the order is Fortran's, and dtype, from the start of a .npy file."""
    stream = io.BytesIO(start)
    try:
        if npy.read_magic(stream) != (1, 0):
            raise ValueError
        shape, fortran_order, dtype = npy.read_array_header_1_0(stream, max_header_size=_LONGEST_HEADER)
    except Exception:  # of Python or NumPy: the header is a literal of any form
        raise MessageError("it is not a .npy file of version 1.0 with a short header") from None
    if dtype.kind not in "biufc":
        raise MessageError("its header does not describe an array of numbers")
    return shape, fortran_order, dtype
