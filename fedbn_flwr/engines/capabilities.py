"""The capabilities of engines beyond Flower's `Grid`, and a grid that wraps another.

Code that needs a capability asks `capabilities(grid)` and never checks the grid's class. The defaults suit any grid.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flwr.app import Context, Message
from flwr.serverapp import Grid

from fedbn_flwr.errors import LOG, RunFailed

if TYPE_CHECKING:
    from fedbn_flwr.messages.aggregate import Arrays


OnReply = Callable[[Message], object]  # gets a reply when it arrives
GivenUp = Callable[[], Collection[int]]  # the nodes whose replies the grid should stop waiting for


class Capabilities:
    """The capabilities of an engine beyond Flower's `Grid`. The methods here suit any grid; engines override them."""

    def start(self) -> int | None:
        """Start the processes that serve nodes, and return how many nodes they serve at once; None means all."""
        return None

    def observe(self, on_reply: OnReply, given_up: GivenUp = tuple) -> None:
        """Call `on_reply` with each reply of the next `send_and_receive` as it arrives, if the engine can.

        An engine may wait for the nodes that are `given_up`, too.
        """

    def contexts(self) -> Mapping[int, Context] | None:
        """The nodes' contexts, by node, or None if the engine has no access to them.

        The server may read and replace the states in them between rounds.
        """
        return None

    def count_exchange(self, up: Sequence[Arrays], down: Sequence[Arrays]) -> None:
        """Count an exchange that bypassed the grid, if there is a ledger; may be called from any thread."""


def capabilities(grid: Grid) -> Capabilities:
    return grid if isinstance(grid, Capabilities) else Capabilities()


def wait_for_nodes(
    grid: Grid,
    needed: int,
    timeout: float,
    hint: str,
    missing: Callable[[Sequence[int]], str] = lambda nodes: "",
    *,
    began: float | None = None,
) -> list[int]:
    """Wait until `needed` nodes are connected, and return all that are; RunFailed with `hint` after `timeout` seconds.

    The seconds count from `began`, a time of `time.monotonic()`, or from now. `missing` names the clients that none of
    these nodes serves, as far as that is known.
    """
    began, seen = time.monotonic() if began is None else began, -1
    while len(nodes := list(grid.get_node_ids())) < needed:
        if (is_late := time.monotonic() - began > timeout) or len(nodes) != seen:
            seen, absent = len(nodes), missing(nodes)
            hint_ = f"{absent and f'without {absent}; '}{hint}"
            if is_late:
                raise RunFailed(f"{seen} of {needed} nodes are connected after {timeout:g} s; {hint_}")
            LOG.warning("waiting for nodes: %d of %d are connected, at most %g s; %s", seen, needed, timeout, hint_)
        time.sleep(0.2)
    return nodes


class _OfInner:
    """The attribute of the same name of the grid inside, or its capability."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, around: GridAround, owner: type) -> Any:
        return getattr(around.inner if hasattr(Grid, self._name) else capabilities(around.inner), self._name)


class GridAround(Capabilities, Grid):
    """A grid that has all of another one, its capabilities included; subclasses override some."""

    def __init__(self, inner: Grid) -> None:
        self.inner = inner  # the grid that does the work

    run, set_run, create_message, get_node_ids, get_nodes = _OfInner(), _OfInner(), _OfInner(), _OfInner(), _OfInner()
    push_messages, pull_messages, send_and_receive = _OfInner(), _OfInner(), _OfInner()
    start, observe, contexts, count_exchange = _OfInner(), _OfInner(), _OfInner(), _OfInner()
