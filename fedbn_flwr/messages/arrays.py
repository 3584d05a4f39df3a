"""Named arrays in and out of Flower's records, without copies where nobody needs them.

Flower keeps an array as the bytes of a .npy file: on the way from one function to the next in the same process a
model would be written and parsed again for every message. So what we pack stays a NumPy array until somebody asks for
its bytes (a network, a file), and the arrays of a model lie side by side in one flat `Block`, on which a mean or a
check is one operation instead of one per key. To Flower and to other people's code all this is an ArrayRecord, whose
entries are made when somebody looks at one.
"""

from __future__ import annotations

import functools
import io
import math
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from numpy.typing import NDArray

Values = Mapping[str, NDArray[Any]]
_STYPE = "numpy.ndarray"


@dataclass(frozen=True)
class Layout:
    """Which array lies where in a flat block; made by `layout`, so that equal ones are the same object."""

    dtype: np.dtype[Any]
    shapes: dict[str, tuple[int, ...]] = field(hash=False)
    places: dict[str, slice] = field(hash=False)
    size: int
    name: str  # the dtype's; NumPy spells it anew each time


@functools.lru_cache(maxsize=256)
def layout(dtype: str, keys: tuple[str, ...], shapes: tuple[tuple[int, ...], ...]) -> Layout:
    places, end = {}, 0
    for key, shape in zip(keys, shapes, strict=True):
        places[key] = slice(end, end + math.prod(shape))
        end = places[key].stop
    return Layout(np.dtype(dtype), dict(zip(keys, shapes, strict=True)), places, end, str(np.dtype(dtype)))


class FlatArrays(Mapping[str, NDArray[Any]]):
    """Arrays of one dtype, side by side in `flat`; nobody may write to them."""

    __slots__ = ("flat", "layout")

    def __init__(self, where: Layout, flat: NDArray[Any]) -> None:
        assert (flat.shape, flat.dtype) == ((where.size,), where.dtype)
        flat.flags.writeable = False
        self.layout = where
        self.flat = flat

    def __getitem__(self, key: str) -> NDArray[Any]:
        return self.flat[self.layout.places[key]].reshape(self.layout.shapes[key])

    def __iter__(self) -> Iterator[str]:
        return iter(self.layout.places)

    def __len__(self) -> int:
        return len(self.layout.places)

    def __contains__(self, key: object) -> bool:
        return key in self.layout.places  # Mapping's own would cut the array out to see

    def __or__(self, other: Values) -> dict[str, NDArray[Any]]:
        return {**self, **other}

    def __ror__(self, other: Values) -> dict[str, NDArray[Any]]:
        return {**other, **self}

    def __reduce__(self) -> tuple[Any, ...]:
        where = self.layout
        return _block, (where.dtype.str, tuple(where.shapes), tuple(where.shapes.values()), self.flat)


def _block(dtype: str, keys: tuple[str, ...], shapes: tuple[tuple[int, ...], ...], flat: NDArray[Any]) -> FlatArrays:
    return FlatArrays(layout(dtype, keys, shapes), flat)


class Array(FlowerArray):
    """Flower's Array over an array that is still in memory; its bytes are made when somebody asks for them.

    It bears Flower's name, since Flower writes the class's name beside the bytes.
    """

    def __init__(self, owner: FlatArrays | NDArray[Any], key: str = "") -> None:
        if isinstance(owner, FlatArrays):
            dtype, shape = owner.layout.name, owner.layout.shapes[key]
        else:
            dtype, shape = str(owner.dtype), owner.shape
        # Not by attribute: Flower's __setattr__ is meant for few and large changes.
        self.__dict__.update(dtype=dtype, shape=shape, stype=_STYPE, _owner=owner, _key=key, _bytes=None)

    @property
    def value(self) -> NDArray[Any]:
        """The array itself; not to be written to."""
        owner = self.__dict__["_owner"]
        if owner is None:
            return read_npy(self.__dict__["_bytes"])
        return owner[self.__dict__["_key"]] if isinstance(owner, FlatArrays) else owner

    def numpy(self) -> NDArray[Any]:
        return self.value.copy()  # as Flower's: the caller's own

    @property
    def data(self) -> bytes:
        if self.__dict__["_bytes"] is None:
            buffer = io.BytesIO()
            np.save(buffer, self.value, allow_pickle=False)
            self.__dict__["_bytes"] = buffer.getvalue()
        found: bytes = self.__dict__["_bytes"]
        return found

    @data.setter
    def data(self, data: bytes) -> None:
        self.__dict__.update(_owner=None, _bytes=data)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, FlowerArray):
            return NotImplemented
        return (self.dtype, self.shape, self.stype, self.data) == (other.dtype, other.shape, other.stype, other.data)

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        owner = self.__dict__["_owner"]
        if owner is None:
            return FlowerArray, (self.dtype, self.shape, self.stype, self.data)
        return Array, (owner, self.__dict__["_key"])


class _LazyEntries(MutableMapping[str, FlowerArray]):
    """The entries of a record that is one block: most are never looked at, so `made` begins empty."""

    __slots__ = ("block", "made")

    def __init__(self, block: FlatArrays) -> None:
        self.block = block
        self.made: dict[str, FlowerArray] | None = None

    def _all(self) -> dict[str, FlowerArray]:
        if self.made is None:
            self.made = {key: Array(self.block, key) for key in self.block}
        return self.made

    def __getitem__(self, key: str) -> FlowerArray:
        return self._all()[key]

    def __setitem__(self, key: str, value: FlowerArray) -> None:
        self._all()[key] = value

    def __delitem__(self, key: str) -> None:
        del self._all()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.block if self.made is None else self.made)

    def __len__(self) -> int:
        return len(self.block if self.made is None else self.made)

    def __contains__(self, key: object) -> bool:
        return key in (self.block if self.made is None else self.made)

    def __repr__(self) -> str:
        return repr(self._all())

    def copy(self) -> MutableMapping[str, FlowerArray]:
        return _LazyEntries(self.block) if self.made is None else self.made.copy()

    def __reduce__(self) -> tuple[Any, ...]:
        return (_LazyEntries, (self.block,)) if self.made is None else (dict, (self.made,))


# A RecordDict's own `array_records` are mappings that write back to it; to build one takes longer than most messages.


def arrays_in(content: RecordDict) -> dict[str, ArrayRecord]:
    return {name: record for name, record in content.items() if isinstance(record, ArrayRecord)}


def metrics_in(content: RecordDict) -> dict[str, MetricRecord]:
    return {name: record for name, record in content.items() if isinstance(record, MetricRecord)}


def metrics_of(content: RecordDict) -> MetricRecord:
    """A reply's metrics: the first, and of a reply that was screened the only ones."""
    return next(iter(metrics_in(content).values()))


def configs_in(content: RecordDict) -> dict[str, ConfigRecord]:
    return {name: record for name, record in content.items() if isinstance(record, ConfigRecord)}


def pack(arrays: Values) -> ArrayRecord:
    """An ArrayRecord of these arrays, which their owner may then change."""
    if isinstance(arrays, FlatArrays):
        return _record(_LazyEntries(arrays))
    if objects := [key for key, value in arrays.items() if value.dtype.hasobject]:
        raise TypeError(f"{objects[0]!r} holds Python objects; only numbers can be sent")
    if (block := flat_block(arrays)) is None:  # of several dtypes
        return _record({key: Array(_kept(value)) for key, value in arrays.items()})
    return _record(_LazyEntries(block))


def unpack(arrays: Mapping[str, FlowerArray]) -> Values:
    """The arrays of a record, for reading."""
    if (whole := _block_of(arrays)) is not None:
        return whole
    first = next(iter(arrays.values()), None)
    block = first.__dict__["_owner"] if isinstance(first, Array) else None
    if isinstance(block, FlatArrays) and len(block) == len(arrays):
        inside = ((key, each.__dict__) for key, each in arrays.items())
        if all(each.get("_owner") is block and each["_key"] == key for key, each in inside):
            return block
    return {key: value.value if isinstance(value, Array) else _read(value) for key, value in arrays.items()}


def size_of(record: ArrayRecord) -> tuple[int, int]:
    """How many elements a record has, and their bytes: as they travel, without names and headers."""
    if (block := _block_of(record)) is not None:
        return block.flat.size, block.flat.nbytes
    counts = [(math.prod(array.shape), np.dtype(array.dtype).itemsize) for array in record.values()]
    return sum(count for count, _ in counts), sum(count * size for count, size in counts)


def array_bytes(content: RecordDict) -> int:
    return sum(size_of(record)[1] for record in arrays_in(content).values())


def elements(content: RecordDict) -> int:
    return sum(size_of(record)[0] for record in arrays_in(content).values())


def _block_of(arrays: Mapping[str, FlowerArray]) -> FlatArrays | None:
    """The block that a record is, where nobody has touched its entries."""
    entries = arrays.__dict__["_data"] if isinstance(arrays, ArrayRecord) else None
    return entries.block if isinstance(entries, _LazyEntries) and entries.made is None else None


def record_of(arrays: Mapping[str, FlowerArray]) -> ArrayRecord:
    """An ArrayRecord of Arrays from several records; Flower's own constructor writes and copies the bytes of each."""
    return pack(unpack(arrays))


def _record(entries: MutableMapping[str, FlowerArray]) -> ArrayRecord:
    made = ArrayRecord()
    made.__dict__["_data"] = entries
    return made


def flat_block(values: Mapping[str, NDArray[Any]]) -> FlatArrays | None:
    """Copies of the arrays in one block; None where they have several dtypes, or there are none."""
    dtypes = {value.dtype for value in values.values()}
    if len(dtypes) != 1:
        return None
    where = layout(dtypes.pop().str, tuple(values), tuple(value.shape for value in values.values()))
    flat = np.empty(where.size, where.dtype)
    for key, value in values.items():
        flat[where.places[key]] = value.reshape(-1)
    return FlatArrays(where, flat)


def _kept(value: NDArray[Any]) -> NDArray[Any]:
    """An array that nobody writes to any more, in C order."""
    array = np.array(value, order="C") if value.flags.writeable else np.asarray(value, order="C")
    array.flags.writeable = False
    return array


def _read(array: FlowerArray) -> NDArray[Any]:
    return read_npy(array.data) if array.stype == _STYPE else array.numpy()


def read_npy(data: bytes) -> NDArray[Any]:
    """What the bytes of a .npy file hold, without a copy; NumPy's own reader parses the same header every time."""
    if data[:8] == b"\x93NUMPY\x01\x00":
        start = 10 + int.from_bytes(data[8:10], "little")
        dtype, shape, plain = _header(data[:start])
        if plain and (count := math.prod(shape)):
            return np.frombuffer(data, dtype, count, start).reshape(shape)
    return np.load(io.BytesIO(data), allow_pickle=False)  # type: ignore[no-any-return]


@functools.lru_cache(maxsize=4096)
def _header(head: bytes) -> tuple[np.dtype[Any], tuple[int, ...], bool]:
    """dtype and shape that a .npy header names, and whether its data can be taken as they lie."""
    file = io.BytesIO(head[8:])
    shape, fortran_order, dtype = np.lib.format.read_array_header_1_0(file)
    return dtype, shape, not (fortran_order or dtype.hasobject)
