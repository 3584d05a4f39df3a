"""Loads the user's own parts, such as a network, a loss or a partition, by their names `module:name` in an experiment.

The module is an installed package, or a file or package in the folder where the command was started, as with
`python -m`. `module:name(key=value)` is a `functools.partial`. What no module has, such as a closure, is kept in this
process and its forked workers.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import operator
import os
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from fedbn_flwr.trees import Draft, Tree

from .errors import MissingPackage, SettingsError, did_you_mean

Make = Callable[..., Any]  # a function or a class that makes a part of a run
given: dict[str, Make] = {}  # by name, the parts that a caller gave as objects and this process cannot import

# The folder where `fedbn` was started, since Flower's processes run in another folder.
FOLDER = "FEDBN_FOLDER"


def is_name(text: str) -> bool:
    """Whether a setting is `module:name`, and not a path or a name in this library."""
    return ":" in text and not text.startswith((".", "/", "~"))


def check_name(key: str, name: str, known: Collection[str], what: str) -> str:
    """The name, if it is a known one or `module:callable`; else SettingsError says that it is not `what`."""
    if not is_name(name) and name not in known:
        raise SettingsError(
            f"{key}={name!r} is not {what}; {did_you_mean(name, known)}, or module:callable for your own"
        )
    return name


def as_path(given: str) -> str:
    """A path as a text that cannot be mistaken for a name: `heart` is a data set, `./heart` a folder."""
    return given if given.startswith((".", "/", "~")) else f"./{given}"


def path_of(given: str) -> Path:
    """A path in the settings; a relative path begins in the folder where the command was started."""
    return Path(os.environ.get(FOLDER, "")) / Path(given).expanduser()


def load(key: str, name: str) -> Make:
    """The function, class or other callable that `name` refers to; `key` is the setting's key."""
    plain, bracket, text = name.partition("(")
    module, _, path = plain.partition(":")
    arguments = arguments_in(text) if bracket else {}
    if plain not in given and ("@" in path or "<" in path):
        raise SettingsError(
            f"{key}={name!r} was defined inside a function and given to run(), and this process does not have it; give "
            "it to run() again, or define it at the top of a module or of a notebook cell"
        )
    is_wrong = not module or not all(map(str.isidentifier, path.split(".")))
    if arguments is None or (is_wrong and plain not in given):
        raise SettingsError(f"{key}={name!r}: expected module:callable, for instance my_parts:{key.rpartition('.')[2]}")
    if (allowed := _allowed.get()) is not None and not {name, plain} & {*allowed}:
        raise SettingsError(
            f"{key}={name!r} is code that the run folder names, and its author chose it; if you trust it, "
            f"allow it: --allow {plain}, in Python Result.read(folder, allow={plain!r})"
        )
    found = given.get(plain) or _imported(key, plain, module, path)
    return functools.partial(found, **arguments) if arguments else found


_allowed: ContextVar[Collection[str] | None] = ContextVar("allowed", default=None)  # None: all names


@contextmanager
def only(allowed: Collection[str]) -> Iterator[None]:
    """Inside, `load` loads nothing but these names: for the content of a folder that someone else may have written."""
    before = _allowed.set(allowed)
    try:
        yield
    finally:
        _allowed.reset(before)


def _imported(key: str, name: str, module: str, path: str) -> Make:
    here, top = path_of("").resolve(), module.partition(".")[0]
    if top not in sys.modules and (os.path.isdir(here / top) or os.path.isfile(here / f"{top}.py")):
        if str(here) not in sys.path:
            sys.path.insert(0, str(here))
        importlib.invalidate_caches()  # Python's list of the folder may be older than the file
    try:
        loaded = importlib.import_module(module)
    except MissingPackage:  # it says what to install
        raise
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


def arguments_in(text: str) -> Draft | None:
    """The values in `key=value, ...)`, which are literals of Python; None if the text is something else."""
    with suppress(SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        call = ast.parse(f"f({text}", mode="eval").body
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.keywords and not call.args:
            found = {argument.arg: ast.literal_eval(argument.value) for argument in call.keywords}
            return None if None in found else found  # type: ignore[return-value]
    return None


def call(key: str, name: str, /, *positional: object, **arguments: object) -> Any:
    """Call `name` with these arguments, and return the result; errors name the setting `key`."""
    function = load(key, name)
    try:
        return function(*positional, **arguments)
    except SettingsError:
        raise
    except (Exception, SystemExit) as error:
        raise SettingsError(f"{key}={name!r} failed", f": {in_a_line(error)}") from error


def with_options(key: str, name: str, options: Tree) -> Make:
    """The callable `name` with these options; a class is called with them, and returns it."""
    function = load(key, name)
    if isinstance(getattr(function, "func", function), type):
        return call(key, name, **options)  # type: ignore[no-any-return]
    return functools.partial(function, **options) if options else function


def in_a_line(error: BaseException) -> str:
    """An error of the user's code on one line, since torch's errors have many."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def accepted(function: Make, offered: Tree) -> Draft:
    """The `offered` arguments that the function's signature names; **kwargs does not count."""
    signature = signature_of(function)
    return {key: value for key, value in offered.items() if signature is not None and key in signature.parameters}


def takes(function: Callable[..., object], keyword: str) -> bool:
    """Whether the function can be called with this keyword, as far as its signature says."""
    signature = signature_of(function)
    if signature is None or keyword in signature.parameters:
        return True
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())


_signature = functools.lru_cache(inspect.signature)


def signature_of(function: Callable[..., object]) -> inspect.Signature | None:
    try:
        return (_signature if isinstance(function, FunctionType | type) else inspect.signature)(function)
    except ValueError:  # some built-in callables have no signature
        return None
