"""A Flower `Grid` whose nodes are served by workers, or by this process if there are none.

Any worker serves any node: the node's `Context.state` is sent with the message and returned with the reply. A server
outside of Flower's runtime needs three of Flower's internals: `TaskIdentity`, `Run` and a message's id.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self, TypedDict, TypeVar

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from fedbn_flwr.errors import MissingPackage

from .base import Capabilities, NodeStates, ReplyObserver
from .context_cache import Contexts
from .nodes import Nodes, ParksRounds
from .schedule import Schedule
from .temporary import temporary_folder
from .worker import Done, Exchange, Lost, NodeWorker, Task

if TYPE_CHECKING:  # the exchange's modules are imported when a strategy uses them
    from fedbn_flwr.exchange.codec import Agreement, Contribution
    from fedbn_flwr.exchange.round import Answers

_FLOWER = "1.41"
if not (_found := importlib.metadata.version("flwr")).startswith(f"{_FLOWER}."):
    raise MissingPackage(
        f"the local engine uses internals of Flower {_FLOWER}, found {_found}: pip install 'fedbn-flwr[run]'; "
        "strategies and clients work with other versions"
    )

from flwr.supercore.run import Run  # noqa: E402
from flwr.supercore.task_identity import TaskIdentity  # noqa: E402

UserConfig = Mapping[str, Any]
AnyWorker = TypeVar("AnyWorker", bound=NodeWorker)


class NodeOptions(TypedDict, total=False):
    """The parameters of every grid that concern its nodes; `LocalGrid` documents them."""

    work: Sequence[float] | None
    run_config: UserConfig | None
    node_config: UserConfig | Sequence[UserConfig] | None
    node_ids: Sequence[int] | None
    state_memory: float


class WorkersGrid(Capabilities, Grid, ABC, Generic[AnyWorker]):
    """A grid of `num_nodes` nodes and `workers` workers; `LocalGrid` documents the parameters."""

    def __init__(
        self,
        client_app: ClientApp,
        num_nodes: int,
        *,
        workers: int,
        threads: int | None,
        work: Sequence[float] | None = None,
        run_config: UserConfig | None = None,
        node_config: UserConfig | Sequence[UserConfig] | None = None,
        node_ids: Sequence[int] | None = None,
        state_memory: float = math.inf,
    ) -> None:
        if num_nodes < 1:
            raise ValueError(f"num_nodes is {num_nodes}; a grid needs at least one")
        if workers < 0:
            raise ValueError(f"workers is {workers}; give 0 (this process) or a number of processes")
        ids = list(range(1, num_nodes + 1) if node_ids is None else node_ids)
        if len(ids) != num_nodes or len(set(ids)) != num_nodes:
            raise ValueError(f"node_ids must be {num_nodes} different numbers, found {ids}")
        node_configs = (
            [node_config or {}] * num_nodes if node_config is None or isinstance(node_config, Mapping) else node_config
        )
        if len(node_configs) != num_nodes:
            raise ValueError(f"node_config has {len(node_configs)} entries for {num_nodes} nodes")
        if work is not None and (len(work) != num_nodes or not all(map(math.isfinite, work)) or min(work) < 0):
            raise ValueError(f"work must be {num_nodes} numbers, zero or more, one per node; found {work}")
        self._run = Run.create_empty(run_id=1)
        identify()

        def contexts() -> dict[int, Context]:
            return {
                node: Context(
                    run_id=1,
                    node_id=node,
                    node_config={"partition-id": i, "num-partitions": num_nodes, **node_configs[i]},
                    state=RecordDict(),
                    run_config=dict(run_config or {}),
                )
                for i, node in enumerate(ids)
            }

        self._node_ids = ids
        self._next_id = itertools.count(1)
        self._replies: dict[str, Message] = {}
        self._awaited: set[str] = set()  # the ids of messages to workers, until their replies are kept or given up
        self._observer: ReplyObserver | None = None
        self._folder: TemporaryDirectory[str] | None = None
        workers = min(workers, num_nodes)
        own = Contexts(contexts())
        if math.isfinite(state_memory):
            self._folder = temporary_folder("nodes")
            own = Contexts(contexts(), state_memory * 2**30, Path(self._folder.name))
        self._nodes = Nodes(client_app, own, threads)
        self._workers: list[AnyWorker] = []
        if workers:  # they need no limit of memory, because states do not stay there
            self._workers = self._make_workers(Nodes(client_app, Contexts(contexts()), threads or 1), workers)
        self._schedule = Schedule(workers, dict(zip(ids, work or [1.0] * num_nodes, strict=True)))

    @abstractmethod
    def _make_workers(self, served: Nodes, count: int) -> list[AnyWorker]:
        """Workers, not started, that handle messages to these nodes."""

    @abstractmethod
    def _wait(self, timeout: float | None) -> list[int]:
        """The numbers of the workers that have a result; waits up to `timeout` seconds for the first."""

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
        return list(self._node_ids)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        message_ids, waiting = [], []
        for message in messages:
            message_id = str(next(self._next_id))
            message.metadata.__dict__["_message_id"] = message_id
            message_ids.append(message_id)
            node = message.metadata.dst_node_id
            if node not in self._nodes.contexts:
                known = f"1 to {len(self._node_ids)}" if self._node_ids == sorted(self._node_ids) else "others"
                error = Error(ErrorCode.NODE_UNAVAILABLE, f"there is no node {node}; the grid has {known}")
                self._replies[message_id] = Message(error, reply_to=message)
            elif self._workers:
                waiting.append(message)
                self._awaited.add(message_id)
            else:
                with self._nodes.contexts.using(node) as context:
                    self._received(message_id, self._nodes.answer(message, context))
        if waiting:
            self._schedule.add(waiting)
            self._serve_workers(0)
        return message_ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        self._serve_workers(0)
        return [self._replies.pop(key) for key in message_ids if key in self._replies]

    def observe(self, observer: ReplyObserver) -> None:
        self._observer = observer

    def _received(self, message_id: str, reply: Message) -> None:
        self._replies[message_id] = reply
        if self._observer is not None:
            self._observer.replied(reply)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Replies in the order of the messages, without those that take longer than `timeout` seconds."""
        message_ids = list(self.push_messages(messages))
        deadline = None if timeout is None else time.monotonic() + timeout
        while missing := [key for key in message_ids if key not in self._replies]:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                self._schedule.drop(missing)
                self._awaited.difference_update(missing)
                break
            self._serve_workers(left)
        self._observer = None
        return self.pull_messages(message_ids)

    # --- workers ---

    @abstractmethod
    def start(self) -> int:
        """Start the workers now. Returns their number, or 1 if this process serves."""

    def _serve_workers(self, timeout: float | None) -> None:
        """Send queued messages and collect replies; waits up to `timeout` seconds for the first reply."""
        if not self._workers:
            return
        self._send_next()
        self._receive(timeout)
        self._send_next()

    def _receive(self, timeout: float | None) -> dict[Exchange, Answers]:
        """Collect results; returns those of exchanges. Waits up to `timeout` seconds for the first."""
        exchanged: dict[Exchange, Answers] = {}
        for number in self._wait(timeout):
            job, result = self._workers[number].receive()
            if isinstance(job, Task):
                assert isinstance(result, Done | Lost)
                self._handled(job.message, number, result)
            elif isinstance(job, Exchange):
                if isinstance(result, Lost):
                    self._schedule.release(number)
                    result = dict.fromkeys(job.nodes, result.reason)
                assert isinstance(result, dict)
                exchanged[job] = result
        return exchanged

    def _handled(self, message: Message, worker: int, result: Done | Lost) -> None:
        """Keep the reply to a message that a worker has handled, and the node's state."""
        if isinstance(result, Lost):
            reason = f"{result.reason}; its node has the state from before this message"
            reply = Message(Error(ErrorCode.CLIENT_APP_CRASHED, reason), reply_to=message)
        else:
            reply = result.reply
            if result.state is not None:
                with self._nodes.contexts.using(message.metadata.dst_node_id) as context:
                    context.state = result.state
        self._schedule.done(message, worker, result.seconds if isinstance(result, Done) else None)
        if message.metadata.message_id in self._awaited:
            self._awaited.remove(message.metadata.message_id)
            self._received(message.metadata.message_id, reply)

    def _send_next(self) -> None:
        taken = []
        for number, worker in enumerate(self._workers):
            if worker.is_free and (message := self._schedule.take(number)) is not None:
                worker.begin()  # all at once, because a process can take seconds until it is ready
                taken.append((worker, message))
        for worker, message in taken:
            node = message.metadata.dst_node_id
            with self._nodes.contexts.using(node) as context:
                worker.send(Task(message, None if self._schedule.is_kept(node) else context.state))

    # --- layer-wise rounds ---

    def exchange(self, nodes: Sequence[int], agreement: Agreement, timeout: float) -> Answers | None:
        if not isinstance(self._nodes.client_app, ParksRounds):
            return None
        if not self._workers:
            return self._nodes.exchange(Exchange(list(nodes), agreement))
        waiting, sent = self._schedule.keepers(nodes), set[Exchange]()
        answers: dict[int, Contribution | str] = {}
        deadline = time.monotonic() + timeout
        while (waiting or sent) and (left := deadline - time.monotonic()) > 0:
            for number in [each for each in waiting if self._workers[each].is_free]:  # others are late with a message
                exchange = Exchange(waiting.pop(number), agreement)
                self._workers[number].send(exchange)
                sent.add(exchange)
            for exchange, result in self._receive(left).items():
                if exchange in sent:  # not one of an earlier exchange that took too long
                    sent.remove(exchange)
                    answers |= result
        return answers

    # --- the nodes' states, between rounds ---

    def node_states(self) -> NodeStates:
        return self

    def read_state(self, node: int) -> RecordDict:
        """A node's `Context.state`; that of before the message if a worker is late with a message to the node."""
        self._check_idle(node)
        with self._nodes.contexts.using(node) as context:
            number = self._schedule.let_go(node)
            if number is not None and self._workers[number].current is None:  # a layer-wise round was not completed
                self._workers[number].send(node)
                _, state = self._workers[number].receive()
                context.state = state if isinstance(state, RecordDict) else context.state
            return context.state

    def write_state(self, node: int, records: RecordDict) -> None:
        """Replace a node's `Context.state`."""
        self._check_idle(node)
        self._schedule.let_go(node)
        with self._nodes.contexts.using(node) as context:
            context.state = records

    def _check_idle(self, node: int) -> None:
        if self._awaited:
            raise RuntimeError(f"node {node} is busy; its state can be read and written only between rounds")

    def close(self) -> None:
        """End the workers, and remove the folder of states."""
        for worker in self._workers:
            worker.close()
        if self._folder is not None:
            self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def identify() -> None:
    """Let this process create messages, if Flower's runtime has not given it an identity, of which it has only one."""
    if vars(TaskIdentity)["_run_id"] is None:
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 0, 0
