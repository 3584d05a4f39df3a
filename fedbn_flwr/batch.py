"""A batch is a pair (inputs, targets): each of the two is a tensor [N, ...] or a dict of such tensors.

`split_batch` finds both in a batch of another form, for instance a dict of a Hugging Face data set.
"""

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
    """A list of the tensor, or of all tensors of a dict."""
    return list(value.values()) if isinstance(value, Mapping) else [value]


def first(value: Value) -> Tensor:
    """The tensor, or the first one of a dict."""
    return tensors(value)[0]


def count(value: Value) -> int:
    """N, the number of examples."""
    return len(first(value))


# --- batches of other forms ---

Pair = tuple[Any, Any]  # (inputs, targets), each a tensor or a dict of tensors
# A function that returns the pair of a batch, or the keys (or positions) of both.
Split = Callable[[Any], Pair] | tuple[str | int, str | int]

# Columns of the data sets that Flower's templates and examples use, and those of torchvision, timm and transformers.
INPUTS = ("img", "image", "images", "pixel_values", "input", "inputs", "x", "features")
TARGETS = ("label", "labels", "target", "targets", "y", "mask")


def split_batch(batch: Any, how: Split | None) -> Pair:
    """Inputs and targets of a batch; TypeError with its type and keys if they cannot be found."""
    if how is None and type(batch) in (tuple, list) and [*map(type, batch)] == [Tensor, Tensor]:
        return batch[0], batch[1]  # nearly all batches
    if how is None:
        pair = _found(batch)
    elif callable(how):
        pair = how(batch)
    else:
        try:
            pair = batch[how[0]], batch[how[1]]
        except (KeyError, IndexError, TypeError):
            raise TypeError(f"batch={how!r} does not suit the data: a batch is {_described(batch)}") from None
    if not _is_pair(pair):
        origin = "a batch is" if how is None else f"batch={getattr(how, '__name__', how)!r} returned"
        raise TypeError(
            f"{origin} {_described(pair)}; expected a pair of tensors (inputs, targets), or of dicts of them. {_CURE}"
        )
    return pair[0], pair[1]


def _is_pair(batch: Any) -> bool:
    return isinstance(batch, tuple | list) and len(batch) == 2 and all(map(_is_value, batch))


def _is_value(value: Any) -> bool:
    return bool(found := tensors(value)) and all(hasattr(each, "to") for each in found)


_CURE = (
    "Give BNClient batch=(KEY_OF_INPUTS, KEY_OF_TARGETS), or a function that returns both, for instance "
    "batch=lambda b: (b['img'], b['label'])"
)


def _found(batch: Any) -> Any:
    if not isinstance(batch, Mapping):
        return batch
    inputs, targets = ([key for key in names if key in batch] for names in (INPUTS, TARGETS))
    if len(inputs) != 1 or len(targets) != 1:
        raise TypeError(
            f"a batch is {_described(batch)}; it is not clear which keys are inputs and targets (known: one of "
            f"{', '.join(INPUTS)}, and one of {', '.join(TARGETS)}). {_CURE}"
        )
    return batch[inputs[0]], batch[targets[0]]


def _described(batch: Any) -> str:
    kind = f"a {type(batch).__name__}"
    if isinstance(batch, Mapping):
        return f"{kind} with the keys {', '.join(map(repr, batch))}"
    if isinstance(batch, tuple | list):
        return f"{kind} of {', '.join(type(item).__name__ for item in batch[:6])}" if batch else f"{kind} of length 0"
    return kind
