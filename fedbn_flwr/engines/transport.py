"""Objects over a connection between processes; large arrays are neither copied nor pickled on the way.

`Connection.send` copies an array into the pickled bytes, and `recv` first into a buffer and then into the new array:
together three copies of each model.
"""

from __future__ import annotations

import os
import pickle
import struct
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

_LARGE = 1 << 18  # bytes; smaller arrays are part of the pickled bytes, which takes fewer calls of the system
_SIZE = struct.Struct("=Q")


def send(connection: Connection, value: Any) -> None:
    large: list[memoryview] = []

    def is_small(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes >= _LARGE:
            large.append(raw)
        return raw.nbytes < _LARGE

    connection.send_bytes(pickle.dumps(value, protocol=5, buffer_callback=is_small))
    for raw in large:
        _write(connection, memoryview(_SIZE.pack(raw.nbytes)))
        _write(connection, raw)


def receive(connection: Connection) -> Any:
    """The next object; EOFError if the other end is closed."""
    return pickle.loads(connection.recv_bytes(), buffers=_arriving(connection))  # noqa: S301 (both ends are processes of one run)


def _arriving(connection: Connection) -> Iterator[np.ndarray]:
    """The large buffers that follow the pickled bytes, read as the bytes refer to them."""
    while True:
        (size,) = _SIZE.unpack(_read(connection, _SIZE.size).tobytes())
        yield _read(connection, size)


def _read(connection: Connection, size: int) -> np.ndarray:
    buffer = np.empty(size, np.uint8)
    left = buffer.data
    while left:
        if not (count := os.readv(connection.fileno(), [left])):
            raise EOFError
        left = left[count:]
    return buffer


def _write(connection: Connection, data: memoryview) -> None:
    while data:
        data = data[os.write(connection.fileno(), data) :]
