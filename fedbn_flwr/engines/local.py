"""The local engine: a Flower `Grid` that calls the ClientApp directly with each message.

It needs no polling and no object store. With `workers=0` this process serves all nodes, and a debugger can step
through. Otherwise workers serve them. Any worker serves any node: the node's context is sent with the message, and its
state returned with the reply. Workers are forked: they share the memory of data loaded before, and cannot use a GPU.

A server outside of Flower's runtime needs three of Flower's internals: `TaskIdentity`, `Run` and a message's id.
"""

from __future__ import annotations

import functools
import importlib.metadata
import itertools
import math
import os
import sys
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Annotated, Any, Self

import torch
from annotated_types import Ge
from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from fedbn_flwr.declared import checked
from fedbn_flwr.errors import FedbnError, MissingPackage, RunFailed, described, install
from fedbn_flwr.messages.protocol import COHORT_QUERY
from fedbn_flwr.messages.quote import shown

from .base import Capabilities, GivenUp, Replied
from .worker import NodeWorker, Worker

if TYPE_CHECKING:  # the exchange's modules are imported when a strategy uses them
    from fedbn_flwr.exchange.carriers import Answers
    from fedbn_flwr.exchange.codec import Agreement, Contribution

_FLOWER = ("1.41", "1.42")
if not (_found := importlib.metadata.version("flwr")).startswith(tuple(f"{each}." for each in _FLOWER)):
    raise MissingPackage(
        f"the local engine uses internals of Flower {' and '.join(_FLOWER)}, found {_found}: {install('run')}; "
        "strategies and clients work with other versions"
    )

from flwr.supercore.run import Run  # noqa: E402
from flwr.supercore.task_identity import TaskIdentity  # noqa: E402

_LOOK = 1.0  # seconds of waiting for results, after which lost workers and those that do not start are looked for

UserConfig = Mapping[str, Any]


@dataclass
class Nodes:
    """The nodes that a process serves: all of them, or in a worker those whose layer-wise rounds are parked there."""

    client_app: ClientApp
    threads: int | None
    contexts: dict[int, Context] = field(default_factory=dict)

    def serve(self, message: Message, context: Context | None) -> tuple[Message, RecordDict | None]:
        """In a worker: the reply, and the node's new state. None instead of context or state: the worker has it."""
        node = message.metadata.dst_node_id
        context = self.contexts.pop(node) if context is None else context
        reply = self.answer(message, context)
        if message.metadata.message_type != COHORT_QUERY:  # after one, a layer-wise round is parked here
            return reply, context.state
        self.contexts[node] = context
        return reply, None

    def exchange(self, nodes: Sequence[int], agreement: Agreement) -> Answers:
        """Continue the nodes' rounds, which are parked in this process; the reason in place of each that fails."""
        answers: dict[int, Contribution | str] = {}
        for node in nodes:
            try:
                answers[node] = self.client_app.exchange(self.contexts[node], agreement)  # type: ignore[attr-defined]
            except (Exception, SystemExit) as error:
                answers[node] = _reason(error)
        return answers

    def answer(self, message: Message, context: Context) -> Message:
        """The ClientApp's reply, or an error reply."""
        if self.threads is not None and torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)
        asked = message.metadata
        try:
            # The messages of a round share their content; a change by one client must not reach the next.
            own = RecordDict({key: record.copy() for key, record in message.content.items()})
            reply = self.client_app(Message(content=own, metadata=asked), context)  # type: ignore[call-overload]
            if not isinstance(reply, Message):  # a handler returned nothing
                reason = f"the ClientApp returned {type(reply).__name__} instead of a Message"  # type: ignore[unreachable]
            elif reply.has_error():  # a mod made it
                reason = reply.error.reason
            # Flower's SuperLink refuses such replies too.
            elif (given := reply.metadata).reply_to_message_id != asked.message_id:
                reason = f"it replied to message {given.reply_to_message_id!r} instead of {asked.message_id!r}"
            elif given.src_node_id != asked.dst_node_id:
                reason = f"its reply says that it is from node {given.src_node_id} instead of {asked.dst_node_id}"
            else:
                return reply
        except (Exception, SystemExit) as error:
            reason = _reason(error)
        return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)


def _reason(error: BaseException) -> str:
    """The text of the exception that is being handled, for the server."""
    if os.environ.get("FEDBN_DEBUG"):
        traceback.print_exc(file=sys.stderr)
    return str(error) if isinstance(error, FedbnError) else described(error)


class LocalGrid(Capabilities, Grid):
    """A grid of `num_nodes` nodes on this machine, for one run: nodes keep their states until it is closed.

    Parameters
    ----------
    client_app
        The app that answers the messages to the nodes.
    num_nodes
        Number of nodes; node i has `partition-id` i and `num-partitions` in its node config, as in Flower's simulation.
    workers
        Processes that serve the nodes; 0 (default): this process.
    threads
        PyTorch's threads while serving nodes: 1 in workers; in this process None leaves their number unchanged.
        Results can depend on it in the last bit.
    work
        The expected relative duration of each node's messages, for instance its number of examples. Workers begin with
        the longest.
    run_config, node_config
        The configs in the ClientApp's context; `node_config` is one mapping for all nodes, or one per node.
    node_ids
        Node ids, 1 to `num_nodes` by default.
    """

    @checked
    def __init__(
        self,
        client_app: ClientApp,
        num_nodes: Annotated[int, Ge(1)],
        *,
        workers: Annotated[int, Ge(0)] = 0,
        threads: int | None = None,
        work: Sequence[float] | None = None,
        run_config: UserConfig | None = None,
        node_config: UserConfig | Sequence[UserConfig] | None = None,
        node_ids: Sequence[int] | None = None,
    ) -> None:
        ids = list(range(1, num_nodes + 1) if node_ids is None else node_ids)
        node_configs = [node_config or {}] * num_nodes if isinstance(node_config, Mapping | None) else node_config
        if len(set(ids)) != len(ids):
            raise ValueError(f"node_ids must be different numbers, found {ids}")
        for name, each in {"node_ids": ids, "node_config": node_configs, "work": work or ids}.items():
            if len(each) != num_nodes:
                raise ValueError(f"{name} has {len(each)} entries for {num_nodes} nodes")
        self._run = Run.create_empty(run_id=1)
        identify()
        self._contexts = {
            node: Context(
                run_id=1,
                node_id=node,
                node_config={"partition-id": i, "num-partitions": num_nodes, **node_configs[i]},
                state=RecordDict(),
                run_config=dict(run_config or {}),
            )
            for i, node in enumerate(ids)
        }
        self._nodes = Nodes(client_app, threads, self._contexts)  # that this process serves, if there are no workers
        self._next_id = itertools.count(1)
        self._replies: dict[str, Message] = {}
        self._awaited: set[str] = set()  # the ids of messages to workers, until their replies are kept or given up
        self._observers: list[Replied] = []
        copied, count = Nodes(client_app, threads or 1), min(workers, num_nodes)
        self._workers: Sequence[Any] = self._make_workers(copied, count) if workers else ()  # each is a NodeWorker
        self._waiting: list[Message] = []  # for workers, the longest first
        self._work = dict(zip(ids, work or [1.0] * num_nodes, strict=True))

    def _make_workers(self, nodes: Nodes, count: int) -> Sequence[NodeWorker]:
        """Workers, not started, that each serve a copy of `nodes`."""
        if nodes.threads != 1:
            # One core for each; how many clients train at once is `workers`.
            raise ValueError(f"threads is {nodes.threads}; worker processes train with one, or give workers=0")
        return [Worker(nodes) for _ in range(count)]

    def _wait(self, timeout: float) -> list[Any]:
        """The workers whose job has a result; waits up to `timeout` seconds for the first."""
        busy = {worker.channel: worker for worker in self._workers if worker.then}
        return [busy[channel] for channel in wait(list(busy), timeout)] if busy else []

    # --- Flower's interface ---

    def set_run(self, run: Run) -> None:
        self._run = run

    @property
    def run(self) -> Run:
        return self._run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        return Message(content, dst_node_id, message_type, group_id=group_id, ttl=ttl)

    def get_node_ids(self) -> Iterable[int]:
        return list(self._contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        message_ids = []
        for message in messages:
            message_id = str(next(self._next_id))
            message.metadata.__dict__["_message_id"] = message_id
            message_ids.append(message_id)
            node = message.metadata.dst_node_id
            if node not in self._contexts:
                absent = f"there is no node {node}; the grid has {shown([*self._contexts])}"
                self._replies[message_id] = Message(Error(ErrorCode.NODE_UNAVAILABLE, absent), reply_to=message)
            elif self._workers:
                self._waiting.append(message)
                self._awaited.add(message_id)
            else:
                self._received(message_id, self._nodes.answer(message, self._contexts[node]))
        self._waiting.sort(key=lambda each: -self._work[each.metadata.dst_node_id])  # those of a node stay in order
        self._deal()
        self._serve_workers(0)
        return message_ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        self._serve_workers(0)
        return [self._replies.pop(key) for key in message_ids if key in self._replies]

    def observe(self, replied: Replied, given_up: GivenUp = tuple) -> None:
        self._observers.append(replied)

    def _received(self, message_id: str, reply: Message) -> None:
        self._replies[message_id] = reply
        for replied in self._observers:
            replied(reply)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Replies in the order of the messages, without those that take longer than `timeout` seconds."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        message_ids = list(self.push_messages(messages))
        while missing := [key for key in message_ids if key not in self._replies]:
            if (left := deadline - time.monotonic()) <= 0:
                self._waiting = [each for each in self._waiting if each.metadata.message_id not in missing]
                for worker in self._workers:
                    worker.held = {node: here for node, here in worker.held.items() if here or node == worker.serving}
                self._awaited.difference_update(missing)
                break
            self._serve_workers(left)
        self._observers.clear()
        return [self._replies.pop(key) for key in message_ids if key in self._replies]

    # --- workers ---

    def start(self) -> int:
        """Start the workers now, and wait until one is ready. Returns how many nodes are served at once."""
        while self._workers and not any(worker.is_ready for worker in self._workers):
            self._receive(_LOOK)
        return len(self._workers) or 1

    def _serve_workers(self, timeout: float) -> None:
        """Collect replies and send queued messages; waits up to `timeout` seconds for the first reply."""
        self._receive(timeout)
        for worker in self._workers:
            if worker.is_free and (message := self._next(worker)) is not None:
                worker.serving = message.metadata.dst_node_id
                context = None if worker.held.get(worker.serving) else self._contexts[worker.serving]
                worker.send(functools.partial(self._handled, message, worker), "serve", message, context)

    def _deal(self) -> None:
        """Deal out the nodes whose layer-wise rounds wait to begin: the workers need equal times for an exchange."""
        able = [worker for worker in self._workers if not worker.problem]
        free = [worker for worker in able if worker.serving is None] or able  # not one that is late with a message
        held = {node for worker in self._workers for node in (worker.serving, *worker.held)}
        nodes = [each.metadata.dst_node_id for each in self._waiting if each.metadata.message_type == COHORT_QUERY]
        for node, worker in zip(dict.fromkeys(node for node in nodes if node not in held), itertools.cycle(free)):
            worker.held[node] = False

    def _next(self, worker: NodeWorker) -> Message | None:
        """Remove and return the next message for a worker; a node has one worker at a time."""
        elsewhere = {node for other in self._workers if other is not worker for node in (other.serving, *other.held)}
        for place, message in enumerate(self._waiting):
            if message.metadata.dst_node_id not in elsewhere:
                return self._waiting.pop(place)
        return None

    def _receive(self, timeout: float) -> None:
        """Start the workers that are not, and collect results; waits up to `timeout` seconds for the first."""
        for worker in self._workers:
            worker.begin()  # all at once, because a process can take seconds until it is ready
        if self._workers and all(worker.problem for worker in self._workers):
            raise RunFailed(self._workers[0].problem)
        for worker in self._wait(min(timeout, _LOOK)):
            worker.proceed()

    def _handled(
        self, message: Message, worker: NodeWorker, result: tuple[Message, RecordDict | None], lost: str
    ) -> None:
        """Keep the reply to a message that a worker has handled, and the node's state if the worker does not."""
        node, worker.serving = message.metadata.dst_node_id, None
        if lost:
            reason = f"{lost}; its node has the state from before this message"
            reply = Message(Error(ErrorCode.CLIENT_APP_CRASHED, reason), reply_to=message)
        else:
            reply, state = result
            if state is None:
                worker.held[node] = True
            else:
                worker.held.pop(node, None)
                self._contexts[node].state = state
        if message.metadata.message_id in self._awaited:
            self._awaited.remove(message.metadata.message_id)
            self._received(message.metadata.message_id, reply)

    # --- layer-wise rounds ---

    def exchange(self, nodes: Sequence[int], agreement: Agreement, timeout: float) -> Answers | None:
        if not hasattr(self._nodes.client_app, "exchange"):
            return None
        if not self._workers:
            return self._nodes.exchange(nodes, agreement)
        answers: dict[int, Contribution | str] = {}

        def answered(kept: Sequence[int], result: Answers, lost: str) -> None:
            answers.update(dict.fromkeys(kept, lost) if lost else result)

        waiting = {worker: [node for node in nodes if worker.held.get(node)] for worker in self._workers}
        expected = sum(map(len, waiting.values()))
        deadline = time.monotonic() + timeout
        while len(answers) < expected and (left := deadline - time.monotonic()) > 0:
            for worker in [each for each in waiting if each.is_free]:  # others are late with a message
                if kept := waiting.pop(worker):
                    worker.send(functools.partial(answered, kept), "exchange", kept, agreement)
            self._receive(left)
        return answers.copy()  # a worker that is late with this exchange adds its answers

    def contexts(self) -> Mapping[int, Context]:
        """The nodes' contexts; a state is that of before the message or the round that a worker has not ended."""
        for worker in self._workers:
            worker.held.clear()
        return self._contexts

    def close(self) -> None:
        """End the workers."""
        for worker in self._workers:
            worker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def identify() -> None:
    """Let this process create messages, if Flower's runtime has not given it an identity, of which it has only one."""
    if vars(TaskIdentity)["_run_id"] is None:
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 0, 0
