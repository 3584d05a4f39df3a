"""A batch is a pair (inputs, targets): each of the two is a tensor [N, ...] or a dict of such tensors.

`map_batches` calls a model for each of many batches. `split_batch` finds inputs and targets in a batch of another form,
for instance a dict of a Hugging Face data set.
"""

from __future__ import annotations

import copy
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

Result = TypeVar("Result")

# Each tensor has one row for each example.
Value = Tensor | Mapping[str, Tensor]
Batch = Any  # what a loader yields; `split_batch` turns it into (inputs, targets)
Outputs = Any  # what a model returns: a tensor, or whatever the user's loss takes
# The two of a batch in functions that a user may write: a `Value`, or only one of its two forms.
Inputs = Any
Targets = Any


def map_tensors(function: Callable[[Tensor], Result], value: Value) -> Result | dict[str, Result]:
    """`function` of the tensor, or a dict of its results for all tensors of a dict."""
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


def map_batches(
    function: Callable[[nn.Module, Batch], Result], model: nn.Module, batches: Iterable[Batch], threads: int = 1
) -> Iterator[Result]:
    """`function(model, batch)` of each batch, in the order of the batches.

    With several threads, batches that are computed at the same time use copies of the modules, because a module may set
    attributes in `forward`; the copies share the tensors. If the modules cannot be copied, one batch is computed at a
    time. Each thread uses one of PyTorch's threads, so the results do not depend on their number. The threads end with
    the iteration, so that no forked process inherits them.
    """
    if threads <= 1:
        yield from (function(model, batch) for batch in batches)
        return
    tensors = {id(tensor): tensor for tensor in itertools.chain(model.parameters(), model.buffers())}
    copies, waiting = [model], deque[Future[Result]]()
    with suppress(Exception):  # a user's modules may be impossible to copy
        # One more copy than threads, so that no thread waits for the next batch.
        copies = [copy.deepcopy(model, dict(tensors)) for _ in range(threads + 1)]
    with ThreadPoolExecutor(threads, "batches", initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for copied, batch in zip(itertools.cycle(copies), batches):
            if len(waiting) == len(copies):
                yield waiting.popleft().result()
            waiting.append(pool.submit(function, copied, batch))
        for future in waiting:
            yield future.result()


# --- batches of other forms ---

Pair = tuple[Value, Value]  # (inputs, targets)
# A function that returns the pair of a batch, or the keys (or positions) of inputs and targets.
ToPair = Callable[[Batch], Pair] | tuple[str | int, str | int]

# Names of columns in Flower's templates and examples, torchvision, timm and transformers.
INPUTS = ("img", "image", "images", "pixel_values", "input", "inputs", "x", "features")
TARGETS = ("label", "labels", "target", "targets", "y", "mask")


def split_batch(batch: Batch, how: ToPair | None) -> Pair:
    """The inputs and targets of a batch; a TypeError shows the batch's type and keys if they cannot be found."""
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
            raise TypeError(f"batch={how!r} does not fit the data: a batch is {_described(batch)}") from None
    if not (isinstance(pair, tuple | list) and len(pair) == 2 and all(map(_is_value, pair))):
        origin = "a batch is" if how is None else f"batch={getattr(how, '__name__', how)!r} returned"
        raise TypeError(
            f"{origin} {_described(pair)}; expected a pair (inputs, targets) of tensors or dicts of tensors, or a dict "
            f"with one key for the inputs ({', '.join(INPUTS)}) and one for the targets ({', '.join(TARGETS)}). {_CURE}"
        )
    return pair[0], pair[1]


def _is_value(value: Value) -> bool:
    return bool(found := tensors(value)) and all(hasattr(tensor, "to") for tensor in found)


_CURE = (
    "Give BNClient batch=(KEY_OF_INPUTS, KEY_OF_TARGETS), or a function that returns the pair, for instance "
    "batch=lambda b: (b['img'], b['label'])"
)


def _found(batch: Batch) -> Batch:
    if isinstance(batch, Mapping):
        inputs, targets = ([key for key in names if key in batch] for names in (INPUTS, TARGETS))
        if len(inputs) == len(targets) == 1:
            return batch[inputs[0]], batch[targets[0]]
    return batch


def _described(batch: object) -> str:
    kind = f"a {type(batch).__name__}"
    if isinstance(batch, Mapping):
        return f"{kind} with the keys {', '.join(map(repr, batch))}"
    if isinstance(batch, tuple | list):
        return f"{kind} of {', '.join(type(item).__name__ for item in batch[:6])}" if batch else f"{kind} of length 0"
    return kind
