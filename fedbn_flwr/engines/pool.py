"""Pools, which serve the nodes of a grid: in this process, or in workers.

Any worker can serve any node: the node's state goes to it with the message, and comes back with the reply. Only a
layer-wise round stays with its worker until it ends, because a round cannot be sent.
"""

from __future__ import annotations

import functools
import itertools
import os
import sys
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import Generic, TypeVar

import torch
from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp

from fedbn_flwr.errors import FedbnError, RunFailed, described
from fedbn_flwr.internals import ErrorCode
from fedbn_flwr.messages.protocol import EXCHANGE_QUERY
from fedbn_flwr.messages.reply import OwnContent, with_content

from .capabilities import OnReply
from .worker import NodeWorker, Worker

_LOOK = 1.0  # seconds without a result, after which the pool checks for workers that are lost or do not start


@dataclass
class Served:
    """A ClientApp and the contexts of nodes in this process; a worker has the contexts of its parked rounds."""

    client_app: ClientApp
    threads: int | None  # PyTorch's threads while serving a node; None leaves their number as it is
    contexts: dict[int, Context] = field(default_factory=dict)

    def handle(self, message: Message, context: Context | None) -> tuple[Message, RecordDict | None]:
        """Answer a message in a worker: the reply and the new state, or None while the state stays here."""
        node = message.metadata.dst_node_id
        context = self.contexts.pop(node) if context is None else context
        message.content = OwnContent({**message.content})
        reply = self.call_app(message, context)
        if message.metadata.message_type != EXCHANGE_QUERY:  # an exchange leaves a layer-wise round parked here
            return reply, context.state
        self.contexts[node] = context
        return reply, None

    def call_app(self, message: Message, context: Context) -> Message:
        """The ClientApp's reply, or an error reply."""
        if self.threads is not None and torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)
        asked = message.metadata
        try:
            reply = self.client_app(message, context)
            if not isinstance(reply, Message):  # a handler returned nothing
                reason = f"the ClientApp returned {type(reply).__name__} instead of a Message"  # type: ignore[unreachable]
            elif reply.has_error():  # a mod made it
                reason = reply.error.reason
            # Flower's SuperLink rejects such replies too.
            elif (given := reply.metadata).reply_to_message_id != asked.message_id:
                reason = f"it replied to message {given.reply_to_message_id!r} instead of {asked.message_id!r}"
            elif given.src_node_id != asked.dst_node_id:
                reason = f"its reply says that it is from node {given.src_node_id} instead of {asked.dst_node_id}"
            else:
                return reply
        except (Exception, SystemExit) as error:
            if os.environ.get("FEDBN_DEBUG"):
                traceback.print_exc(file=sys.stderr)
            reason = str(error) if isinstance(error, FedbnError) else described(error)
        return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)


@dataclass
class Nodes(Served):
    """All nodes of a grid, with the app that serves them in this process."""

    work: Mapping[int, float] = field(default_factory=dict)  # how long each node's messages take relative to others

    def answer(self, message: Message) -> Message:
        """Answer a message in this process."""
        # The messages of a round share their content; a change by one client must not reach the next.
        own = RecordDict({key: record.copy() for key, record in message.content.items()})
        return self.call_app(with_content(message, own), self.contexts[message.metadata.dst_node_id])


class Pool:
    """Serves the nodes of a grid in this process, where a debugger can step through; subclasses have workers.

    The nodes' states are in `nodes.contexts`. `on_reply` gets every reply when it arrives, however late.
    """

    def __init__(self, nodes: Nodes, on_reply: OnReply) -> None:
        self.nodes, self.on_reply = nodes, on_reply

    def start(self) -> int:
        """Start the workers, wait until one is ready, and return how many nodes are served at once."""
        return 1

    def put(self, messages: Sequence[Message]) -> None:
        """Queue messages; this process handles them at once."""
        for message in messages:
            self.on_reply(self.nodes.answer(message))

    def serve(self, timeout: float) -> None:
        """Let workers handle the queue, and wait up to `timeout` seconds for the first reply."""

    def drop(self, message_ids: Collection[str]) -> None:
        """Remove messages from the queue. A message that a worker has begun still changes its node's state."""

    def contexts(self) -> Mapping[int, Context]:
        """Like `Capabilities.contexts`. Workers abandon their layer-wise rounds."""
        return self.nodes.contexts

    def close(self) -> None:
        """End the workers."""


W = TypeVar("W", bound=NodeWorker)


@dataclass
class Seat(Generic[W]):
    """A node's place at a worker: for its layer-wise round, or while the worker handles its message."""

    worker: W
    message: Message | None = None  # the one that the worker is handling
    parked: bool = False  # whether the node's layer-wise round, with its state, is in the worker


class WorkerPool(Pool, ABC, Generic[W]):
    """A pool of workers. A free worker takes the next message, and messages with the most work come first."""

    def __init__(self, nodes: Nodes, on_reply: OnReply, make: Callable[[], W], count: int) -> None:
        super().__init__(nodes, on_reply)
        self.workers = [make() for _ in range(min(count, len(nodes.contexts)))]
        self._queue: list[Message] = []  # sorted by work; messages to one node keep their order
        self._seats: dict[int, Seat[W]] = {}  # by node

    @abstractmethod
    def wait(self, busy: Sequence[W], timeout: float) -> Iterable[W]:
        """Wait up to `timeout` seconds for the first result, and return the workers that have one."""

    def start(self) -> int:
        while not any(worker.is_ready for worker in self.workers):
            self.receive(_LOOK)
        return len(self.workers)

    def put(self, messages: Sequence[Message]) -> None:
        self._queue = sorted(
            [*self._queue, *messages], key=lambda message: -self.nodes.work[message.metadata.dst_node_id]
        )
        # Every exchange waits for the slowest worker, so new layer-wise rounds are dealt out evenly.
        able = [worker for worker in self.workers if not worker.problem]
        late = [seat.worker for seat in self._seats.values() if seat.message]
        free = [worker for worker in able if worker not in late] or able
        asked = [
            message.metadata.dst_node_id for message in self._queue if message.metadata.message_type == EXCHANGE_QUERY
        ]
        new = dict.fromkeys(node for node in asked if node not in self._seats)
        self._seats.update(zip(new, map(Seat, itertools.cycle(free)), strict=False))

    def serve(self, timeout: float) -> None:
        self.receive(timeout)
        for worker in self.workers:
            if worker.is_free and (message := self._next(worker)) is not None:
                seat = self._seats[node := message.metadata.dst_node_id]
                seat.message = message
                context = None if seat.parked else self.nodes.contexts[node]
                worker.send(functools.partial(self._on_result, seat, message), "handle", message, context)

    def _next(self, worker: W) -> Message | None:
        """Remove and return the next message for a worker; its node has a seat there, and nowhere else."""
        for place, message in enumerate(self._queue):
            if self._seats.setdefault(message.metadata.dst_node_id, Seat(worker)).worker is worker:
                return self._queue.pop(place)
        return None

    def receive(self, timeout: float) -> None:
        """Start workers where needed, and collect results; wait up to `timeout` seconds for the first."""
        for worker in self.workers:
            worker.begin()  # all at once, because a process can take seconds until it is ready
        if all(worker.problem for worker in self.workers):
            raise RunFailed(self.workers[0].problem)
        if busy := [worker for worker in self.workers if worker.then]:
            for worker in self.wait(busy, min(timeout, _LOOK)):
                worker.proceed()
        # Lost workers have no seats.
        self._seats = {node: seat for node, seat in self._seats.items() if seat.worker.is_ready or seat.worker.then}

    def _on_result(self, seat: Seat[W], message: Message, result: tuple[Message, RecordDict | None], lost: str) -> None:
        """Pass on the reply to a worker's message, and store the node's state unless it stays in the worker."""
        seat.message = None
        if lost:
            reason = f"{lost}; its node has the state from before this message"
            reply = Message(Error(ErrorCode.CLIENT_APP_CRASHED, reason), reply_to=message)
        else:
            reply, state = result
            seat.parked = state is None
            if state is not None:
                del self._seats[node := message.metadata.dst_node_id]
                self.nodes.contexts[node].state = state
        self.on_reply(reply)

    def drop(self, message_ids: Collection[str]) -> None:
        self._queue = [message for message in self._queue if message.metadata.message_id not in message_ids]
        self._seats = {node: seat for node, seat in self._seats.items() if seat.parked or seat.message}

    def contexts(self) -> Mapping[int, Context]:
        self._seats = {node: seat for node, seat in self._seats.items() if seat.message}
        return super().contexts()

    def close(self) -> None:
        for worker in self.workers:
            worker.close()


class ForkPool(WorkerPool[Worker]):
    """Forked processes: they share the memory of data loaded before, and cannot use a GPU."""

    def __init__(self, nodes: Nodes, on_reply: OnReply, count: int) -> None:
        if nodes.threads not in (None, 1):
            # Each worker uses one core; `count` decides how many clients train at once.
            raise ValueError(f"threads is {nodes.threads}; worker processes need 1 (for more threads give workers=0)")
        super().__init__(nodes, on_reply, functools.partial(Worker, Served(nodes.client_app, 1)), count)

    def wait(self, busy: Sequence[Worker], timeout: float) -> Iterable[Worker]:
        ready = wait([worker.channel.fileno() for worker in busy], timeout)
        return [worker for worker in busy if worker.channel.fileno() in ready]
