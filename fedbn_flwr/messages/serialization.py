"""A Flower RecordDict as bytes, and back: exact to the bit, never pickled, and damage is noticed.

The bytes are a safetensors file. Its tensors are the arrays, named "i/key" for those of record i; its metadata has
`records` (JSON: each record's name, kind, and keys or values, in order) and `crc32` of that text and of all arrays.
"""

from __future__ import annotations

import base64
import json
import os
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from .arrays import pack, unpack

_DTYPES = frozenset(
    {"bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64"}
)
_KINDS: dict[str, type[MetricRecord] | type[ConfigRecord]] = {"metrics": MetricRecord, "config": ConfigRecord}


def dump(records: RecordDict) -> bytes:
    """Raises ValueError where an array has a type that safetensors cannot hold."""
    from safetensors.numpy import save

    tensors: dict[str, np.ndarray] = {}
    layout: list[list[Any]] = []
    for number, (name, record) in enumerate(records.items()):
        if isinstance(record, ArrayRecord):
            for key, value in unpack(record).items():
                tensors[f"{number}/{key}"] = _storable(value, f"{name}, {key}")
            layout.append([name, "arrays", list(record)])
        else:
            kind = "metrics" if isinstance(record, MetricRecord) else "config"
            layout.append([name, kind, [[key, _to_json(value)] for key, value in record.items()]])
    text = json.dumps(layout)
    return save(tensors, metadata={"records": text, "crc32": str(_checksum(text, tensors.values()))})


def parse(data: bytes) -> RecordDict:
    """Raises ValueError, and nothing else, where these are not the bytes that `dump` made."""
    from safetensors.numpy import load

    try:
        tensors = load(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
        layout = json.loads(header["records"])
        names = [f"{number}/{key}" for number, (_, kind, keys) in enumerate(layout) if kind == "arrays" for key in keys]
        if int(header["crc32"]) != _checksum(header["records"], (tensors[name] for name in names)):
            raise ValueError("its checksum is wrong")
        records = RecordDict()
        for number, (name, kind, content) in enumerate(layout):
            if kind == "arrays":
                records[name] = pack({key: tensors[f"{number}/{key}"] for key in content})
            else:
                records[name] = _KINDS[kind]({key: _from_json(value) for key, value in content})
    except Exception as error:  # of safetensors, JSON and Flower: bytes from a disk may be anything
        raise ValueError(f"it is damaged: {error}") from None
    return records


def write_whole(file: Path, data: bytes) -> None:
    """All of it or nothing, also where power fails: the old content stays until the new one is on the disk."""
    temporary = file.with_name(f".{file.name}.tmp")
    with temporary.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, file)
    sync_folder(file.parent)


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _storable(value: np.ndarray, what: str) -> np.ndarray:
    if value.dtype.name not in _DTYPES or not value.dtype.isnative:
        raise ValueError(f"{what} is of dtype {value.dtype}; what can be stored is {', '.join(sorted(_DTYPES))}")
    return np.asarray(value, order="C")


def _checksum(text: str, arrays: Iterable[np.ndarray]) -> int:
    crc = zlib.crc32(text.encode())
    for array in arrays:
        crc = zlib.crc32(array.tobytes(), crc)
    return crc


def _to_json(value: Any) -> Any:
    """Numbers, texts and booleans are JSON's own, to the last bit; bytes are {"base64": text}."""
    if isinstance(value, bytes):
        return {"base64": base64.b64encode(value).decode()}
    return [_to_json(each) for each in value] if isinstance(value, list) else value


def _from_json(value: Any) -> Any:
    if isinstance(value, dict):
        return base64.b64decode(value["base64"])
    return [_from_json(each) for each in value] if isinstance(value, list) else value
