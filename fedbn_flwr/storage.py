"""Stores: files of named byte strings, for checkpoints and states. A file is always replaced as a whole.

A store is never changed in place. The new file is written under another name, flushed to the disk and renamed over
the old one, so a crash at any moment leaves the old store or the new one, and no reader needs a lock. Writing the same
entries in a sqlite transaction takes 1.4 to 7 times as long, see docs/results/performance/storage.txt.

A store is a zip file without compression: entries can be written one at a time, and each has a CRC-32. Its comment is
the version of the format and a CRC-32 of the index, which reveals a changed name or size.
"""

from __future__ import annotations

import errno
import json
import operator
import os
import re
import stat
import zlib
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO
from zipfile import ZIP_STORED, BadZipFile, ZipFile, ZipInfo

from .errors import DataError, StorageError

_VERSION = "fedbn-store4"


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError inside, such as a full disk or a read-only folder, into a StorageError that names the file."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"{str(path)!r} cannot be written: {error.strerror or error}") from None


def temporary_folder(kind: str) -> TemporaryDirectory[str]:
    """A new folder for temporary files, which is removed with `cleanup()` or when this process ends."""
    with writing(Path("the folder for temporary files, TMPDIR,")):
        return TemporaryDirectory(prefix=f"fedbn-tmp-{kind}-", ignore_cleanup_errors=True)


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading. OSError if it is another kind of file: opening a FIFO would wait for a writer."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return path.open("rb")


def check_rights(name: Path, *below: Path) -> None:
    """Raise an error for files that this process may not read; a site's server does not see their names.

    Without this, names in a folder without the right x are reported as if they were missing.
    """
    above = list(reversed(name.absolute().parents))
    for path in (*above, name, *below):
        rights = os.R_OK if not os.path.isdir(path) else os.X_OK if path in above else os.R_OK | os.X_OK
        if os.path.exists(path) and not os.access(path, rights, effective_ids=True):
            status = path.stat()
            raise DataError(
                f"{str(name)!r} cannot be read by the user of this process, uid {os.geteuid()}; give this user the "
                f"right to read it and all in it: setfacl -R -m u:{os.geteuid()}:rX (package acl), or chmod -R a+rX",
                f": {str(path)!r} has the rights {stat.filemode(status.st_mode)} and belongs to uid {status.st_uid}",
            )


def open_private(path: str | Path, flags: int) -> int:
    """Open a file, as the `opener` of `open`; a new one is for its owner only, since it may tell of clients' data."""
    return os.open(path, flags, 0o600)


@contextmanager
def replacing(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """Yield a temporary path; the private file written there replaces `path` if the block ends without an error.

    With `durable`, the new content is then on the disk and survives a loss of power. Raises StorageError if the file
    cannot be written.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    with writing(path):
        try:
            temporary.unlink(missing_ok=True)  # left by a killed process, or a link, which must not be followed
            os.close(open_private(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW))
            yield temporary
            if durable:
                _sync(temporary)
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        if durable:
            _sync(path.parent)


def to_json(content: object, indent: int | None = None) -> str:
    """JSON for a file. Arrays become lists; NaN and Infinity, which JSON does not have, become null."""
    finite = json.loads(json.dumps(content, default=operator.methodcaller("tolist")), parse_constant=lambda name: None)
    return json.dumps(finite, indent=indent)


def write_store(path: Path, entries: Iterable[tuple[str, bytes]], *, durable: bool = True) -> None:
    """Replace `path` with a store of these entries, whose names must differ; raises StorageError if that fails."""
    with (
        replacing(path, durable=durable) as file,
        file.open("wb", buffering=1 << 20) as stream,
        ZipFile(stream, "w") as archive,
    ):
        for name, data in entries:
            archive.writestr(ZipInfo(name), data)  # with a constant date
        archive.comment = _seal(archive)


def read_store(path: Path) -> dict[str, bytes]:
    """The entries of a store, in their order; raises StorageError if the file is missing or damaged."""
    with opened_store(path) as entries:
        return dict(entries)


@contextmanager
def opened_store(path: Path) -> Iterator[Mapping[str, bytes]]:
    """The entries of a store; each is read and checked when it is asked for. Errors are as in `read_store`."""
    try:
        stream = open_regular(path)
    except OSError as error:
        raise StorageError(f"{str(path)!r} cannot be read: {error.strerror}") from None
    with stream:
        with _damage(path):
            archive = ZipFile(stream)
            if archive.comment != _seal(archive):
                of_other = re.match(rb"fedbn-store\d+(?= )", archive.comment)
                if of_other and of_other[0] != _VERSION.encode():
                    raise BadZipFile(f"another version of fedbn-flwr wrote it as {of_other[0].decode()}")
                raise BadZipFile(f"its end is {archive.comment!r:.80}")
            entries = archive.infolist()
            size = sum(entry.file_size for entry in entries)
            packed = any(entry.compress_type != ZIP_STORED for entry in entries)
            if packed or size > os.fstat(stream.fileno()).st_size:
                raise BadZipFile("its entries are compressed, or larger than the file")
        yield _Entries(archive, path)


@dataclass(frozen=True)
class Rounds:
    """The states in which rounds have left something, a store for each: FOLDER/round-17."""

    folder: Path

    def numbers(self) -> list[int]:
        """The rounds whose state is stored, in ascending order."""
        names = (file.name.removeprefix("round-") for file in self.folder.glob("round-*"))
        return sorted(int(name) for name in names if name.isdecimal())

    def latest(self, last: int) -> int:
        """The latest of these rounds up to `last`; 0 if there is none."""
        return max((number for number in self.numbers() if number <= last), default=0)

    def read(self, number: int) -> bytes:
        return read_store(self.folder / f"round-{number}")["state"]

    def write(self, number: int, state: bytes, checkpoint: int, *, durable: bool = True) -> None:
        """Store the state of this round; a run with this checkpoint may still return to it, or to the round before."""
        with writing(self.folder):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_store(self.folder / f"round-{number}", [("state", state)], durable=durable)
        self.keep({self.latest(checkpoint), self.latest(number - 1), number})
        for unfinished in self.folder.glob(".round-*.tmp"):  # written by a process that was killed
            unfinished.unlink(missing_ok=True)

    def keep(self, wanted: Container[int]) -> None:
        """Delete the states of the other rounds."""
        for number in self.numbers():
            if number not in wanted:
                (self.folder / f"round-{number}").unlink(missing_ok=True)


class _Entries(Mapping[str, bytes]):
    def __init__(self, archive: ZipFile, path: Path) -> None:
        self.archive, self.path = archive, path

    def __iter__(self) -> Iterator[str]:
        return iter(self.archive.namelist())

    def __len__(self) -> int:
        return len(self.archive.namelist())

    def __getitem__(self, name: str) -> bytes:
        if name not in self.archive.NameToInfo:
            raise KeyError(name)
        with _damage(self.path):
            return self.archive.read(name)


@contextmanager
def _damage(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # zipfile raises many kinds of errors for damaged archives
        raise StorageError(f"{str(path)!r} is damaged: not a complete {_VERSION} ({str(error)[:300]})") from None


def _seal(archive: ZipFile) -> bytes:
    """The comment of a store: the version of its format, and a checksum of its index."""
    index = repr([(entry.filename, entry.file_size, entry.CRC) for entry in archive.infolist()])
    return f"{_VERSION} {zlib.crc32(index.encode()):08x}".encode()


def _sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
