"""The lock on a run folder, which says whether a process writes it."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedbn_flwr.errors import SettingsError

_locks: set[int] = set()  # the descriptors that lock this process's run folders


def _close_locks() -> None:
    """In a forked process: its copies would keep the folders locked after its parent was killed."""
    while _locks:
        os.close(_locks.pop())


os.register_at_fork(after_in_child=_close_locks)


_TRIES = 5  # to lock a folder: `has_writer` of another process locks it for a moment


def _lock(descriptor: int, kind: int) -> bool | None:
    """Whether the lock could be taken; None if the file system has no locks, as some network file systems."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock the folder; an error if another process writes it. The system ends the lock with the process."""
    descriptor = os.open(folder, os.O_RDONLY)
    for tries in range(_TRIES):
        if _lock(descriptor, fcntl.LOCK_EX) is not False:
            break
        time.sleep(0.1 * (tries < _TRIES - 1))
    else:
        os.close(descriptor)
        raise SettingsError(f"another process is writing {str(folder)!r}; wait until it ends, or give another --out")
    _locks.add(descriptor)
    try:
        yield
    finally:
        _locks.remove(descriptor)
        os.close(descriptor)


def has_writer(folder: Path) -> bool | None:
    """Whether a process has locked the folder; None if this cannot be known."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return None
    try:
        found = _lock(descriptor, fcntl.LOCK_SH)
        return None if found is None else not found
    finally:
        os.close(descriptor)  # ends the lock
