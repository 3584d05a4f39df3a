"""Keeps node contexts in memory up to a limit and spills the others to disk; also makes malloc keep freed memory."""

from __future__ import annotations

import contextlib
import ctypes
import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from flwr.app import Context, RecordDict

from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.arrays import size_in
from fedbn_flwr.messages.serialization import dump, parse
from fedbn_flwr.storage import Store, write_store

_KEPT, _ALL = 256 << 20, -1  # bytes
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # of glibc's malloc.h


def keep_freed_memory() -> None:
    """Make malloc keep freed memory for the next arrays, except blocks of more than 256 MiB (glibc only).

    Otherwise a model's arrays are returned to the system after each message, and allocating them again page by page
    takes longer than filling them. Threads use the same memory as the main thread, because malloc returns that of a
    thread at once; a layer-wise round runs in a thread. Only for the processes of a run, because the settings apply to
    the whole process.
    """
    with contextlib.suppress(OSError, AttributeError):
        malloc = ctypes.CDLL(None).mallopt
        malloc(_M_MMAP_THRESHOLD, _KEPT)
        malloc(_M_TRIM_THRESHOLD, _ALL)
        malloc(_M_ARENA_MAX, 1)


def return_freed_memory() -> None:
    """Return freed memory to the system (glibc only), before other work than that which will need it again."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


class Contexts:
    """The contexts of one process, by node. The states used last stay in memory, up to `budget` bytes in all; the
    others are spilled to `folder`."""

    def __init__(self, contexts: Mapping[int, Context], budget: float = math.inf, folder: Path | None = None) -> None:
        self._contexts = contexts
        self._budget = budget
        self._folder = folder
        self._sizes: OrderedDict[int, int] = OrderedDict()  # of the states in memory; those used last at the end
        self._total = 0
        self._spilled: set[int] = set()

    def __contains__(self, node: object) -> bool:
        return node in self._contexts

    def __getitem__(self, node: int) -> Context:
        """The context of a node, whose state may be spilled."""
        return self._contexts[node]

    @contextmanager
    def using(self, node: int) -> Iterator[Context]:
        """The context of a node, with its state; the states of others may be spilled afterwards."""
        context = self._contexts[node]
        if node in self._spilled:
            with Store(self._file(node)) as store:
                context.state = RecordDict({**parse(store["state"]), **context.state})
            self._spilled.discard(node)
        try:
            yield context
        finally:
            self._limit(node, context.state)

    def _limit(self, node: int, state: RecordDict) -> None:
        if self._folder is None:
            return
        _, size = size_in(state)
        self._total += size - self._sizes.pop(node, 0)
        self._sizes[node] = size
        while self._total > self._budget and len(self._sizes) > 1:
            other = next(iter(self._sizes))
            self._total -= self._sizes.pop(other)
            try:
                data = dump(self._contexts[other].state)
            except ValueError:  # an array of a type that cannot be stored: it stays in memory
                continue
            write_store(self._file(other), [("state", data)], durable=False)  # it need not outlive this process
            self._contexts[other].state = protocol.volatile(self._contexts[other].state)  # which `dump` leaves out
            self._spilled.add(other)

    def _file(self, node: int) -> Path:
        assert self._folder is not None
        return self._folder / f"node-{node}"
