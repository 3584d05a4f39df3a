"""Where on this machine a data set is. PyTorch is not imported here, so that a wrong name has an error at once."""

from __future__ import annotations

import os
from pathlib import Path

from fedbn_flwr import named
from fedbn_flwr.errors import DataError, did_you_mean
from fedbn_flwr.storage import check_rights

from .catalogue import CATALOGUE
from .source import Source


def located(source: Source) -> Path | None:
    """The file or folder of a data set; None if the hub, a package or a function has it, DataError if nothing has."""
    name, key, entry = source.name, "data.root" if source.root else "FEDBN_DATA", CATALOGUE.get(source.name)
    if source.random or named.is_name(name) or (entry is not None and entry.embedded):
        return None
    root, folder = source.root or os.environ.get("FEDBN_DATA"), named.path_of(name)
    if not name.startswith((".", "/", "~")):
        if root and (base := named.path_of(root)) and (base / name).exists():
            folder = base / name
        elif root and (entry is not None or not base.is_dir()):
            hub = f", or leave out {key} to load {entry.hub!r} from the Hugging Face hub" if entry and entry.hub else ""
            raise DataError(
                f"{key} has no folder {name!r}; put a copy of the data there, as {name}/{hub}",
                f". {key}={root!r} contains {content_of(base, '[!.]*/') or 'none'}",
            )
        elif entry is not None or not folder.exists():
            _check_hub(name)
            return None
    check_rights(folder)
    if not folder.exists():
        where = folder.absolute().parent
        raise DataError(
            f"data.name={str(folder)!r}: there is no such file or folder; give a table (.csv, .parquet, .npz), a "
            "folder with train*.parquet and test*.parquet, a name that `fedbn list datasets` shows, or the name of a "
            "data set on the Hugging Face hub",
            f". {str(where)!r} " + (f"contains {content_of(where) or 'nothing'}" if where.is_dir() else "is no folder"),
        )
    return folder


def content_of(folder: Path, pattern: str = "[!.]*") -> str:
    """The first names in a folder, for errors."""
    return ", ".join(sorted(path.name for path in folder.glob(pattern))[:12])


def _check_hub(name: str) -> None:
    """Raise DataError for a name that the hub cannot have; without a network, asking it would take half a minute."""
    entry = CATALOGUE.get(name)
    if entry is None and "/" not in name:
        raise DataError(
            f"data.name={name!r}: there is no such data set; give a folder, OWNER/NAME of a data set on the Hugging "
            "Face hub, or a name that `fedbn list datasets` shows; " + did_you_mean(name, CATALOGUE)
        )
    if entry is not None and entry.hub is None:
        raise DataError(
            f"data.name={name!r} ({entry.title}) is not on the Hugging Face hub; give data.root (or FEDBN_DATA), a "
            f"folder that contains {name}/ with {entry.files}"
        )
