"""The order in which workers handle messages: a free worker takes the message that is expected to take longest.

A node handles one message at a time, in the order in which they were sent. During a layer-wise round the worker that
began it keeps the node, because the parked round is in its memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence

from flwr.app import Message

from fedbn_flwr.messages.protocol import COHORT_QUERY


def keeps_node(message: Message) -> bool:
    """Whether the worker keeps the node after this message, since a layer-wise round is not complete."""
    return message.metadata.message_type == COHORT_QUERY


class Schedule:
    """The waiting messages, and the workers of nodes.

    `work` is the expected relative duration of a node's messages.
    """

    def __init__(self, work: Mapping[int, float]) -> None:
        self._work = work
        self._holder: dict[int, int] = {}  # the worker that a node must go to, by node
        self._kept: set[int] = set()  # the nodes whose state is there
        self._waiting: list[Message] = []  # the longest first
        self._busy: dict[int, int] = {}  # the worker that handles a message of a node, by node

    def is_kept(self, node: int) -> bool:
        """Whether a worker has the node's state."""
        return node in self._kept

    def keepers(self, nodes: Iterable[int]) -> dict[int, list[int]]:
        """Those of the nodes whose state a worker has, by worker."""
        kept: dict[int, list[int]] = {}
        for node in nodes:
            if node in self._kept:
                kept.setdefault(self._holder[node], []).append(node)
        return kept

    def let_go(self, node: int) -> None:
        """Let any worker take a node."""
        self._holder.pop(node, None)
        self._kept.discard(node)

    def add(self, messages: Iterable[Message], workers: Sequence[int]) -> None:
        """Put messages into the queue; the layer-wise rounds that they begin are dealt out to `workers`."""
        # The messages of one node stay in their order.
        self._waiting = sorted([*self._waiting, *messages], key=lambda each: -self._work[each.metadata.dst_node_id])
        begun = [message.metadata.dst_node_id for message in self._waiting if keeps_node(message)]
        # Not a worker that is late with a message, if others are free.
        free = [worker for worker in workers if worker not in self._busy.values()] or workers
        self._holder = dict(zip(dict.fromkeys(begun), itertools.cycle(free), strict=False)) | self._holder

    def take(self, worker: int) -> Message | None:
        """Remove and return the next message of a free worker; None if there is none."""
        for place, message in enumerate(self._waiting):
            node = message.metadata.dst_node_id
            if node not in self._busy and self._holder.get(node, worker) == worker:
                del self._waiting[place]
                self._busy[node] = worker
                if keeps_node(message):  # its holder may have died meanwhile
                    self._holder[node] = worker
                return message
        return None

    def done(self, message: Message, worker: int) -> None:
        """Note that a worker has handled a message."""
        node = message.metadata.dst_node_id
        del self._busy[node]
        if keeps_node(message) and self._holder.get(node) == worker:  # not if it was let go in the meantime
            self._kept.add(node)
        else:
            self.let_go(node)

    def drop(self, abandoned: Collection[str]) -> None:
        """Remove the messages with these ids that still wait."""
        before = self._waiting
        self._waiting = [message for message in before if message.metadata.message_id not in abandoned]
        # A layer-wise round has not begun at the worker that was to hold the node.
        for node in {message.metadata.dst_node_id for message in before} - self._kept - self._busy.keys():
            self._holder.pop(node, None)

    def release(self, worker: int) -> None:
        """Let any worker take the nodes of this worker, which died."""
        self._busy = {node: handled_by for node, handled_by in self._busy.items() if handled_by != worker}
        for node in [node for node, kept_by in self._holder.items() if kept_by == worker]:
            self.let_go(node)
