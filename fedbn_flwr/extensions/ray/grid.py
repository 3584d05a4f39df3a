"""The Ray engine: a grid whose nodes are served by actors on the machines of a Ray cluster.

Actors are workers of a pool, as in the local engine. A node's state is sent with the message, so a lost actor or
machine loses no state. Arrays that several messages share are sent to each machine once, through Ray's object store.
"""

from __future__ import annotations

import functools
import logging
import math
import pickle
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from flwr.app import ArrayRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from ray.exceptions import RayError

from fedbn_flwr.engines.capabilities import OnReply
from fedbn_flwr.engines.local import LocalGrid, identify
from fedbn_flwr.engines.pool import Nodes, Served, WorkerPool
from fedbn_flwr.engines.worker import NodeWorker, Then, keep_freed_memory
from fedbn_flwr.errors import RunFailed, few
from fedbn_flwr.messages.arrays import arrays_in, size_of, unpack
from fedbn_flwr.named import in_a_line
from fedbn_flwr.trees import Draft

_SHARED = 100_000  # bytes above which a record goes through the object store; Ray sends smaller values directly
_REMEMBERED = 4  # records whose place in the object store is remembered
_FETCH_TIMEOUT = 120  # seconds to fetch a result from another machine


Stored = Any  # where a value is in Ray's object store
Actor = Any  # the handle of a process on a machine of the cluster


def machines() -> list[Draft]:
    """The machines of the cluster that are alive, as Ray describes them."""
    return [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]


def fits(needs: Mapping[str, float]) -> int:
    """How many actors with these needs fit on the machines of the cluster."""
    # Ray counts in ten-thousandths.
    return sum(
        min(round(node["Resources"].get(name, 0) * 1e4) // round(need * 1e4) for name, need in needs.items())
        for node in machines()
    )


def _in_words(needs: Mapping[str, float]) -> str:
    return " and ".join(f"{need:g} {name}s" for name, need in needs.items())


def cluster_text() -> str:
    """The machines of the cluster and their resources, for messages."""
    lines = [
        f"{node['NodeManagerAddress']} (CPU {node['Resources'].get('CPU', 0):g}, "
        f"GPU {node['Resources'].get('GPU', 0):g})"
        for node in machines()
    ]
    return few(lines, 8) or "none"


def ray_grid(
    client_app: ClientApp,
    num_nodes: int,
    *,
    workers: int | None = None,
    cpus: float = 1,
    gpus: float = 0,
    start_timeout: float = 120,
    idle: list[Actor] | None = None,
    **nodes: Any,
) -> LocalGrid:
    """A grid of `num_nodes` nodes that actors of the connected Ray cluster serve.

    Parameters
    ----------
    workers
        Number of actors; None: as many as fit; 0: this process serves the nodes.
    cpus, gpus
        What Ray reserves for each actor, which serves one client at a time.
    start_timeout
        Seconds after which the run fails if no actor has started.
    idle
        Actors with these needs that wait for the next grid. A grid uses them before it starts new ones, and adds its
        own when it closes. With None, actors end with the grid.
    nodes
        The other arguments of `LocalGrid`.
    """
    needs = {name: need for name, need in (("CPU", cpus), ("GPU", gpus)) if need}
    if workers is None and not (workers := fits(needs)):
        raise RunFailed(
            f"no machine of the Ray cluster has {_in_words(needs)} for a client; the machines are {cluster_text()}"
        )
    pool = functools.partial(ActorPool, count=workers, needs=needs, start_timeout=start_timeout, idle=idle)
    return LocalGrid(client_app, num_nodes, pool=pool if workers else None, **nodes)


def end(actors: list[Actor]) -> None:
    while actors:
        ray.kill(actors.pop())


class _SharedRecords:
    """Puts large records of arrays into the object store, once for all messages that share them."""

    def __init__(self) -> None:
        self._places: dict[int, tuple[ArrayRecord, Stored]] = {}  # by identity, which the record keeps

    def put(self, record: ArrayRecord) -> Stored:
        if id(record) not in self._places:
            self._places[id(record)] = record, ray.put(record)
            if len(self._places) > _REMEMBERED:
                del self._places[next(iter(self._places))]
        return self._places[id(record)][1]

    def apart(self, message: Message) -> tuple[Message, dict[str, Stored]]:
        """The message without its large records, and their places in the object store, by name."""
        content = message.content
        large = {
            name: self.put(record)
            for name, record in arrays_in(content).items()
            if size_of(unpack(record))[1] >= _SHARED
        }
        rest = RecordDict({name: ArrayRecord() if name in large else record for name, record in content.items()})
        return Message(content=rest, metadata=message.metadata), large  # type: ignore[call-overload]


class _Actor:
    """In an actor's process: answers messages to any node."""

    def __init__(self) -> None:
        identify()
        keep_freed_memory()
        logging.getLogger("flwr").setLevel(logging.CRITICAL)  # the server reports errors; a machine's log is not read

    def begin(self, served: Served) -> bytes:
        """Serve the nodes of a grid from now on. Returns the machine's address, and its name in Ray."""
        self._served = served
        found = ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id()  # type: ignore[no-untyped-call]
        return pickle.dumps(found)

    def call(self, data: bytes, names: Sequence[str], *records: ArrayRecord) -> bytes:
        call, arguments = pickle.loads(data)  # noqa: S301 (of our own server)
        if names:
            arguments[0].content.update(zip(names, records, strict=True))
        # As bytes: arrays would stay in the object store as long as the server refers to them.
        return pickle.dumps(getattr(self._served, call)(*arguments), protocol=5)


@dataclass(eq=False)
class ActorWorker(NodeWorker):
    """An actor, on any machine that has room."""

    served: Stored
    needs: Mapping[str, float]
    idle: list[Actor] | None
    records: _SharedRecords
    result: Any = None  # the current job's result in the object store; None if its machine is lost
    machine: str = ""  # its address
    node: str = ""  # Ray's name of the machine; empty until the actor is ready
    _actor: Actor = None

    def launch(self) -> None:
        # Ray starts it as soon as some machine has room.
        reserved = {"num_cpus": self.needs.get("CPU", 0), "num_gpus": self.needs.get("GPU", 0)}
        make = ray.remote(_Actor).options(**reserved, scheduling_strategy="SPREAD").remote
        self._actor = self.idle.pop() if self.idle else make()
        self.result = self._actor.begin.remote(self.served)

    def send(self, then: Then, call: str, *arguments: Any) -> None:
        self.then, large = then, dict[str, Stored]()
        if call == "handle":
            message, large = self.records.apart(arguments[0])
            arguments = message, *arguments[1:]
        self.result = self._actor.call.remote(pickle.dumps((call, arguments), protocol=5), list(large), *large.values())

    def receive(self) -> tuple[Any, str]:
        how = "was lost"
        try:
            if self.result is not None:
                value = pickle.loads(ray.get(self.result, timeout=_FETCH_TIMEOUT))  # noqa: S301  # of our own actor
                if self.is_ready:
                    return value, ""
                self.machine, self.node = value
                return None, ""
        except RayError as error:
            if not self.is_ready:
                return None, f"no actor can start on the Ray cluster: {in_a_line(error)}"
            how = f"was lost ({in_a_line(error)})"
        return None, f"the client's actor on {self.machine} {how}"

    def release(self) -> None:
        """Leave the actor to the next grid if it is free."""
        if self.is_free and self.idle is not None:
            self.idle.append(self._actor)
            self._actor = None

    def close(self) -> None:
        if self._actor is not None:
            ray.kill(self._actor)
        self._actor, self.result, self.then, self.node, self.is_ready = None, None, None, "", False


class ActorPool(WorkerPool[ActorWorker]):
    """Actors of the connected Ray cluster; `ray_grid` describes the arguments."""

    def __init__(
        self,
        nodes: Nodes,
        on_reply: OnReply,
        count: int,
        *,
        needs: Mapping[str, float],
        start_timeout: float,
        idle: list[Actor] | None,
    ) -> None:
        served = ray.put(Served(nodes.client_app, nodes.threads or 1))
        super().__init__(nodes, on_reply, functools.partial(ActorWorker, served, needs, idle, _SharedRecords()), count)
        self._needs, self._start_timeout = needs, start_timeout
        self._served_at = math.inf  # when an actor was last ready, or the first ones began to start

    def wait(self, busy: Sequence[ActorWorker], timeout: float) -> Iterable[ActorWorker]:
        by_result = {actor.result: actor for actor in busy}
        found = ray.wait(list(by_result), num_returns=1, timeout=timeout)[0]
        if found or not timeout:
            return [by_result[result] for result in found]
        # Ray can take minutes to report for each result that its machine is lost.
        alive = {"", *(str(node["NodeID"]) for node in machines())}
        lost = [actor for actor in busy if actor.node not in alive]
        for actor in lost:
            actor.result = None
        return lost

    def receive(self, timeout: float) -> None:
        now = time.monotonic()
        self._served_at = now if any(actor.is_ready for actor in self.workers) else min(now, self._served_at)
        if now - self._served_at > self._start_timeout:
            raise RunFailed(
                f"no actor has started on the Ray cluster for {self._start_timeout:g} s; each needs "
                f"{_in_words(self._needs)}, and the machines are {cluster_text()}, which other programs may use; if "
                "their processes start slowly, set a longer start_timeout (engine.node_timeout of an experiment)"
            )
        super().receive(timeout)

    def close(self) -> None:
        for actor in self.workers:
            actor.release()
        super().close()
