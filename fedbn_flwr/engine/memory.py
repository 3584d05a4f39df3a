"""Nodes' contexts, with a bound on the memory that what they remember takes: the rest lies in files."""

from __future__ import annotations

import contextlib
import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from flwr.app import Context, RecordDict

from ..recordfile import dump, parse
from ..results.ledger import array_bytes


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
