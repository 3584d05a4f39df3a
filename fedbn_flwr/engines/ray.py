"""The Ray engine: a grid whose nodes are served by actors on the machines of a Ray cluster.

An actor serves any node, as a worker process of the local engine does: the node's state travels with the message. So an
actor or a machine that is lost loses no state, and the order of the messages is the local engine's. Arrays that several
messages share are sent to each machine once, through Ray's object store.
"""

from __future__ import annotations

import logging
import math
import pickle
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from logging import WARNING
from typing import Any, Unpack

import ray
from flwr.app import ArrayRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common import log
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError, RayTaskError

from fedbn_flwr.errors import RunFailed
from fedbn_flwr.messages.arrays import arrays_in, size_of

from .context_cache import keep_freed_memory
from .grid import NodeOptions, WorkersGrid, identify
from .nodes import Nodes
from .worker import Job, Lost, Result, Task

_SHARED = 100_000  # bytes from which a record goes through the object store; Ray sends smaller values directly
_KEPT = 4  # records whose place in the object store is remembered
_STARTS = 3  # attempts to start an actor
_FETCH_TIMEOUT = 120  # seconds to fetch a result from another machine


@dataclass(frozen=True)
class Place:
    """What Ray reserves for one actor, which serves one client at a time."""

    cpus: float = 1.0
    gpus: float = 0.0

    def fits(self) -> int:
        """The number of actors for which the machines of the cluster have room."""
        return sum(self._fits_in(node["Resources"]) for node in machines())

    def _fits_in(self, resources: dict[str, float]) -> int:
        needed = [(self.cpus, resources.get("CPU", 0.0)), (self.gpus, resources.get("GPU", 0.0))]
        # Ray counts in ten-thousandths.
        return min(math.floor(round(has * 1e4) / round(each * 1e4)) for each, has in needed if each)

    def __str__(self) -> str:
        return f"{self.cpus:g} CPUs" + (f" and {self.gpus:g} GPUs" if self.gpus else "")


def machines() -> list[dict[str, Any]]:
    """The machines of the cluster that are alive, as Ray describes them."""
    return [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]


def cluster_text() -> str:
    """The machines of the cluster and their resources, for messages."""
    each = [
        f"{node['NodeManagerAddress']} (CPU {node['Resources'].get('CPU', 0):g}, "
        f"GPU {node['Resources'].get('GPU', 0):g})"
        for node in machines()
    ]
    return ", ".join(each[:8]) + (f" and {len(each) - 8} more" if len(each) > 8 else "") or "none"


@dataclass(frozen=True)
class Actors:
    """Actors that are idle between two grids of this process: the next grid need not wait until its actors start."""

    idle: dict[Place, list[Any]] = field(default_factory=dict)

    def take(self, place: Place) -> Any:
        """An idle actor that has this place, or None. Those that have another end, because they need room."""
        if any(other != place for other in self.idle):
            self.close()
        free = self.idle.get(place)
        return free.pop() if free else None

    def give(self, place: Place, actor: Any) -> None:
        self.idle.setdefault(place, []).append(actor)

    def close(self) -> None:
        for actors in self.idle.values():
            for actor in actors:
                ray.kill(actor)
        self.idle.clear()


class RayGrid(WorkersGrid["ActorWorker"]):
    """A grid of `num_nodes` nodes that actors of the connected Ray cluster serve.

    Parameters
    ----------
    workers
        Number of actors; None: as many as fit.
    place
        What Ray reserves for each.
    start_timeout
        Seconds after which the run fails if no actor can be started.
    idle
        Idle actors of earlier grids, to which those of this grid are added when it closes; None: they end with it.

    The others are those of `LocalGrid`.
    """

    def __init__(
        self,
        client_app: ClientApp,
        num_nodes: int,
        *,
        workers: int | None = None,
        place: Place = Place(),
        start_timeout: float = 120,
        idle: Actors | None = None,
        threads: int = 1,
        **nodes: Unpack[NodeOptions],
    ) -> None:
        if workers is None and not (workers := place.fits()):
            raise RunFailed(f"no machine of the Ray cluster has {place} for a client; it has {cluster_text()}")
        if workers < 1:
            raise ValueError(f"workers is {workers}; give a number of actors, or None")
        self._place = place
        self._start_timeout = start_timeout
        self._served_at: float | None = None  # when some actor was last ready or busy
        self._records = _SharedRecords()
        self._idle = idle or Actors()
        self._ends_actors = idle is None
        super().__init__(client_app, num_nodes, workers=workers, threads=threads, **nodes)

    def _make_workers(self, served: Nodes, count: int) -> list[ActorWorker]:
        sent = ray.put(served)
        return [ActorWorker(sent, self._place, self._idle, self._records) for _ in range(count)]

    def start(self) -> int:
        """Start the actors, and wait until one is ready."""
        self._begin()
        while not any(actor.is_free or actor.current is not None for actor in self._workers):
            self._serve_workers(1.0)
        return len(self._workers)

    def close(self) -> None:
        for actor in self._workers:
            if actor.is_free:
                actor.release()
        super().close()
        if self._ends_actors:
            self._idle.close()

    def _begin(self) -> None:
        for actor in self._workers:
            actor.begin()

    def _wait(self, timeout: float | None) -> list[int]:
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            self._begin()
            now = time.monotonic()
            if self._served_at is None or any(actor.is_free or actor.current is not None for actor in self._workers):
                self._served_at = now
            self._check_start(now - self._served_at)
            waited = {actor.waited: number for number, actor in enumerate(self._workers) if actor.waited is not None}
            if not waited:
                return []
            patience = max(0.0, min(deadline - now, self._served_at + self._start_timeout - now, 10.0))
            found, _ = ray.wait(list(waited), num_returns=1, timeout=patience)
            if not found and patience:
                found = self._unreachable(waited)
            arrived = [waited[ref] for ref in found if self._workers[waited[ref]].current is not None]
            if arrived:
                return arrived
            for ref in found:
                self._workers[waited[ref]].started()
            if found:
                self._send_next()
            if time.monotonic() >= deadline:
                return []

    def _unreachable(self, waited: dict[Any, int]) -> list[Any]:
        """Those of the awaited results whose machine is lost; Ray can take minutes to report it for each of them."""
        alive = {str(node["NodeID"]) for node in machines()}
        lost = [ref for ref, number in waited.items() if self._workers[number].node not in {"", *alive}]
        for ref in lost:
            self._workers[waited[ref]].is_lost = True
        return lost

    def _check_start(self, seconds: float) -> None:
        """Raise RunFailed if no actor serves nodes and none can be expected to."""
        problems = [actor.problem for actor in self._workers if actor.problem]
        if len(problems) == len(self._workers):
            raise RunFailed(f"no actor can start on the Ray cluster: {problems[0]}")
        if seconds > self._start_timeout:
            raise RunFailed(
                f"no actor has started on the Ray cluster for {self._start_timeout:g} s; each needs {self._place}, and "
                f"the machines are {cluster_text()}, which other programs may use; if their processes start slowly, "
                "set a longer start_timeout (engine.node_timeout of an experiment)"
            )


class _SharedRecords:
    """Puts large records of arrays into the object store, once for all messages of a round that contain them."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[ArrayRecord, Any]] = {}  # by identity, which the record keeps

    def put(self, record: ArrayRecord) -> Any:
        if id(record) not in self._kept:
            self._kept[id(record)] = record, ray.put(record)
            if len(self._kept) > _KEPT:
                del self._kept[next(iter(self._kept))]
        return self._kept[id(record)][1]

    def apart(self, task: Task) -> tuple[Task, dict[str, Any]]:
        """The task without the large records of its message, and where they are, by name."""
        content = task.message.content
        large = {name: self.put(each) for name, each in arrays_in(content).items() if size_of(each)[1] >= _SHARED}
        rest = RecordDict({name: ArrayRecord() if name in large else record for name, record in content.items()})
        message = Message(content=rest, metadata=task.message.metadata)  # type: ignore[call-overload]
        return Task(message, task.state), large


class _Actor:
    """In an actor's process: answers messages to any node."""

    def __init__(self) -> None:
        identify()
        keep_freed_memory()
        logging.getLogger("flwr").setLevel(logging.CRITICAL)  # the server reports errors; a machine's log is not read

    def serve(self, served: Nodes) -> tuple[str, str]:
        """Serve these nodes from now on. Returns the address of the machine, and Ray's name of it."""
        self._served = served
        return ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id()  # type: ignore[no-untyped-call]

    def handle(self, data: bytes, names: Sequence[str], *records: ArrayRecord) -> bytes:
        job = pickle.loads(data)  # noqa: S301 (of our own server)
        if isinstance(job, Task):
            job.message.content.update(zip(names, records, strict=True))
        # As bytes: arrays would stay in the object store as long as the server refers to them.
        return pickle.dumps(self._served.handle(job), protocol=5)


@dataclass
class ActorWorker:
    """An actor that handles one job at a time; one that is lost is replaced, wherever a machine has room."""

    served: Any  # the nodes, in the object store
    place: Place
    idle: Actors
    records: _SharedRecords
    current: Job | None = None
    waited: Any = None  # the reference of what is expected next: that the actor is ready, or its result
    problem: str = ""  # why it is not started again
    machine: str = ""  # its address
    node: str = ""  # Ray's name of the machine; empty until the actor is ready
    is_lost: bool = False  # its machine is
    _actor: Any = None
    _failures: int = 0  # to start an actor, one after the other

    @property
    def is_free(self) -> bool:
        return self._actor is not None and self.waited is None

    def begin(self) -> None:
        if self._actor is None and not self.problem:
            # Ray starts it as soon as some machine has room.
            options = {"num_cpus": self.place.cpus, "num_gpus": self.place.gpus, "scheduling_strategy": "SPREAD"}
            make = ray.remote(_Actor).options(max_restarts=0, **options).remote
            self._actor = self.idle.take(self.place) or make()
            self.waited = self._actor.serve.remote(self.served)

    def started(self) -> None:
        """Note that the actor is ready, or could not be started."""
        ref, self.waited = self.waited, None
        try:
            self.machine, self.node = ray.get(ref, timeout=_FETCH_TIMEOUT)
            self._failures = 0
        except RayError as error:
            self._failures += 1
            problem = _in_a_line(error)
            log(WARNING, "an actor could not be started on the Ray cluster: %s", problem)
            self.close()
            if self._failures == _STARTS:
                self.problem = problem

    def send(self, job: Job) -> None:
        assert self.is_free
        self.current = job
        sent, large = self.records.apart(job) if isinstance(job, Task) else (job, {})
        self.waited = self._actor.handle.remote(pickle.dumps(sent, protocol=5), list(large), *large.values())

    def receive(self) -> tuple[Job, Result]:
        job, self.current = self.current, None
        assert job is not None
        ref, self.waited = self.waited, None
        try:
            if self.is_lost:
                raise ActorUnavailableError("its machine is lost", None)
            return job, pickle.loads(ray.get(ref, timeout=_FETCH_TIMEOUT))  # noqa: S301  # of our own actor
        except RayError as error:
            if isinstance(error, RayTaskError):
                how = f"the client's actor on {self.machine} failed: {_in_a_line(error)}"
            elif isinstance(error, ActorDiedError | ActorUnavailableError):
                how = f"the client's actor on {self.machine} was lost"
            else:
                how = f"the reply of the client's actor on {self.machine} was lost ({type(error).__name__})"
            self.close()  # a state that it keeps is lost: any actor may begin that node's round again
            return job, Lost(how)

    def release(self) -> None:
        """Leave the actor, which is free, to the next grid."""
        self.idle.give(self.place, self._actor)
        self._actor = None

    def close(self) -> None:
        """End the actor; begin() creates another."""
        if self._actor is not None:
            ray.kill(self._actor)
        self._actor, self.waited, self.current, self.node, self.is_lost = None, None, None, "", False


def _in_a_line(error: Exception) -> str:
    """The last line of an error of Ray, which contains a traceback of the other process."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:300]
