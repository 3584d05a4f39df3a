"""The lock on a run folder, which says whether a process writes it. The system ends it with the process."""

from __future__ import annotations

import fcntl
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from filelock import FileLock, Timeout

from fedbn_flwr.errors import SettingsError
from fedbn_flwr.storage import open_regular

_FILE = ".lock"
_MOMENT = 0.4  # seconds: `has_writer` of another process locks the folder for less


def locked(folder: Path) -> AbstractContextManager[object]:
    """Lock the folder until the block ends; an error if another process writes it.

    Some network file systems have no locks. Filelock closes a forked process's copy, which would outlive its parent.
    """
    try:
        return FileLock(folder / _FILE, mode=0o600).acquire(_MOMENT)
    except Timeout:
        raise SettingsError(
            f"another process is writing {str(folder)!r}; wait until it ends, or give another --out"
        ) from None
    except OSError:
        return nullcontext()


def has_writer(folder: Path) -> bool | None:
    """Whether a process has locked the folder; None if this cannot be known. The folder may be read-only."""
    try:
        with open_regular(folder / _FILE) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    except OSError:
        return None
    return False
