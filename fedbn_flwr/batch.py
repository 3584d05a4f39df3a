"""A batch is a pair (inputs, targets): each of the two is a tensor [N, ...] or a dict of such tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

# All tensors have one row for each example.
Value = Tensor | Mapping[str, Tensor]


def each(function: Callable[[Tensor], Any], value: Value) -> Any:
    """The result of `function` for the tensor, or a dict of its results for all tensors of a dict."""
    if isinstance(value, Mapping):
        return {key: function(tensor) for key, tensor in value.items()}
    return function(value)


def tensors(value: Value) -> list[Tensor]:
    """The tensor alone, or all tensors of a dict."""
    return list(value.values()) if isinstance(value, Mapping) else [value]


def first(value: Value) -> Tensor:
    """The tensor, or the first one of a dict."""
    return tensors(value)[0]


def count(value: Value) -> int:
    """N, the number of examples."""
    return len(first(value))
