"""Finds the folder of a data set on this machine, without the packages that read it.

So a folder that does not exist is reported before a package that is not installed.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from fedbn_flwr import named
from fedbn_flwr.errors import DataError

from .catalogue import Entry
from .source import Source


def local(source: Source, entry: Entry | None) -> Path | None:
    """The file or folder of the data set on this machine, if it has one; DataError if it should have one."""
    name, key = source.name, "data.root" if source.root else "FEDBN_DATA"
    root, folder = source.root or os.environ.get("FEDBN_DATA"), named.path_of(name)
    if not name.startswith((".", "/", "~")):
        if root and (base := named.path_of(root)) and (base / name).exists():
            folder = base / name
        elif root and (entry is not None or not base.is_dir()):
            present = sorted(folder.name for folder in base.glob("[!.]*/"))[:12]
            hub = f", or leave out {key} to load {entry.hub!r} from the Hugging Face hub" if entry and entry.hub else ""
            raise DataError(
                f"{key} has no folder {name!r}; put a copy of the data there, as {name}/{hub}",
                f". {key}={root!r} contains {', '.join(present) or 'none'}",
            )
        elif entry is not None or not folder.exists():
            return None
    check_rights(folder)
    if not folder.exists():
        where = folder.absolute().parent
        present = sorted(path.name for path in where.glob("[!.]*"))[:12]
        raise DataError(
            f"data.name={str(folder)!r}: there is no such file or folder; give a table (.csv, .parquet, .npz), a "
            "folder with train*.parquet and test*.parquet, a name that `fedbn list datasets` shows, or the name of a "
            "data set on the Hugging Face hub",
            f". {str(where)!r} "
            + (f"contains {', '.join(present) or 'nothing'}" if where.is_dir() else "is no folder"),
        )
    return folder


def check_rights(name: Path, *below: Path) -> None:
    """Raise an error for files that this process may not read; a site's server does not see their names.

    Without this, names in a folder without the right x are reported as if they were missing.
    """
    above = list(reversed(name.absolute().parents))
    for path in (*above, name, *below):
        rights = os.X_OK if path in above else os.R_OK | os.X_OK if path.is_dir() else os.R_OK
        if path.exists() and not os.access(path, rights, effective_ids=True):
            status = path.stat()
            raise DataError(
                f"{str(name)!r} cannot be read by the user of this process, uid {os.geteuid()}; give this "
                "user the right to read it and all in it, for instance by chmod -R a+rX or an access control list",
                f": {str(path)!r} has the rights {stat.filemode(status.st_mode)} and belongs to uid {status.st_uid}",
            )
