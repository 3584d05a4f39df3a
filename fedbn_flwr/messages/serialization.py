"""Converts a Flower RecordDict to bytes and back, bit for bit and without pickle.

The bytes are a safetensors file. Its tensors are the arrays; those of record i have the names "i/key". Its metadata has
`records` (JSON: the name, kind, and keys or values of each record, in order). A store (storage.py) adds a checksum.
"""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from . import protocol
from .arrays import pack, unpack

_NAMES = "bool float16 float32 float64 int16 int32 int64 int8 uint16 uint32 uint64 uint8"
_DTYPES = frozenset(np.dtype(name) for name in _NAMES.split())  # in native byte order
_KINDS: dict[str, type[MetricRecord] | type[ConfigRecord]] = {"metrics": MetricRecord, "config": ConfigRecord}


def dump(records: RecordDict) -> bytes:
    """The bytes of the records; ValueError if safetensors does not support the dtype of an array.

    Volatile records are left out: they stay in memory.
    """
    from safetensors.numpy import save

    tensors: dict[str, np.ndarray] = {}
    entries: list[list[Any]] = []
    stored = [(name, record) for name, record in records.items() if not name.startswith(protocol.VOLATILE)]
    for number, (name, record) in enumerate(stored):
        if isinstance(record, ArrayRecord):
            for key, value in unpack(record).items():
                tensors[f"{number}/{key}"] = _storable(value, f"{name}, {key}")
            entries.append([name, "arrays", list(record)])
        else:
            kind = "metrics" if isinstance(record, MetricRecord) else "config"
            entries.append([name, kind, [*record.items()]])
    return save(tensors, metadata={"records": json.dumps(entries, default=_coded)})


def parse(data: bytes) -> RecordDict:
    """The records from bytes that `dump` returned; ValueError, and no other exception, for other bytes."""
    from safetensors.numpy import load

    try:
        tensors = load(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        entries = json.loads(header["__metadata__"]["records"], object_hook=_decoded)
        records = RecordDict()
        for number, (name, kind, content) in enumerate(entries):
            if kind == "arrays":
                records[name] = pack({key: tensors[f"{number}/{key}"] for key in content})
            else:
                records[name] = _KINDS[kind](dict(content))
    except Exception as error:  # of safetensors, JSON and Flower
        raise ValueError(f"these are not the bytes of records: {str(error)[:300]}") from None
    return records


def _storable(value: np.ndarray, what: str) -> np.ndarray:
    if value.dtype not in _DTYPES:
        raise ValueError(f"{what} is of dtype {value.dtype}; expected one of {_NAMES}")
    return np.asarray(value, order="C")


def _coded(value: bytes) -> dict[str, str]:
    """What JSON has no form for: numbers, strings and booleans are JSON values, which keep every bit."""
    return {"base64": base64.b64encode(value).decode()}


def _decoded(coded: dict[str, str]) -> bytes:
    return base64.b64decode(coded["base64"])
