"""Parts of the user, by the name `module:name` in an experiment: a network, a loss, a partition and others.

The module is an installed package, or a file or package in the folder in which the command was started, as with
`python -m`.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .errors import SettingsError, did_you_mean

# Flower's processes run in a folder of their own; this variable is the folder where `fedbn` was started.
FOLDER = "FEDBN_FOLDER"


def is_name(text: str) -> bool:
    """Whether a setting is `module:name`, and not a path or one of the library's own names."""
    return ":" in text and not text.startswith((".", "/", "~"))


def folder() -> Path:
    """The folder in which the command was started."""
    return Path(os.environ.get(FOLDER, ".")).resolve()


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
        importlib.invalidate_caches()  # the file may be newer than Python's list of the folder
    try:
        found: Any = importlib.import_module(module)
    except Exception as error:
        is_absent = isinstance(error, ModuleNotFoundError) and error.name == top
        hint = f"; expected a module in {str(here)!r}, in a folder of PYTHONPATH, or installed" if is_absent else ""
        raise SettingsError(
            f"{key}={name!r}: cannot import {module!r} ({type(error).__name__}: {error}){hint}"
        ) from error
    for part in path.split("."):
        if not hasattr(found, part):
            known = [word for word in dir(found) if not word.startswith("_") and callable(getattr(found, word))]
            raise SettingsError(f"{key}={name!r}: {module!r} has no {path!r}; {did_you_mean(part, known)}")
        found = getattr(found, part)
    if not callable(found):
        raise SettingsError(f"{key}={name!r} is a {type(found).__name__}; expected a function or a class")
    return found  # type: ignore[no-any-return]


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
    except Exception as error:
        raise SettingsError(f"{key}={name!r} failed: {in_a_line(error)}") from error


def in_a_line(error: Exception) -> str:
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
