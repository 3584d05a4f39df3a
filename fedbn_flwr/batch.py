"""What a batch consists of: a tensor, or a dict of tensors, with one row for each example."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor


def each(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """The value with `function` applied to its tensors."""
    return {key: function(part) for key, part in value.items()} if isinstance(value, Mapping) else function(value)


def count(value: Any) -> int:
    """The number of examples."""
    return len(next(iter(value.values())) if isinstance(value, Mapping) else value)
