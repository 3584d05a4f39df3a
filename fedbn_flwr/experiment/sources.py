"""What the source of a module says, without an import: PyTorch takes seconds, to refuse a wrong setting none."""

from __future__ import annotations

import ast
import functools
import importlib
import math
from collections.abc import Collection
from contextlib import suppress
from importlib.util import find_spec, resolve_name
from pathlib import Path
from typing import Any

from fedbn_flwr.declared import is_simple
from fedbn_flwr.models import MODELS

_PLAIN = ("typing", "collections.abc", "annotated_types")  # annotations are made of their names
_PACKAGE = __name__.partition(".")[0]


@functools.cache
def tree(module: str, *inside: str) -> ast.Module:
    """The syntax tree of a module, or of the file `inside` its folder."""
    file = Path(getattr(find_spec(module), "origin", ""))
    return ast.parse((file.parent.joinpath(*inside) if inside else file).read_bytes())


def docstring(place: str) -> str:
    """The docstring of `module:name`, or of a module."""
    module, _, name = place.partition(":")
    node: Any = _defined(module, name)[1] if name else tree(module)
    return ast.get_docstring(node) or ""


def optimizers() -> list[str]:
    """The optimisers of PyTorch, in lower case."""
    lines = [line for line in tree("torch", "optim", "__init__.py").body if isinstance(line, ast.ImportFrom)]
    names = [alias.name for line in lines for alias in line.names if alias.name[0].isupper()]
    return [name.lower() for name in names if name != "Optimizer"]


@functools.cache
def arguments(place: str) -> dict[str, object]:
    """The arguments of a function or class `module:name` of this library, with annotations where these can be checked.

    What `**options` takes are the arguments of the base class, or of the strategy that the class names as `wraps`.
    """
    module, found = _defined(*place.split(":"))
    if found is None:
        return {}
    parts: list[Any] = found.body if isinstance(found, ast.ClassDef) else []
    init: Any = next((part for part in parts if getattr(part, "name", "") == "__init__"), found)
    given = (*init.args.args, *init.args.kwonlyargs) if isinstance(init, ast.FunctionDef) else ()
    own = {each.arg: _annotation(module, each.annotation) for each in given if each.arg != "self"}
    if parts and (init is found or init.args.kwarg):
        wraps = [
            part.value for part in parts if isinstance(part, ast.Assign) and ast.unparse(part.targets[0]) == "wraps"
        ]
        for base in wraps or found.bases:
            own |= arguments(f"{module}:{ast.unparse(base)}") | own
    return own


def describe_models() -> dict[str, str]:
    """Each model and the first line of its docstring."""
    lines = {name: docstring(_model(name)).split("\n")[0] for name in MODELS}
    return lines | {"MODULE:CALLABLE": "a network of your own: a function of num_classes that returns a torch module"}


def arguments_of_model(name: str) -> Collection[str]:
    """The arguments of a network in `MODELS`."""
    return arguments(_model(name))


def _model(name: str) -> str:
    return f"fedbn_flwr.models.{MODELS[name]}"


def _defined(module: str, name: str) -> tuple[str, Any]:
    """The module that defines a name of this one, and the statement; None if it's a part of another library."""
    line: Any
    for line in tree(module).body:
        for alias in line.names if isinstance(line, ast.ImportFrom) else ():
            if name == (alias.asname or alias.name):
                place = resolve_name("." * line.level + (line.module or ""), module.rpartition(".")[0])
                return _defined(place, alias.name) if place.startswith(_PACKAGE) else (place, None)
        if name in (getattr(line, "name", ""), *map(ast.unparse, getattr(line, "targets", ()))):
            return module, line
    raise KeyError(name)


class _Names(dict[str, Any]):
    """The names of which the annotations in a module are made; KeyError for others, which becomes NameError."""

    def __init__(self, module: str) -> None:
        super().__init__(math=math)
        self.module = module

    def __missing__(self, name: str) -> object:
        place, line = _defined(self.module, name)
        if isinstance(line, ast.Assign):
            return eval(ast.unparse(line.value), {}, _Names(place))  # noqa: S307 of this library's own files
        if line is None and place in _PLAIN:
            return getattr(importlib.import_module(place), name)
        raise KeyError(name)


def _annotation(module: str, node: ast.expr | None) -> object:
    """The annotation, if `declared` can check it and what it names can be had without an import."""
    with suppress(NameError):
        found = eval(ast.unparse(node), {}, _Names(module)) if node else None  # noqa: S307
        return found if is_simple(found) else None
    return None
