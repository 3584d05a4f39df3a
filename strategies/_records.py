"""Converts attributes to Flower's records and back, to save the state of a rule or of any other strategy.

The type of a value decides how it is saved: None, booleans, numbers, strings, bytes, and lists, tuples, sets and dicts
of these become Python literals; NumPy arrays and scalars, and lists, tuples and dicts of arrays, become ArrayRecords;
Flower's records stay records.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from fedbn_flwr.errors import SettingsError, StorageError
from fedbn_flwr.messages.arrays import FlatArrays, pack, unpack

Record = ArrayRecord | MetricRecord | ConfigRecord

_LITERALS = (type(None), bool, int, float, str, bytes)


class CannotSave(SettingsError):
    """An attribute of a strategy has a type that cannot be saved in a RecordDict."""


def save(values: Mapping[str, Any], owner: str) -> RecordDict:
    """The records from which `load` restores the values; CannotSave names the `owner`."""
    literals: dict[str, Any] = {}
    records: dict[str, Record] = {}
    for name, value in values.items():
        if isinstance(value, Record):
            records[f"record:{name}"] = value
        elif _is_literal(value):
            literals[name] = repr(value)
        elif (arrays := _arrays(value)) is not None:
            kind, content = arrays
            records[f"{kind}:{name}"] = pack(content)
        else:
            raise CannotSave(
                f"{owner}.{name} is a {type(value).__name__}, which cannot be saved; expected numbers, strings, "
                "arrays, records, or lists and dicts of these"
            )
    return RecordDict({"literals": ConfigRecord(literals), **records})


def load(records: RecordDict) -> dict[str, Any]:
    """The values that `save` converted to these records."""
    literals = records.get("literals")
    if not isinstance(literals, ConfigRecord):
        raise StorageError("the strategy's state in the checkpoint has no ConfigRecord 'literals'")
    values = {name: ast.literal_eval(str(text)) for name, text in literals.items()}
    for key, record in records.items():
        kind, colon, name = key.partition(":")
        if not colon or "/" in kind:  # a record of a wrapped strategy
            continue
        values[name] = record if kind == "record" else _ARRAYS[kind](record)
    return values


def nested(name: str, records: RecordDict) -> dict[str, Record]:
    """The records of a wrapped strategy, prefixed with the name of the attribute that holds it."""
    return {f"{name}/{key}": record for key, record in records.items()}


def inside(name: str, records: RecordDict) -> RecordDict:
    """The inverse of `nested`: the records with the prefix, without it."""
    prefix = f"{name}/"
    return RecordDict({key.removeprefix(prefix): record for key, record in records.items() if key.startswith(prefix)})


def _is_literal(value: Any) -> bool:
    """Whether `ast.literal_eval(repr(value))` returns the same value with the same types."""
    kind = type(value)
    if kind in (list, tuple, set):
        return (kind is not set or bool(value)) and all(map(_is_literal, value))
    if kind is dict:
        return all(_is_literal(key) and _is_literal(item) for key, item in value.items())
    return kind in _LITERALS and not (kind is float and not math.isfinite(value))


def _arrays(value: Any) -> tuple[str, Mapping[str, np.ndarray]] | None:
    if isinstance(value, FlatArrays):
        return "flat", value
    if isinstance(value, np.ndarray | np.generic):
        return ("array" if isinstance(value, np.ndarray) else "scalar"), {"": np.asarray(value, order="C")}
    if type(value) in (list, tuple) and all(isinstance(array, np.ndarray) for array in value):
        return type(value).__name__, {str(i): np.asarray(array, order="C") for i, array in enumerate(value)}
    if type(value) is dict and all(isinstance(k, str) and isinstance(v, np.ndarray) for k, v in value.items()):
        return "dict", {key: np.asarray(array, order="C") for key, array in value.items()}
    return None


_ARRAYS: dict[str, Callable[[Any], Any]] = {
    "flat": unpack,
    "array": lambda record: record[""].numpy(),
    "scalar": lambda record: record[""].numpy()[()],
    "list": lambda record: [array.numpy() for array in record.values()],
    "tuple": lambda record: tuple(array.numpy() for array in record.values()),
    "dict": lambda record: {key: array.numpy() for key, array in record.items()},
}
