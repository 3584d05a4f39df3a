"""Converts values to bytes and back, bit for bit and without pickle.

A value is a number, a text, bytes, an array, a record of Flower, or a list, tuple, set or dict of values. The bytes are
a safetensors file: its tensors are the arrays, and its metadata is everything else as JSON. A value that JSON cannot
represent becomes a pair (kind, content). A store (storage.py) adds a checksum.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from . import protocol
from .arrays import pack, unpack

Content = TypeVar("Content")

_NAMES = "bool float16 float32 float64 int16 int32 int64 int8 uint16 uint32 uint64 uint8"
_DTYPES = frozenset(map(np.dtype, _NAMES.split()))  # in native byte order
_PLAIN = (type(None), bool, int, float, str)  # JSON keeps every bit of them
_LISTS = {kind.__name__: kind for kind in (list, tuple, set)}
_RECORDS = {"arrays": ArrayRecord, "metrics": MetricRecord, "config": ConfigRecord, "records": RecordDict}
_MADE_BY: dict[str, Any] = {**_RECORDS, "arrays": pack, "dict": dict}


def dump(value: object) -> bytes:
    """The bytes of a value, without volatile records, which stay in memory.

    ValueError names a value that cannot be saved.
    """
    from safetensors.numpy import save

    tensors: dict[str, np.ndarray] = {}
    text = json.dumps(_encode(value, "", tensors))
    return save(tensors, metadata={"value": text})


def parse(data: bytes, kind: type[Content]) -> Content:
    """The value, of this kind, that `dump` made into `data`; ValueError, and no other exception, for other bytes."""
    from safetensors.numpy import load

    try:
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        value = _decode(json.loads(header["__metadata__"]["value"]), load(data))
        if type(value) is not kind:
            raise TypeError(f"found a {type(value).__name__}, expected a {kind.__name__}")
    except Exception as error:  # safetensors, JSON and Flower raise various ones
        raise ValueError(f"these bytes are not records: {str(error)[:300]}") from None
    return value


def _encode(value: Any, name: str, tensors: dict[str, np.ndarray]) -> Any:
    """The JSON of a value. Its arrays are added to `tensors`, and the JSON contains their keys."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is bytes:
        return "bytes", base64.b64encode(value).decode()
    if isinstance(value, np.ndarray | np.generic) and value.dtype in _DTYPES:
        tensors[key := str(len(tensors))] = np.asarray(value, order="C")
        return "array" if kind is np.ndarray else "scalar", key
    if kind in _LISTS.values():
        return kind.__name__, [_encode(item, name, tensors) for item in value]
    record = next((name for name, base in _RECORDS.items() if isinstance(value, base)), None)
    if record or kind is dict:
        items = (unpack(value) if record == "arrays" else value).items()
        pairs = [
            (_encode(key, name, tensors), _encode(item, f"{name}.{key}", tensors))
            for key, item in items
            if record != "records" or not key.startswith(protocol.VOLATILE)
        ]
        return record or "dict", pairs
    shown = getattr(value, "dtype", kind.__name__)
    raise ValueError(
        f"{name.removeprefix('.')} is a {shown}, which cannot be saved; expected numbers, texts, arrays of numbers, "
        "records, or lists and dicts of these"
    )


def _decode(coded: Any, tensors: Mapping[str, np.ndarray]) -> Any:
    if not isinstance(coded, list):
        return coded
    kind, content = coded
    if kind == "bytes":
        return base64.b64decode(content)
    if kind in ("array", "scalar"):
        return tensors[content] if kind == "array" else tensors[content][()]
    if kind in _LISTS:
        return _LISTS[kind](_decode(item, tensors) for item in content)
    return _MADE_BY[kind]({_decode(key, tensors): _decode(item, tensors) for key, item in content})
