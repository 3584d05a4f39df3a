"""Converts named arrays to Flower's records and back, without unnecessary copies.

Flower stores an array as the bytes of a .npy file, so a model that is passed between functions of one process is
written and parsed for every message. Here an array stays a NumPy array until a network or a file needs its bytes. It is
read-only, so that messages, records and clients of one process can share it. To Flower and to other code the record is
an ordinary ArrayRecord.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Mapping
from typing import Any

import numpy as np
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from numpy.lib import format as npy
from numpy.typing import NDArray

from fedbn_flwr.errors import MessageError
from fedbn_flwr.internals import SType
from fedbn_flwr.norms.roles import Role, is_variance, roles

Values = NDArray[Any]  # `aggregate.Array` elsewhere; here it has the name of Flower's class
Arrays = Mapping[str, Values]
DType = np.dtype[Any]


def variance_keys(keys: Mapping[str, object]) -> list[str]:
    """The keys of running variances. A `running_var` counts only along with its layer's `running_mean`."""
    return [key for key, role in roles(keys).items() if role is Role.STATISTICS and is_variance(key)]


class Array(FlowerArray):
    """Flower's Array for an array in memory, the attribute `value`; the bytes are created on first access.

    It has the name of Flower's class because Flower serialises the name of the class with the bytes.
    """

    value: Values  # callers must not write to it

    def __init__(self, value: Values) -> None:
        # Setting attributes one by one would call Flower's __setattr__ for each.
        self.__dict__.update(dtype=_name(value.dtype), shape=value.shape, stype=SType.NUMPY, value=frozen(value))

    def numpy(self) -> Values:
        return self.value.copy()  # Flower's method returns a copy too

    @property
    def data(self) -> bytes:  # type: ignore[override]
        if "_bytes" not in self.__dict__:
            self.__dict__["_bytes"] = FlowerArray(self.value).data
        return self.__dict__["_bytes"]  # type: ignore[no-any-return]

    def __reduce__(self) -> tuple[object, ...]:
        return Array, (self.value,)


_name = functools.lru_cache(str)  # of a dtype, which NumPy formats again on each access


def frozen(value: Values) -> Values:
    """The array itself, which is read-only from now on."""
    value.flags.writeable = False
    return value


# These replace RecordDict.array_records etc. Flower's properties build a mapping that writes back to the RecordDict,
# and building it takes longer than handling most messages.


def arrays_in(content: Mapping[str, object]) -> dict[str, ArrayRecord]:
    return {name: record for name, record in content.items() if isinstance(record, ArrayRecord)}


def metrics_in(content: RecordDict) -> dict[str, MetricRecord]:
    return {name: record for name, record in content.items() if isinstance(record, MetricRecord)}


def configs_in(content: RecordDict) -> dict[str, ConfigRecord]:
    return {name: record for name, record in content.items() if isinstance(record, ConfigRecord)}


def config_of(content: RecordDict) -> ConfigRecord:
    """The config of a message; empty if it has none."""
    return next(iter(configs_in(content).values()), None) or ConfigRecord()


def pack(arrays: Arrays) -> ArrayRecord:
    """An ArrayRecord with these arrays: read-only ones as they are, and copies of others."""
    record = ArrayRecord()
    entries = record.__dict__["_data"]  # checking each entry, as Flower does, takes longer than all else here
    for key, value in arrays.items():
        if not isinstance(value, np.ndarray | np.generic):
            raise TypeError(f"{key!r} is a {type(value).__name__}; expected a NumPy array")
        if value.dtype.hasobject:
            raise TypeError(f"{key!r} holds Python objects; expected an array of numbers")
        is_shared = isinstance(value, np.ndarray) and not value.flags.writeable
        entries[key] = Array(value if is_shared else np.array(value, order="C"))
    return record


def unpack(arrays: Mapping[str, FlowerArray]) -> Arrays:
    """The arrays of a record, not copied: callers must not change them. MessageError names an array that is invalid."""
    return {key: array.value if isinstance(array, Array) else _read(key, array) for key, array in arrays.items()}


def size_of(*records: Arrays) -> tuple[int, int]:
    """The number of elements and of bytes of all arrays in records, without names and headers."""
    values = [value for arrays in records for value in arrays.values()]
    return sum(value.size for value in values), sum(value.nbytes for value in values)


def record_of(arrays: Mapping[str, FlowerArray]) -> ArrayRecord:
    """An ArrayRecord of Flower's Arrays, without the copies that Flower's constructor makes."""
    return pack(unpack(arrays))


@functools.lru_cache(maxsize=4096)  # NumPy parses the header as a Python literal
def _header(start: bytes) -> tuple[tuple[int, ...], bool, DType]:
    """Shape, whether the order is Fortran's, and dtype, from the start of a .npy file."""
    stream = io.BytesIO(start)
    if npy.read_magic(stream) != (1, 0):
        raise ValueError
    return npy.read_array_header_1_0(stream, max_header_size=2048)  # 64 axes fit


def _read(key: str, array: FlowerArray) -> Values:
    """The array of numbers in the bytes of a .npy file, not copied.

    NumPy parses the header. The array is a view of the bytes, so nothing is allocated for a shape that they do not
    fill, as `numpy.load` would.
    """
    try:
        data, declared = array.data, (array.dtype, tuple(array.shape))
        begin = 10 + int.from_bytes(data[8:10], "little")
        shape, fortran_order, dtype = _header(data[:begin])
        if array.stype != SType.NUMPY or dtype.kind not in "biufc":
            raise ValueError
        value: Values = np.ndarray(shape, dtype, data, begin, order="F" if fortran_order else "C")
    except Exception:  # of Python or NumPy: the header is a literal of any form, and attributes may be of any type
        expected = "expected the bytes of a whole .npy file of version 1.0 with numbers"
        raise MessageError(f"its array {key!r} cannot be read; {expected}") from None
    if declared != (str(dtype), value.shape):
        raise MessageError(
            f"its array {key!r} is declared as {array.dtype!r:.40} of shape {array.shape!s:.80}, "
            f"but its bytes are {dtype} of shape {value.shape}"
        )
    return value
