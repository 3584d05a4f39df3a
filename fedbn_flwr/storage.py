"""Stores: files of named byte strings, for checkpoints and states. A file is always replaced as a whole.

A store is never changed in place. The new file is written under another name, flushed to the disk and renamed over
the old one, so a crash at any moment leaves the old store or the new one, and no reader needs a lock. Writing the same
entries in a sqlite transaction takes 1.4 to 7 times as long, see docs/results/storage.txt.

    entries      one after the other, in the order in which they were written
    index        JSON: the name of each entry, and its offset, size and CRC-32
    last bytes   length and CRC-32 of the index, and a mark

The index comes last so that entries can be written one at a time. Checksums cover every byte of the file.
"""

from __future__ import annotations

import errno
import json
import math
import os
import stat
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from .errors import StorageError

_TAIL = struct.Struct("<QI12s")
_MARK = b"fedbn-store1"


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Errors of the system become a StorageError that names the file: the disk is full, the folder is read-only."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"{str(path)!r} cannot be written: {error.strerror or error}") from None


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading. OSError if it is another kind of file: opening a FIFO would wait for a writer."""
    stream = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
        stream.close()
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return stream


@contextmanager
def replacing(path: Path, *, durable: bool = True, mode: int = 0o666) -> Iterator[Path]:
    """A temporary path beside `path`; the file written there replaces `path` if the block ends without an error.
    Raises StorageError if it cannot be written.

    With `durable` the new content is then on the disk and survives a loss of power.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    with writing(path):
        try:
            temporary.unlink(missing_ok=True)  # of a killed process; or a link, which is not followed
            os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode))
            yield temporary
            if durable:
                _sync(temporary)
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        if durable:
            _sync(path.parent)


def to_json(content: Any, indent: int | None = None) -> str:
    """JSON of a file, in which a figure that is not finite is null: NaN and Infinity are no JSON."""
    try:
        return json.dumps(content, indent=indent, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(content), indent=indent)


def _finite(content: Any) -> Any:
    if isinstance(content, Mapping):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def write_store(path: Path, entries: Iterable[tuple[str, bytes]], *, durable: bool = True) -> None:
    """Replace `path` by a store with these entries, whose names must differ; raises StorageError if that fails.

    Without `durable` the file is written directly: for content that no other process will read.
    """
    index: dict[str, tuple[int, int, int]] = {}
    offset = 0
    target = replacing(path) if durable else nullcontext(path)
    with writing(path), target as file, file.open("wb", buffering=1 << 20) as stream:
        os.chmod(file, 0o600)  # the states of clients follow from their data
        for name, data in entries:
            stream.write(data)
            index[name] = (offset, len(data), zlib.crc32(data))
            offset += len(data)
        text = json.dumps(index).encode()
        stream.write(text + _TAIL.pack(len(text), zlib.crc32(text), _MARK))


class Store(Mapping[str, bytes]):
    """A store opened for reading; raises StorageError if the file is missing or damaged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._stream = open_regular(path)
            self._index = self._read_index()
        except OSError as error:
            raise StorageError(f"{str(path)!r} cannot be read: {error.strerror}") from None

    def __getitem__(self, name: str) -> bytes:
        offset, size, checksum = self._index[name]
        self._stream.seek(offset)
        data = self._stream.read(size)
        if zlib.crc32(data) != checksum:
            raise self._damaged(f"the checksum of its entry {name!r} is wrong")
        return data

    def __iter__(self) -> Iterator[str]:
        return iter(self._index)

    def __len__(self) -> int:
        return len(self._index)

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.close()

    def _read_index(self) -> dict[str, tuple[int, int, int]]:
        size = self._stream.seek(0, os.SEEK_END)
        if size < _TAIL.size:
            raise self._damaged(f"it has {size} bytes")
        self._stream.seek(size - _TAIL.size)
        length, checksum, mark = _TAIL.unpack(self._stream.read())
        if mark != _MARK or length > size - _TAIL.size:
            raise self._damaged("its end is missing")
        self._stream.seek(size - _TAIL.size - length)
        text = self._stream.read(length)
        if zlib.crc32(text) != checksum:
            raise self._damaged("the checksum of its index is wrong")
        try:
            index: dict[str, tuple[int, int, int]] = json.loads(text)
            for offset, length, checksum in index.values():
                whole = all(type(part) is int for part in (offset, length, checksum))
                if not whole or not 0 <= offset <= offset + length <= size:
                    raise ValueError
        except (ValueError, TypeError, AttributeError, RecursionError):
            raise self._damaged("its index does not fit the file") from None
        return index

    def _damaged(self, reason: str) -> StorageError:
        self._stream.close()
        return StorageError(f"{str(self.path)!r} is damaged: {reason}")


def _sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
