"""The capabilities of engines beyond Flower's `Grid`, and a grid that wraps another.

Code that needs a capability asks `capabilities(grid)` and never checks the grid's class. The defaults suit any grid.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from flwr.app import Context, Message, RecordDict
from flwr.serverapp import Grid

from fedbn_flwr.errors import LOG, RunFailed

if TYPE_CHECKING:  # imported only when a strategy uses exchanges
    from flwr.proto.node_pb2 import NodeInfo
    from flwr.supercore.run import Run  # elsewhere in other versions of Flower

    from fedbn_flwr.exchange.carriers import Answers
    from fedbn_flwr.exchange.codec import Agreement, Contribution
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

    def continue_parked(self, nodes: Sequence[int], agreement: Agreement, timeout: float) -> Answers | None:
        """Continue the layer-wise rounds that wait in this engine's processes, up to the next exchange.

        Return each node's contribution, or the reason why there is none; a node that takes more than `timeout` seconds
        has no entry. An engine that cannot do this returns None, and each node gets a message instead.
        """
        return None

    def count_exchange(self, up: Sequence[Arrays], down: Sequence[Arrays]) -> None:
        """Count an exchange that bypassed the grid, if there is a ledger; may be called from any thread."""

    def report(self, what: str, done: int, total: int) -> None:
        """Show the progress within a round, if it is watched; may be called from any thread."""


@runtime_checkable
class ContinuesParked(Protocol):
    """A ClientApp that continues a node's parked layer-wise round without a message."""

    def continue_parked(self, context: Context, agreement: Agreement) -> Contribution: ...


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


class GridAround(Capabilities, Grid):
    """A grid that passes all calls on to another one, including capabilities; subclasses override some."""

    def __init__(self, inner: Grid) -> None:
        self.inner = inner  # the grid that does the work

    # --- Flower's interface ---

    @property
    def run(self) -> Run:
        return self.inner.run

    def set_run(self, run: Run) -> None:
        self.inner.set_run(run)

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        return self.inner.create_message(content, message_type, dst_node_id, group_id, ttl)

    def get_node_ids(self) -> Iterable[int]:
        return self.inner.get_node_ids()

    def get_nodes(self) -> Iterable[NodeInfo]:
        return self.inner.get_nodes()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return self.inner.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return self.inner.pull_messages(message_ids)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return self.inner.send_and_receive(messages, timeout=timeout)

    # --- capabilities ---

    def start(self) -> int | None:
        return capabilities(self.inner).start()

    def observe(self, on_reply: OnReply, given_up: GivenUp = tuple) -> None:
        capabilities(self.inner).observe(on_reply, given_up)

    def contexts(self) -> Mapping[int, Context] | None:
        return capabilities(self.inner).contexts()

    def continue_parked(self, nodes: Sequence[int], agreement: Agreement, timeout: float) -> Answers | None:
        return capabilities(self.inner).continue_parked(nodes, agreement, timeout)

    def count_exchange(self, up: Sequence[Arrays], down: Sequence[Arrays]) -> None:
        capabilities(self.inner).count_exchange(up, down)

    def report(self, what: str, done: int, total: int) -> None:
        capabilities(self.inner).report(what, done, total)
