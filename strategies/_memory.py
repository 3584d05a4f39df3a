"""What a strategy remembers from round to round, in Flower's own container: to save it, and to go on from it.

A rule that remembers something has two hooks, `state() -> RecordDict` and `restore(records)`; a wrapper passes on to
the strategy inside. `restore` comes after `prepare`, in a strategy made with the same arguments.

Flower's own strategies have no hooks. Of them the instance's attributes are taken, each by its type:

- None, booleans, numbers, texts, bytes, and lists, tuples, sets and dicts of these, as Python literals;
- NumPy's arrays and numbers, lists, tuples and dicts of arrays, Flower's records;
- functions and classes are arguments, which the new instance has as well: left out;
- a strategy inside, as any other.

Anything else is refused by name. What a strategy draws from Python's or NumPy's global generator is not part of it.
"""

from __future__ import annotations

import ast
import functools
import math
import types
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.serverapp.strategy import Strategy

from fedbn_flwr.errors import SettingsError
from fedbn_flwr.messages.arrays import pack

_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, type, functools.partial)
_RECORDS = (ArrayRecord, MetricRecord, ConfigRecord)
_LITERALS = (type(None), bool, int, float, str, bytes)


class CannotSave(SettingsError):
    """A strategy remembers what has no place in a RecordDict."""


def state(strategy: Strategy) -> RecordDict:
    """All that a strategy remembers; raises CannotSave where that is not known."""
    hook = getattr(strategy, "state", None)
    if not callable(hook):
        return _attributes(strategy)
    found = hook()
    assert isinstance(found, RecordDict)
    return found


def restore(strategy: Strategy, records: RecordDict) -> None:
    """Make a strategy remember what `state` told of another instance."""
    hook = getattr(strategy, "restore", None)
    if not callable(hook):
        _set_attributes(strategy, records)
    else:
        hook(records)


def nested(name: str, records: RecordDict) -> dict[str, ArrayRecord | MetricRecord | ConfigRecord]:
    """Records of a strategy inside, named so that they meet no others."""
    return {f"{name}/{key}": record for key, record in records.items()}


def inside(name: str, records: RecordDict) -> RecordDict:
    """Those that `nested` named so, by their own names."""
    prefix = f"{name}/"
    return RecordDict({key.removeprefix(prefix): each for key, each in records.items() if key.startswith(prefix)})


def numbers(records: RecordDict, name: str) -> dict[str, Any]:
    """The values of a ConfigRecord; empty where there is none."""
    record = records.get(name)
    return {key: record[key] for key in record} if isinstance(record, ConfigRecord) else {}


# --- Flower's own strategies, by their attributes ------------------------------


def _attributes(strategy: Strategy) -> RecordDict:
    literals: dict[str, str] = {}
    found: dict[str, ArrayRecord | MetricRecord | ConfigRecord] = {}
    for name, value in vars(strategy).items():
        if isinstance(value, _FUNCTIONS):
            continue
        if isinstance(value, Strategy):
            found |= nested(name, state(value))
        elif isinstance(value, _RECORDS):
            found[f"record:{name}"] = value
        elif _is_literal(value):
            literals[name] = repr(value)
        elif (arrays := _arrays(value)) is not None:
            kind, content = arrays
            found[f"{kind}:{name}"] = pack(content)
        else:
            raise CannotSave(
                f"{type(strategy).__name__}.{name} is a {type(value).__name__}, which cannot be saved; give the "
                "strategy the methods state() and restore(records)"
            )
    return RecordDict({"literals": ConfigRecord(dict(literals)), **found})


def _is_literal(value: Any) -> bool:
    """Whether `ast.literal_eval` makes of the value's repr the same value, types included."""
    kind = type(value)
    if kind in (list, tuple, set):
        return (kind is not set or bool(value)) and all(map(_is_literal, value))
    if kind is dict:
        return all(_is_literal(key) and _is_literal(each) for key, each in value.items())
    return kind in _LITERALS and not (kind is float and not math.isfinite(value))


def _arrays(value: Any) -> tuple[str, dict[str, np.ndarray]] | None:
    if isinstance(value, np.ndarray | np.generic):
        return ("array" if isinstance(value, np.ndarray) else "scalar"), {"": np.asarray(value, order="C")}
    if type(value) in (list, tuple) and all(isinstance(each, np.ndarray) for each in value):
        return type(value).__name__, {str(i): np.asarray(each, order="C") for i, each in enumerate(value)}
    if type(value) is dict and all(isinstance(k, str) and isinstance(v, np.ndarray) for k, v in value.items()):
        return "dict", {key: np.asarray(each, order="C") for key, each in value.items()}
    return None


def _set_attributes(strategy: Strategy, records: RecordDict) -> None:
    for name, text in numbers(records, "literals").items():
        setattr(strategy, name, ast.literal_eval(text))
    for name, value in list(vars(strategy).items()):
        if isinstance(value, Strategy):
            restore(value, inside(name, records))
    for key, record in records.items():
        kind, colon, name = key.partition(":")
        if not colon or "/" in kind:  # of a strategy inside
            continue
        if kind == "record":
            setattr(strategy, name, record)
        elif isinstance(record, ArrayRecord):
            arrays = {each: array.numpy() for each, array in record.items()}
            made: Any = {
                "array": lambda arrays: arrays[""],
                "scalar": lambda arrays: arrays[""][()],
                "list": lambda arrays: list(arrays.values()),
                "tuple": lambda arrays: tuple(arrays.values()),
                "dict": dict,
            }[kind](arrays)
            setattr(strategy, name, made)
