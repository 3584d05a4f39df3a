"""Passes of one model over many batches in several threads."""

from __future__ import annotations

import copy
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

import torch
from torch import nn

Result = TypeVar("Result")


def map_batches(
    function: Callable[[nn.Module, Any], Result], model: nn.Module, batches: Iterable[Any], threads: int = 1
) -> Iterator[Result]:
    """`function(model, batch)` of each batch, in the order of the batches.

    Each of several threads has a copy of the modules, because a module may set attributes in `forward`; the tensors are
    shared. If the modules cannot be copied, this thread does all. Each thread uses one of PyTorch's threads, so the
    results do not depend on their number. They end with the iteration, so that no forked process inherits them.
    """
    own, copies = threading.local(), list[nn.Module]()
    tensors = {id(tensor): tensor for tensor in itertools.chain(model.parameters(), model.buffers())}
    with suppress(Exception):  # of modules of the user
        copies = [copy.deepcopy(model, dict(tensors)) for _ in range(threads) if threads > 1]
    if not copies:
        for batch in batches:
            yield function(model, batch)
        return

    def begin() -> None:
        torch.set_num_threads(1)
        own.model = copies.pop()

    def call(batch: Any) -> Result:
        return function(own.model, batch)

    waiting: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(threads, "batches", initializer=begin) as pool:
        for batch in batches:
            waiting.append(pool.submit(call, batch))
            if len(waiting) > threads:  # one more than threads, so that none waits for the next batch
                yield waiting.popleft().result()
        for future in waiting:
            yield future.result()
