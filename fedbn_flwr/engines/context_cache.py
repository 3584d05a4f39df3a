"""Nodes' contexts, of which what does not fit a bound lies in files; and what a process does with freed memory."""

from __future__ import annotations

import contextlib
import ctypes
import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from flwr.app import Context, RecordDict

from fedbn_flwr.messages.arrays import array_bytes
from fedbn_flwr.messages.serialization import dump, parse

_KEPT = 256 << 20  # bytes
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h


def keep_freed_memory() -> None:
    """Let this process keep what it frees for the next array of that size, where malloc can be told so (glibc).

    Else a model's arrays go back to the system after each message, and each is then handed out again page by page,
    which takes longer than to fill it. For processes of our own only: it concerns all of their memory.
    """
    with contextlib.suppress(OSError, AttributeError):
        malloc = ctypes.CDLL(None).mallopt
        malloc(_M_MMAP_THRESHOLD, _KEPT)
        malloc(_M_TRIM_THRESHOLD, _KEPT)


class Contexts:
    """Contexts by node, all of one process. The states of those used last stay here, up to `budget` bytes."""

    def __init__(self, contexts: Mapping[int, Context], budget: float = math.inf, folder: Path | None = None) -> None:
        self._contexts = contexts
        self._budget = budget
        self._folder = folder
        self._here: OrderedDict[int, int] = OrderedDict()  # node: bytes of its state; those used last at the end
        self._total = 0
        self._away: set[int] = set()

    def __contains__(self, node: object) -> bool:
        return node in self._contexts

    @contextmanager
    def using(self, node: int) -> Iterator[Context]:
        """The context of a node, with its state; what others remember may be put away afterwards."""
        context = self._contexts[node]
        if node in self._away:
            context.state = parse(self._file(node).read_bytes())
            self._away.discard(node)
        try:
            yield context
        finally:
            self._note(node, context.state)

    def _note(self, node: int, state: RecordDict) -> None:
        if self._folder is None:
            return
        size = array_bytes(state)
        self._total += size - self._here.pop(node, 0)
        self._here[node] = size
        while self._total > self._budget and len(self._here) > 1:
            other = next(iter(self._here))
            self._total -= self._here.pop(other)
            with contextlib.suppress(ValueError):  # an array of a kind that files cannot hold: it stays
                # Not synced: it need not outlive this process.
                self._file(other).write_bytes(dump(self._contexts[other].state))
                self._contexts[other].state = RecordDict()
                self._away.add(other)

    def _file(self, node: int) -> Path:
        assert self._folder is not None
        return self._folder / f"node-{node}.safetensors"
