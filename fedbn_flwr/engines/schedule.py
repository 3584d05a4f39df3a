"""The order in which workers handle messages: a free worker takes the message that is expected to take longest.

A node handles one message at a time, in the order in which they were sent. During a layer-wise round the worker that
began it keeps the node, because the parked round is in its memory.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Mapping

from flwr.app import Message

from fedbn_flwr.messages.protocol import COHORT_QUERY


def keeps_node(message: Message) -> bool:
    """Whether the worker keeps the node after this message, since a layer-wise round is not complete."""
    return message.metadata.message_type == COHORT_QUERY


class Schedule:
    """The waiting messages of `workers` workers.

    `work` is the expected relative duration of a node's messages. The durations of a node's last messages, by type,
    replace it.
    """

    def __init__(self, workers: int, work: Mapping[int, float]) -> None:
        self._holder: dict[int, int] = {}  # the worker that a node must go to, by node
        self._kept: set[int] = set()  # the nodes whose state is there
        self._work = work
        self._order = itertools.count()
        self._any: list[tuple[float, int, Message]] = []  # a heap: the longest first, then the first that was added
        self._own: list[deque[Message]] = [deque() for _ in range(workers)]  # messages to kept nodes
        self._following: dict[int, deque[Message]] = {}  # of nodes with a message that waits or is being handled
        self._busy: dict[int, str] = {}  # the id of the message that a worker handles
        self._late: set[int] = set()  # the workers that handle a message for which the grid no longer waits
        self._seconds: defaultdict[str, dict[int, float]] = defaultdict(dict)  # by type of message and node

    @property
    def is_empty(self) -> bool:
        """Whether all messages have been handled."""
        return not self._following

    @property
    def has_waiting(self) -> bool:
        """Whether messages wait for a worker."""
        return bool(self._any or any(self._own) or any(self._following.values()))

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

    def let_go(self, node: int) -> int | None:
        """Let any worker take a node; returns the worker that had kept its state, or None."""
        worker = self._holder.pop(node, None)
        if node not in self._kept:
            return None
        self._kept.remove(node)
        return worker

    def add(self, messages: Iterable[Message]) -> None:
        """Put messages into the queue."""
        new = []
        for message in messages:
            node = message.metadata.dst_node_id
            if node in self._following:
                self._following[node].append(message)
            else:
                self._following[node] = deque()
                new.append(message)
        for message in sorted(new, key=self._expected, reverse=True):
            self._queue(message)

    def take(self, worker: int) -> Message | None:
        """Remove and return the next message of a free worker; None if there is none."""
        if self._own[worker]:
            message = self._own[worker].popleft()
        elif self._any:
            message = heapq.heappop(self._any)[2]
        else:
            return None
        self._busy[worker] = message.metadata.message_id
        return message

    def done(self, message: Message, worker: int, seconds: float | None) -> None:
        """Note that a worker has handled a message in so many seconds; None if the worker died."""
        node = message.metadata.dst_node_id
        self._busy.pop(worker, None)
        self._late.discard(worker)
        if seconds is None:
            self.release(worker)
        else:
            self._seconds[message.metadata.message_type][node] = seconds
            if keeps_node(message) and node in self._holder:  # not if it was let go in the meantime
                self._kept.add(node)
            else:
                self.let_go(node)
        self._next_of(node)

    def drop(self, abandoned: Collection[str]) -> None:
        """Remove the messages with these ids that still wait; a worker that handles one of them is late."""
        self._late |= {worker for worker, handled in self._busy.items() if handled in abandoned}

        def stays(message: Message) -> bool:
            return message.metadata.message_id not in abandoned

        waiting = [entry[2] for entry in self._any] + [message for own in self._own for message in own]
        self._any = [entry for entry in self._any if stays(entry[2])]
        heapq.heapify(self._any)
        self._own = [deque(filter(stays, own)) for own in self._own]
        self._following = {node: deque(filter(stays, later)) for node, later in self._following.items()}
        for message in waiting:
            if not stays(message):
                node = message.metadata.dst_node_id
                if node not in self._kept:  # its round did not begin at the worker that was to hold it
                    self._holder.pop(node, None)
                self._next_of(node)

    def _queue(self, message: Message) -> None:
        node = message.metadata.dst_node_id
        if node not in self._holder and keeps_node(message):  # a layer-wise round begins
            loads = [0.0] * len(self._own)
            for kept, worker in self._holder.items():
                loads[worker] += self._duration(kept, _TRAIN)
            # A late worker may not end for long: it gets a node only if all are late.
            self._holder[node] = min(range(len(loads)), key=lambda worker: (worker in self._late, loads[worker]))
        if node in self._holder:
            self._own[self._holder[node]].append(message)
        else:
            heapq.heappush(self._any, (-self._expected(message), next(self._order), message))

    def _next_of(self, node: int) -> None:
        """Queue the node's next message, if there is one."""
        if self._following[node]:
            self._queue(self._following[node].popleft())
        else:
            del self._following[node]

    def release(self, worker: int) -> None:
        """Let any worker take the nodes that this worker, which died, had kept."""
        for node in [node for node, kept_by in self._holder.items() if kept_by == worker]:
            self.let_go(node)
        messages, self._own[worker] = self._own[worker], deque()
        for message in messages:
            self._queue(message)

    def _expected(self, message: Message) -> float:
        return self._duration(message.metadata.dst_node_id, message.metadata.message_type)

    def _duration(self, node: int, kind: str) -> float:
        """The seconds of the node's last message of this type, or an estimate from the durations of other nodes.

        Where these nearly agree it is the estimate, so that equal nodes are served in the order of their messages: in
        this order a strategy adds up the replies, and one that arrives earlier stays in memory until its turn.
        """
        known = self._seconds[kind]
        done = sum(self._work[each] for each in known)
        estimate = self._work[node] * (sum(known.values()) / done if done else 1.0)
        last = known.get(node, estimate)
        return estimate if _SHORTER * estimate <= last <= _LONGER * estimate else last


_TRAIN = "train"
_SHORTER, _LONGER = 0.8, 1.1  # durations of a node, relative to the estimate, that count as equal to it
