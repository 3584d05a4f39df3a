"""Where run folders are: the output folder, and the folders of runs in others."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from fedbn_flwr.errors import FedbnError, SettingsError, UserError
from fedbn_flwr.results.text import file_name


def default_folder() -> Path:
    """The folder of all output, `runs` or $FEDBN_OUT."""
    return Path(os.environ.get("FEDBN_OUT") or "runs")


def default_out(name: str) -> Path:
    """A new folder for output, NAME-TIME in the default parent folder."""
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    folder = default_folder() / f"{file_name(name)}-{stamp}"
    repeats = (folder.with_name(f"{folder.name}-{number}") for number in itertools.count(2))
    return next(path for path in itertools.chain([folder], repeats) if not path.exists())


def out_folder(name: str, out: str | Path | None, *, resume: bool) -> Path:
    """The folder that the user asks for, or a new one."""
    if resume and not out:
        raise SettingsError("to resume runs, give their folder by --out")
    if "\0" in str(out):
        raise SettingsError(f"out is {str(out)!r}; expected a path without the character '\\x00'")
    return (Path(out).expanduser() if out else default_out(name)).resolve()  # a part of the user may change the folder


def from_here(path: Path) -> Path:
    """A path as a person writes it: relative to the current folder if it is inside."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def find_folders(folders: Iterable[Path]) -> dict[Path, int]:
    """All folders with a summary.json in these folders and below them, and the index of the folder they are in."""
    found: dict[Path, int] = {}
    for number, folder in enumerate(folders):
        if not folder.is_dir():
            raise UserError(f"{str(folder)!r} is not a folder; give run folders or their parent folders")
        # A subfolder may disappear during the search, or not be readable: os.walk leaves it out.
        found = dict.fromkeys(sorted(_with_summary(folder)), number) | found
    return found


def _with_summary(folder: Path) -> Iterator[Path]:
    """The folders with a summary.json: this one, those below it, and those that links in it lead to; each once.

    Links are not followed further, since they may lead to the whole disk.
    """
    seen = set()
    for where, below, _ in os.walk(folder):
        below.sort()
        links = (path for name in below if os.path.islink(path := os.path.join(where, name)))
        for path in (where, *links):
            if os.path.exists(os.path.join(path, "summary.json")) and (real := os.path.realpath(path)) not in seen:
                seen.add(real)
                yield Path(path)


OF_RUN_CONFIG = "`out` in --run-config", "`resume=true` in --run-config"


@contextmanager
def options_as(out: str, resume: str) -> Iterator[None]:
    """Adapt advice for `fedbn run`, such as `--out` or `--resume`, to the way in which the run was started."""
    try:
        yield
    except FedbnError as error:
        error.args = tuple(str(argument).replace("--out", out).replace("--resume", resume) for argument in error.args)
        raise
