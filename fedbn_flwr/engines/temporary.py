"""Temporary folders."""

from __future__ import annotations

import tempfile
from pathlib import Path

from fedbn_flwr.errors import StorageError
from fedbn_flwr.storage import writing


def temporary_folder(kind: str) -> tempfile.TemporaryDirectory[str]:
    """A folder in the system's temporary folder, until it is cleaned up or this process ends."""
    try:
        with writing(Path(tempfile.gettempdir())):
            return tempfile.TemporaryDirectory(prefix=f"fedbn-tmp-{kind}-", ignore_cleanup_errors=True)
    except FileNotFoundError as error:
        raise StorageError(f"there is no folder for temporary files: {error.strerror}; set TMPDIR") from None
