"""Loads the user's own parts, such as a network, a loss or a partition, by their names `module:name` in an experiment.

The module is an installed package, or a file or package in the folder where the command was started, as with
`python -m`.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
import operator
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from fedbn_flwr.trees import Draft, Tree

from .errors import SettingsError, did_you_mean

# The folder where `fedbn` was started, since Flower's processes run in another folder.
FOLDER = "FEDBN_FOLDER"


def is_name(text: str) -> bool:
    """Whether a setting is `module:name`, and not a path or a name in this library."""
    return ":" in text and not text.startswith((".", "/", "~"))


def path_of(given: str) -> Path:
    """A path in the settings; a relative path begins in the folder where the command was started."""
    return Path(os.environ.get(FOLDER, "")) / Path(given).expanduser()


def load(key: str, name: str) -> Callable[..., Any]:
    """The function, class or other callable that `name` (`module:name`) refers to; `key` is the setting's key."""
    module, _, path = name.partition(":")
    if not module or not all(map(str.isidentifier, path.split("."))):
        raise SettingsError(f"{key}={name!r}: expected module:callable, for instance my_parts:{key.rpartition('.')[2]}")
    here, top = path_of("").resolve(), module.partition(".")[0]
    if top not in sys.modules and (os.path.isdir(here / top) or os.path.isfile(here / f"{top}.py")):
        if str(here) not in sys.path:
            sys.path.insert(0, str(here))
        importlib.invalidate_caches()  # Python's list of the folder may be older than the file
    try:
        loaded = importlib.import_module(module)
    except (Exception, SystemExit) as error:
        is_absent = isinstance(error, ModuleNotFoundError) and error.name == top
        hint = f"; expected a module in {str(here)!r}, in a folder of PYTHONPATH, or installed" if is_absent else ""
        raise SettingsError(
            f"{key}={name!r}: cannot import {module!r} ({type(error).__name__}: {error}){hint}"
        ) from error
    _check_folder(f"{key}={name!r}", loaded, here)
    try:
        found = operator.attrgetter(path)(loaded)
    except AttributeError as error:
        known = [word for word in dir(error.obj) if not word.startswith("_") and callable(getattr(error.obj, word))]
        hint = did_you_mean(str(error.name), known)
        raise SettingsError(f"{key}={name!r}: {module!r} has no {path!r}; {hint}") from None
    if not callable(found):
        raise SettingsError(f"{key}={name!r} is a {type(found).__name__}; expected a function or a class")
    return found  # type: ignore[no-any-return]


def _check_folder(what: str, loaded: ModuleType, here: Path) -> None:
    """Raise SettingsError if Python has already imported another module of this name, for instance in another folder.

    A copy of the file in `here` is fine: in Flower's processes, modules of an app bundle are copies.
    """
    stem, own = here.joinpath(*loaded.__name__.split(".")), Path(getattr(loaded, "__file__", None) or here)
    for file in (stem / "__init__.py", stem.with_name(f"{stem.name}.py")):
        if file.is_file() and not (own.is_file() and own.read_bytes() == file.read_bytes()):
            found = str(own) if own.is_file() else "Python itself"
            raise SettingsError(
                f"{what}: {loaded.__name__!r} is already loaded from {found!r}, not from {str(file)!r}; "
                "start a new process, or give the module another name"
            )


def names_in(settings: object) -> set[str]:
    """All names `module:callable` in settings (nested mappings and lists)."""
    if isinstance(settings, str):
        return {settings} if is_name(settings) else set()
    items = (
        settings.values() if isinstance(settings, Mapping) else settings if isinstance(settings, list | tuple) else ()
    )
    return {name for item in items for name in names_in(item)}


def sources(settings: object) -> dict[str, str]:
    """The files of the imported modules that settings name, each with its SHA-256."""
    found = {}
    for module in sorted({name.partition(":")[0] for name in names_in(settings)}):
        file = getattr(sys.modules.get(module), "__file__", None)
        if file is not None and (path := Path(file)).is_file():
            parts = module.count(".") + 1 + (path.name == "__init__.py")
            found["/".join(path.parts[-parts:])] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def call(key: str, name: str, *positional: Any, **arguments: Any) -> Any:
    """Call `name` with these arguments, and return the result; errors name the setting `key`."""
    function = load(key, name)
    try:
        return function(*positional, **arguments)
    except SettingsError:
        raise
    except (Exception, SystemExit) as error:
        raise SettingsError(f"{key}={name!r} failed", f": {in_a_line(error)}") from error


def with_options(key: str, name: str, options: Tree) -> Callable[..., Any]:
    """The callable `name` with these options; a class is called with them, and returns it."""
    function = load(key, name)
    if isinstance(function, type):
        return call(key, name, **options)  # type: ignore[no-any-return]
    return functools.partial(function, **options) if options else function


def in_a_line(error: BaseException) -> str:
    """An error of the user's code on one line, since torch's errors have many."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def accepted(function: Callable[..., Any], offered: Tree) -> Draft:
    """The `offered` arguments that the function's signature names; **kwargs does not count."""
    signature = signature_of(function)
    return {key: value for key, value in offered.items() if signature is not None and key in signature.parameters}


def signature_of(function: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except ValueError:  # some built-in callables have no signature
        return None
