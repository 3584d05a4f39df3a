"""The local engine: a Flower `Grid` that calls the ClientApp directly with each message.

It needs no polling and no object store. With `workers=0` this process serves all nodes, so that a debugger can step
through. Otherwise the workers of a pool serve them.

To run outside of Flower's runtime, it uses three of Flower's internals: `TaskIdentity`, `Run` and a message's id.
"""

from __future__ import annotations

import functools
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Self

from annotated_types import Ge
from flwr.app import ArrayRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from fedbn_flwr.client.node_state import LOCAL_ARRAYS, NodeState, client_number
from fedbn_flwr.declared import checked
from fedbn_flwr.internals import ErrorCode, Run, TaskIdentity
from fedbn_flwr.messages.arrays import pack, record_of
from fedbn_flwr.messages.protocol import Config
from fedbn_flwr.messages.quote import shown

from .capabilities import Capabilities, GivenUp, OnReply
from .pool import ForkPool, Nodes, Pool

_POLL = 0.01  # seconds between looks at the pool, in a thread


class LocalGrid(Capabilities, Grid):
    """A grid of `num_nodes` nodes on this machine, for one run. Nodes keep their state until the grid is closed.

    Parameters
    ----------
    client_app
        The app that answers the messages to the nodes.
    num_nodes
        Number of nodes; node i has `partition-id` i and `num-partitions` in its node config, as in Flower's simulation.
    workers
        Number of forked processes that serve the nodes; with 0 (default) this process does. Threads that a library has
        started in this process, as JAX and TensorFlow do, are missing in forked ones; then leave it 0.
    pool
        Makes what serves the nodes instead, a `Pool` of `engines.pool`, for instance `partial(CohortPool, most=10)`.
    threads
        Number of PyTorch's threads for a client. Workers use 1. In this process, None leaves the number unchanged.
        It can change the last bits of results.
    work
        How long each node's messages take relative to others, for instance its number of examples. Workers begin with
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
        pool: Callable[[Nodes, OnReply], Pool] | None = None,
        threads: int | None = None,
        work: Sequence[float] | None = None,
        run_config: Config | None = None,
        node_config: Config | Sequence[Config] | None = None,
        node_ids: Sequence[int] | None = None,
    ) -> None:
        ids = list(range(1, num_nodes + 1) if node_ids is None else node_ids)
        node_configs = [node_config or {}] * num_nodes if isinstance(node_config, Mapping | None) else node_config
        if workers and pool:
            raise ValueError(f"workers is {workers}, but pool is given too; leave one of them out")
        if len(set(ids)) != len(ids):
            raise ValueError(f"node_ids must be different numbers, found {ids}")
        for name, entries in {"node_ids": ids, "node_config": node_configs, "work": work or ids}.items():
            if len(entries) != num_nodes:
                raise ValueError(f"{name} has {len(entries)} entries for {num_nodes} nodes")
        self._run = Run.create_empty(run_id=1)
        identify()
        contexts = {
            node: Context(
                run_id=1,
                node_id=node,
                node_config={"partition-id": i, "num-partitions": num_nodes, **node_configs[i]},
                state=RecordDict(),
                run_config=dict(run_config or {}),
            )
            for i, node in enumerate(ids)
        }
        self._nodes = Nodes(client_app, threads, contexts, dict(zip(ids, work or [1.0] * num_nodes, strict=True)))
        make = pool or (functools.partial(ForkPool, count=workers) if workers else Pool)
        self._pool = make(self._nodes, self._receive)
        self._sent: Counter[int] = Counter()  # messages so far, by node
        self._lock = threading.Lock()  # around what the pool does
        self._replies: dict[str, Message | None] = {}  # by message id; None until the reply arrives
        self._observers: list[OnReply] = []

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
        return list(self._nodes.contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        message_ids, accepted = list[str](), list[Message]()
        for message in messages:
            self._sent[node := message.metadata.dst_node_id] += 1
            message_ids.append(f"{node}.{self._sent[node]}")
            message.metadata.__dict__["_message_id"] = message_ids[-1]
            self._replies[message_ids[-1]] = None
            if node in self._nodes.contexts:
                accepted.append(message)
            else:
                absent = f"there is no node {node}; the grid has {shown([*self._nodes.contexts])}"
                self._receive(Message(Error(ErrorCode.NODE_UNAVAILABLE, absent), reply_to=message))
        with self._lock:
            self._pool.put(accepted)
            self._pool.serve(0)
        return message_ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        self._serve(0)
        return self._take([key for key in message_ids if self._replies.get(key) is not None])

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Send the messages, and return the replies that arrive within `timeout` seconds, in the messages' order."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        try:
            message_ids = list(self.push_messages(messages))
            while missing := {key for key in message_ids if self._replies[key] is None}:
                if (left := deadline - time.monotonic()) <= 0:
                    self._pool.drop(missing)
                    break
                self._serve(left)
        finally:
            self._observers.clear()
        return self._take(message_ids)

    def _serve(self, timeout: float) -> None:
        """Let the pool work until the first reply. Servers of Flower's old API send each message in a thread."""
        is_main = threading.current_thread() is threading.main_thread()
        with self._lock:
            self._pool.serve(timeout if is_main else 0)
        if not is_main:
            time.sleep(min(timeout, _POLL))

    def _receive(self, reply: Message) -> None:
        if (key := reply.metadata.reply_to_message_id) in self._replies:  # otherwise it is late
            self._replies[key] = reply
            for on_reply in self._observers:
                on_reply(reply)

    def _take(self, message_ids: Iterable[str]) -> list[Message]:
        """The replies to these messages that have arrived; the others are no longer expected."""
        replies = [self._replies.pop(key, None) for key in message_ids]
        return [reply for reply in replies if reply is not None]

    # --- the capabilities of this engine ---

    def start(self) -> int:
        return self._pool.start()

    def observe(self, on_reply: OnReply, given_up: GivenUp = tuple) -> None:
        self._observers.append(on_reply)

    def contexts(self) -> Mapping[int, Context]:
        """The nodes' contexts. A state changes only when a worker has finished the node's message or round."""
        return self._pool.contexts()

    def client_models(self, arrays: ArrayRecord) -> dict[int, ArrayRecord]:
        """Each client's model, by its number: the `arrays` of a run's result, and what the client keeps (FedBN)."""
        return {
            client_number(context): record_of({**arrays, **pack(NodeState(context.state).load(LOCAL_ARRAYS))})
            for context in self.contexts().values()
        }

    def close(self) -> None:
        """End the workers."""
        self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def identify() -> None:
    """Give this process the identity that it needs to create messages, unless Flower's runtime has done so."""
    if vars(TaskIdentity)["_run_id"] is None:
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 0, 0
