"""What travels on a stream between a client and the exchange service, as bytes.

A frame is the length of its header (four bytes), the header (JSON), and the tensors' values one after the other,
little-endian and in C order. So values arrive as they were, bit for bit. Whatever does not fit exactly is a
`WireError`: the other side may be anybody.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedbn_flwr.errors import MessageError
from fedbn_flwr.messages.aggregate import Array, Arrays

HEADER_LIMIT = 8192  # bytes
TEXT_LIMIT = 1000  # characters
DTYPES = ("float16", "float32", "float64")  # those in which a batch norm computes, as far as NumPy has them
_LENGTH = struct.Struct("<I")
_KEYS = {"what", "numbers", "tensors", "text"}
_LARGEST = 2**53  # beyond it a float is no exact integer


class WireError(MessageError):
    """Bytes that are no frame."""


@dataclass(frozen=True)
class Frame:
    what: str
    arrays: Arrays = field(default_factory=dict)
    numbers: Mapping[str, float] = field(default_factory=dict)
    text: str = ""


def encode(frame: Frame) -> bytes:
    tensors, values = [], []
    for name, array in frame.arrays.items():
        if array.dtype.name not in DTYPES:
            raise WireError(f"{name!r} is {array.dtype.name}; the direct exchange carries {', '.join(DTYPES)}")
        tensors.append([name, array.dtype.name, list(array.shape)])
        values.append(np.asarray(array, dtype=array.dtype.newbyteorder("<")).tobytes())
    head = {"what": frame.what, "numbers": dict(frame.numbers), "tensors": tensors, "text": frame.text[:TEXT_LIMIT]}
    header = json.dumps(head, allow_nan=False).encode()
    return b"".join([_LENGTH.pack(len(header)), header, *values])


def decode(content: bytes) -> Frame:
    if len(content) < _LENGTH.size:
        raise WireError(f"a frame of {len(content)} bytes has no header")
    begin = _LENGTH.size + _LENGTH.unpack_from(content)[0]
    if begin > min(len(content), HEADER_LIMIT + _LENGTH.size):
        raise WireError(f"a header of {begin - _LENGTH.size} bytes in a frame of {len(content)}")
    try:
        head = json.loads(content[_LENGTH.size : begin])
    except (ValueError, RecursionError) as error:
        raise WireError(f"the header is no JSON ({type(error).__name__})") from None
    if not isinstance(head, dict) or set(head) != _KEYS:
        raise WireError(f"the header is not an object with {', '.join(sorted(_KEYS))}")
    what, numbers, tensors, text = head["what"], head["numbers"], head["tensors"], head["text"]
    if not (
        isinstance(what, str) and isinstance(text, str) and isinstance(numbers, dict) and isinstance(tensors, list)
    ):
        raise WireError("the header has values of wrong types")
    for key, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, int | float) or not abs(number) <= _LARGEST:
            raise WireError(f"{key[:100]!r} is not a number that can be used")
    arrays: dict[str, Array] = {}
    for tensor in tensors:
        name, dtype, shape = _checked(tensor)
        size = math.prod(shape) * dtype.itemsize
        if name in arrays or begin + size > len(content):
            raise WireError(f"{name[:100]!r} comes twice, or has fewer values than its shape {shape} says")
        values = np.frombuffer(content, dtype.newbyteorder("<"), count=math.prod(shape), offset=begin)
        arrays[name] = values.reshape(shape).astype(dtype)  # a copy, in this machine's byte order
        begin += size
    if begin != len(content):
        raise WireError(f"{len(content) - begin} bytes follow the last tensor")
    return Frame(what[:100], arrays, numbers, text[:TEXT_LIMIT])


def _checked(tensor: Any) -> tuple[str, np.dtype[Any], tuple[int, ...]]:
    match tensor:
        case [str(name), str(dtype), list(shape)] if dtype in DTYPES and len(shape) <= 8:
            if all(type(n) is int and 0 <= n <= _LARGEST for n in shape):
                return name, np.dtype(dtype), tuple(shape)
    raise WireError("a tensor is not given as its name, dtype and shape")
