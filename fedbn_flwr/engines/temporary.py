"""Temporary folders that do not outlive their process for long, even if it is killed."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fedbn_flwr.errors import StorageError
from fedbn_flwr.storage import writing

_PREFIX = "fedbn-tmp-"
_LOCKED_AFTER = 60  # seconds after which a new folder certainly has its lock


@contextmanager
def temporary_folder(kind: str) -> Iterator[Path]:
    """A folder for this process in the system's temporary folder. Those of processes that were killed are removed.

    The process holds a lock on its folder, which the system ends with the process.
    """
    try:
        parent = Path(tempfile.gettempdir())
        with writing(parent):
            _remove_abandoned(parent)
            path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{kind}-"))
            descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError as error:
        raise StorageError(f"there is no folder for temporary files: {error.strerror}; set TMPDIR") from None
    try:
        with suppress(OSError):  # some network file systems have no locks
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(descriptor)


def _remove_abandoned(parent: Path) -> None:
    for path in parent.glob(f"{_PREFIX}*"):
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:  # no folder, or that of another user
            continue
        try:
            status = os.fstat(descriptor)
            if status.st_uid == os.getuid() and time.time() - status.st_mtime > _LOCKED_AFTER:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
        except OSError:  # its process lives, or there are no locks
            continue
        finally:
            os.close(descriptor)
