"""Which old runs and node states `fedbn clean` deletes, and the deletion."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from fedbn_flwr.errors import SettingsError, StorageError, UserError

from .folder import RunFolder
from .state import find_folders, read_state, size_of

_STATE = re.compile(r".+-[0-9a-f]{32}")  # RUN-TOKEN, see fedbn_flwr.client.node_state
_CLIENT = re.compile(r"client-\d+")
_FILE = re.compile(r"round-\d+|\.round-\d+\.tmp|\.writable|status\.json|\.status\.json\.tmp")


@dataclass(frozen=True)
class Old:
    """A run folder, its checkpoint, or the node states of a run."""

    path: Path
    what: str
    changed: float
    size: int

    def delete(self) -> None:
        try:
            if self.path.is_dir():
                shutil.rmtree(self.path)
            else:
                self.path.unlink()
        except OSError as error:
            raise StorageError(f"{str(self.path)!r} cannot be deleted: {error.strerror}") from None


def old_runs(folders: Iterable[Path], before: float, *, keep_models: bool, unfinished: bool) -> Iterator[Old | str]:
    """Runs that last changed before a time, and why others of this age are kept."""
    for path in find_folders(folders):
        run = read_state(path, size=False)
        if run is None:
            yield f"{path}: kept, not a run folder of this project, or damaged"
            continue
        if run.changed >= before:
            continue
        what = f"{run.status}, round {run.round} of {run.rounds}"
        if run.status == "running" or (run.status != "finished" and not unfinished):
            yield f"{path}: kept, {what}"
        elif path.is_symlink() or any(path.rglob("*/summary.json")):
            yield f"{path}: kept, it is a link or has other runs below it"
        elif _is_locked(path):
            yield f"{path}: kept, a process is writing it"
        elif not keep_models:
            yield Old(path, what, run.changed, size_of(path))
        elif (checkpoint := path / "checkpoint").is_file():
            yield Old(checkpoint, f"checkpoint, {what}", run.changed, checkpoint.stat().st_size)


def _is_locked(path: Path) -> bool:
    """Whether a process carries out this run, which may be silent because it waits for a site."""
    try:
        with RunFolder(path).locked():
            return False
    except SettingsError:
        return True


def old_states(folder: Path, before: float) -> Iterator[Old | str]:
    """States of runs in which no client of this state folder trained since a time."""
    if not folder.is_dir():
        raise UserError(f"{str(folder)!r} is not a folder; expected the state folder of a node")
    runs = [path for path in sorted(folder.iterdir()) if path.is_dir() and _STATE.fullmatch(path.name)]
    if not runs and any(folder.iterdir()):
        raise UserError(f"{str(folder)!r} is not a state folder: it has no folder RUN-TOKEN, but other content")
    for path in runs:
        clients = list(path.iterdir())
        files = [file for client in clients if client.is_dir() for file in client.iterdir()]
        is_ours = all(client.is_dir() and _CLIENT.fullmatch(client.name) for client in clients) and all(
            file.is_file() and _FILE.fullmatch(file.name) for file in files
        )
        if not is_ours or path.is_symlink() or any(client.is_symlink() for client in clients):
            yield f"{path}: kept, it has files that are not states of clients"
            continue
        changed = max(each.lstat().st_mtime for each in (path, *clients, *files))
        if changed < before:
            yield Old(path, f"states of {len(clients)} clients", changed, size_of(path))
