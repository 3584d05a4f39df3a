"""Saves the state of a strategy as Flower's records: numbers, texts, arrays, records, and lists and dicts of these."""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from fedbn_flwr.errors import SettingsError, StorageError
from fedbn_flwr.messages.arrays import FlatArrays, pack

if TYPE_CHECKING:
    from ._rule import Rule

_STATE = "state"  # the record with everything but arrays and records, as Python's literals
_LITERALS = (type(None), bool, int, float, str, bytes)
_LISTS = {kind.__name__: kind for kind in (list, tuple, set)}
_PARTS = (np.ndarray, np.generic, ArrayRecord, MetricRecord, ConfigRecord)


class CannotSave(SettingsError):
    """An attribute of a strategy has a type that cannot be saved in a RecordDict."""


def state_of(rule: Rule) -> RecordDict:
    """The state of a rule and of those inside it; CannotSave names the attribute that has no place in a record."""
    parts: dict[str, Any] = {}
    literals = [_literal(each._kept(), str(each), parts) for each in rule.chain]
    arrays = {key: np.asarray(part, order="C") for key, part in parts.items() if isinstance(part, _PARTS[:2])}
    records = {key: part for key, part in parts.items() if key not in arrays}
    return RecordDict({_STATE: ConfigRecord({_STATE: repr(literals)}), "arrays": pack(arrays), **records})


def restore(rule: Rule, records: RecordDict) -> None:
    """The inverse of `state_of`, for a rule that was created with the same arguments and has begun its run."""
    if not isinstance(state := records.get(_STATE), ConfigRecord):
        raise StorageError(f"the strategy's state in the checkpoint has no ConfigRecord {_STATE!r}")
    for each, literal in zip(rule.chain, ast.literal_eval(str(state[_STATE])), strict=True):
        each._keep(_value(literal, records))


def _literal(value: Any, name: str, parts: dict[str, Any]) -> tuple[str, Any]:
    """The kind of a value, and literals for it; what is none becomes one of the `parts`, and its key the literal."""
    kind = type(value)
    if isinstance(value, _PARTS):
        parts[key := str(len(parts))] = value
        return ("scalar" if isinstance(value, np.generic) else "array" if kind is np.ndarray else "record"), key
    if kind in (dict, FlatArrays):
        pairs = [(_literal(key, name, parts), _literal(each, f"{name}.{key}", parts)) for key, each in value.items()]
        return "dict", pairs
    if kind in _LISTS.values():
        return kind.__name__, [_literal(each, name, parts) for each in value]
    if kind in _LITERALS and not (kind is float and not math.isfinite(value)):
        return "", value
    raise CannotSave(
        f"{name} is a {kind.__name__}, which cannot be saved; expected numbers, strings, arrays, records, or lists and "
        "dicts of these"
    )


def _value(literal: tuple[str, Any], records: Mapping[str, Any]) -> Any:
    kind, content = literal
    if kind == "dict":
        return {_value(key, records): _value(each, records) for key, each in content}
    if kind in _LISTS:
        return _LISTS[kind](_value(each, records) for each in content)
    if kind in ("array", "scalar"):
        array = records["arrays"][content].numpy()
        return array if kind == "array" else array[()]
    return records[content] if kind == "record" else content
