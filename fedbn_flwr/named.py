"""Parts of the user, by the name `module:name` in an experiment: a network, a loss, a partition and others.

The module is an installed package, or a file or package in the folder in which the command was started, as with
`python -m`.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import SettingsError, did_you_mean

# Flower's processes run in a folder of their own; this variable is the folder where `fedbn` was started.
FOLDER = "FEDBN_FOLDER"


@dataclass
class _Import:
    spec: Any  # a reload makes another one
    changed: int | None  # when the file had last been changed; None without a file
    checked: set[Path]  # the folders of the command for which it is the right module


_imported: dict[str, _Import] = {}
_added: set[Path] = set()  # folders that this module put on Python's path


def is_name(text: str) -> bool:
    """Whether a setting is `module:name`, and not a path or one of the library's own names."""
    return ":" in text and not text.startswith((".", "/", "~"))


def folder() -> Path:
    """The folder in which the command was started."""
    return Path(os.environ.get(FOLDER, ".")).resolve()


def path_of(given: str) -> Path:
    """A path in the settings; a relative one begins in the folder in which the command was started."""
    return Path(os.environ.get(FOLDER, "")) / Path(given).expanduser()


def load(key: str, name: str) -> Callable[..., Any]:
    """The function, class or other callable that `name` (`module:name`) refers to; `key` is the setting's key."""
    module, _, path = name.partition(":")
    if not module or not path:
        raise SettingsError(f"{key}={name!r}: expected module:callable, for instance my_parts:{key.rpartition('.')[2]}")
    here = folder()
    top = module.partition(".")[0]
    if top not in sys.modules and ((here / top).is_dir() or (here / f"{top}.py").is_file()):
        if str(here) not in sys.path:
            sys.path.insert(0, str(here))
            _added.add(here)
        importlib.invalidate_caches()  # the file may be newer than Python's list of the folder
    try:
        found: Any = importlib.import_module(module)
    except (Exception, SystemExit) as error:
        is_absent = isinstance(error, ModuleNotFoundError) and error.name == top
        hint = f"; expected a module in {str(here)!r}, in a folder of PYTHONPATH, or installed" if is_absent else ""
        raise SettingsError(
            f"{key}={name!r}: cannot import {module!r} ({type(error).__name__}: {error}){hint}"
        ) from error
    if (entry := _imported.get(module)) is None or entry.spec is not found.__spec__:
        entry = _imported[module] = _Import(found.__spec__, _changed(found), set())
    if here not in entry.checked:  # parts are looked up in every round
        _check_folder(key, name, module, here)
        entry.checked.add(here)
    for part in path.split("."):
        if not hasattr(found, part):
            known = [word for word in dir(found) if not word.startswith("_") and callable(getattr(found, word))]
            raise SettingsError(f"{key}={name!r}: {module!r} has no {path!r}; {did_you_mean(part, known)}")
        found = getattr(found, part)
    if not callable(found):
        raise SettingsError(f"{key}={name!r} is a {type(found).__name__}; expected a function or a class")
    return found  # type: ignore[no-any-return]


def _check_folder(key: str, name: str, module: str, here: Path) -> None:
    """Refuse a module of another folder: Python imports a name once in a process, and keeps it if the folder changes.

    A copy of the file in `here` is accepted: in Flower's processes, modules of an app bundle are such copies.
    """
    top, found = sys.modules[module.partition(".")[0]], sys.modules[module]
    paths = getattr(top, "__path__", None) or filter(None, [getattr(top, "__file__", None)])
    folders = {Path(path).parent.resolve() for path in paths}
    if here in folders:
        return
    stem = here.joinpath(*module.split("."))
    files = [file for file in (stem / "__init__.py", stem.with_name(f"{stem.name}.py")) if file.is_file()]
    own = getattr(found, "__file__", None)
    if files and own is not None and Path(own).is_file() and files[0].read_bytes() == Path(own).read_bytes():
        return
    if files or folders & _added:
        expected = f"not of {str(files[0] if files else here)!r}"
        raise SettingsError(
            f"{key}={name!r}: {module!r} is already loaded from {own or 'Python itself'!r}, {expected}; start a new "
            "process, or give the module another name"
        )


def _changed(module: Any) -> int | None:
    """When the file of a module was last changed."""
    try:
        return os.stat(module.__file__).st_mtime_ns
    except (AttributeError, TypeError, OSError):  # without a file
        return None


def names_in(settings: Any) -> set[str]:
    """The names `module:callable` in settings, which are nested mappings and lists."""
    if isinstance(settings, str):
        return {settings} if is_name(settings) else set()
    items = (
        settings.values() if isinstance(settings, Mapping) else settings if isinstance(settings, list | tuple) else ()
    )
    return {name for item in items for name in names_in(item)}


def sources(settings: Any) -> dict[str, str]:
    """The files of the modules that settings name, as far as they are imported, each with its SHA-256."""
    found = {}
    for module in sorted({name.partition(":")[0] for name in names_in(settings)}):
        file = getattr(sys.modules.get(module), "__file__", None)
        if file is not None and (path := Path(file)).is_file():
            parts = module.count(".") + 1 + (path.name == "__init__.py")
            found["/".join(path.parts[-parts:])] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def check_unchanged(settings: Any) -> None:
    """Refuse settings that name a module whose file was changed after its import.

    It is not loaded again here: objects of its classes could then not be pickled.
    """
    for text in sorted(names_in(settings)):
        name = text.partition(":")[0]
        module: Any = sys.modules.get(name)
        if (entry := _imported.get(name)) is None or getattr(module, "__spec__", None) is not entry.spec:
            continue
        if _changed(module) not in (None, entry.changed):
            raise SettingsError(
                f"{text!r}: {module.__file__!r} was changed after this process imported it; start a new process, "
                f"or call importlib.reload({name})"
            )


def call(key: str, name: str, *positional: Any, **arguments: Any) -> Any:
    """What the callable `name` returns for these arguments; errors name the setting `key`."""
    function = load(key, name)
    if (signature := signature_of(function)) is not None:
        try:
            signature.bind(*positional, **arguments)
        except TypeError as error:
            given = ", ".join([*(type(value).__name__ for value in positional), *arguments])
            raise SettingsError(f"{key}={name!r} cannot be called with {given}: {error}") from None
    try:
        return function(*positional, **arguments)
    except SettingsError:
        raise
    except (Exception, SystemExit) as error:
        raise SettingsError(f"{key}={name!r} failed: {in_a_line(error)}") from error


def in_a_line(error: BaseException) -> str:
    """An error of the user's code: torch's have many lines."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def accepted(function: Callable[..., Any], offered: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the `offered` arguments that the function's signature names; not all that **kwargs would accept."""
    signature = signature_of(function)
    return {key: value for key, value in offered.items() if signature is not None and key in signature.parameters}


def signature_of(function: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except ValueError:  # some built-in callables have none
        return None
