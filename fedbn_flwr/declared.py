"""Checks arguments against their annotations, such as `Annotated[float, Ge(0)]` or `Literal["mean", "median"]`.

It checks numbers, texts, truth values, functions and choices, and the limits in `Annotated`; it converts nothing. A
text in `Annotated` becomes the error's "expected ...".
"""

from __future__ import annotations

import functools
import inspect
import operator
import types
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np

from .errors import SettingsError

if TYPE_CHECKING:
    from pydantic import TypeAdapter

F = TypeVar("F", bound=Callable[..., object])

_SIMPLE = {bool: "true or false", int: "an integer", float: "a number", str: "a text", types.NoneType: "None"}
# The limits of annotated_types.
_LIMITS = {"ge": (">=", operator.ge), "gt": (">", operator.gt), "le": ("<=", operator.le), "lt": ("<", operator.lt)}


def checked(function: F) -> F:
    """Make the function raise SettingsError if an argument does not fit its annotation."""
    signature = inspect.signature(function)
    # On the first call, since an annotation may name something that is defined further down.
    hints = functools.cache(lambda: declarations(function))

    @functools.wraps(function)
    def call(*args: object, **kwargs: object) -> object:
        given: Mapping[str, object] = {}
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError as error:  # for other wrong arguments, the function raises a better error
            if "too many positional" in str(error) and function.__name__ == "__init__":
                kind, first = type(args[0]).__name__, [*signature.parameters][1]
                raise TypeError(
                    f"{kind} takes its arguments by name, such as {first}=; found {type(args[-1]).__name__} without one"
                ) from None
        for name in filter(hints().get, given):
            check(name, given[name], hints()[name])
        return function(*args, **kwargs)

    return call  # type: ignore[return-value]


def declarations(function: Callable[..., object]) -> Mapping[str, object]:
    """The annotations of a function's arguments that can be checked."""
    with suppress(NameError):  # the annotation has a name that only type checkers import
        return {name: hint for name, hint in get_type_hints(function, include_extras=True).items() if is_simple(hint)}
    return {}


def check(name: str, value: object, annotation: object) -> None:
    """Raise SettingsError if a value does not fit its annotation."""
    plain = value.item() if isinstance(value, np.generic) else value
    if not _fits(plain, annotation):
        raise SettingsError(f"{name} is {value!r}; expected {in_words(annotation)}")


def _fits(value: Any, annotation: Any) -> bool:
    kind, parts = get_origin(annotation), get_args(annotation)
    if kind in (Union, types.UnionType):
        return any(_fits(value, part) for part in parts)
    if kind is Literal:
        return any(type(value) is type(part) and value == part for part in parts)
    if isinstance(annotation, type):
        return isinstance(value, int | float if annotation is float else annotation) and (
            annotation is bool or not isinstance(value, bool)
        )
    if kind is Callable:
        return callable(value)
    if kind is Annotated and (is_simple(parts[0]) or isinstance(parts[0], type)):
        limits = [(_LIMITS[key][1], getattr(note, key)) for note in parts[1:] for key in _LIMITS if hasattr(note, key)]
        return _fits(value, parts[0]) and all(holds(value, limit) for holds, limit in limits)
    return adapter(annotation).validator.isinstance_python(value, strict=True)


@functools.cache
def adapter(annotation: Any) -> TypeAdapter[object]:
    from pydantic import TypeAdapter  # a slow import, which clients do not need

    return TypeAdapter(annotation)


def is_simple(annotation: object) -> bool:
    """Whether `check` can check it."""
    if get_origin(annotation) in (Union, types.UnionType):
        return all(map(is_simple, get_args(annotation)))
    return annotation in _SIMPLE or get_origin(annotation) in (Annotated, Literal, Callable)


def in_words(annotation: Any) -> str:
    """An annotation in words: "a number >= 0", "'mean' or 'median'"."""
    kind, parts = get_origin(annotation), get_args(annotation)
    if kind is Annotated:
        said = [note for note in parts[1:] if isinstance(note, str)]
        limits = [f"{_LIMITS[key][0]} {getattr(n, key)}" for n in parts[1:] for key in _LIMITS if hasattr(n, key)]
        return said[0] if said else f"{in_words(parts[0])} {' and '.join(limits)}"
    if kind in (Union, types.UnionType, Literal):
        words = [repr(part) if kind is Literal else in_words(part) for part in parts]
        return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))
    return "a function" if kind is Callable else _SIMPLE[annotation]
