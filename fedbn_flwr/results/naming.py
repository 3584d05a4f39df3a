"""The names `module:callable` that settings have for the user's own parts."""

from __future__ import annotations

import functools
import hashlib
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path

from fedbn_flwr.named import Make, arguments_in, given, is_name

_MARK = f"@{secrets.token_hex(4)}"  # of this process, in the name of a part that it alone has


def give_name(part: Make) -> str:
    """The name of a function, class or `functools.partial`, with which `load` returns it.

    What no module has, such as a function inside another one, is kept: its name holds in this process and its forked
    workers, and in no other, since nothing tells whether a definition there is the same.
    """
    if isinstance(part, functools.partial):
        text = ", ".join(f"{key}={value!r}" for key, value in part.keywords.items())
        if not part.args and (not text or arguments_in(f"{text})") is not None):
            return give_name(part.func) + (f"({text})" if text else "")
    core = part.func if isinstance(part, functools.partial) else part
    name = f"{core.__module__}:{core.__qualname__}"
    if core is not part or "<" in name:
        name = next((known for known, other in given.items() if other is part), f"{name}{_MARK}-{len(given)}")
        given[name] = part
    return name


def names_in(settings: object) -> set[str]:
    """All names `module:callable` in settings (nested mappings and lists)."""
    if isinstance(settings, str):
        return {settings} if is_name(settings) else set()
    items = (
        settings.values() if isinstance(settings, Mapping) else settings if isinstance(settings, list | tuple) else ()
    )
    return {name for item in items for name in names_in(item)}


def only_here(settings: object) -> set[str]:
    """The names in settings that no other process knows."""
    return {name for name in names_in(settings) if "@" in name}


def sources(settings: object) -> dict[str, str]:
    """The files of the imported modules that settings name, each with its SHA-256."""
    found = {}
    for module in sorted({name.partition(":")[0] for name in names_in(settings)}):
        file = getattr(sys.modules.get(module), "__file__", None)
        if file is not None and (path := Path(file)).is_file():
            parts = module.count(".") + 1 + (path.name == "__init__.py")
            found["/".join(path.parts[-parts:])] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found
