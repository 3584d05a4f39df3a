"""Actors on the machines of a Ray cluster: workers of a pool, as the forked processes of the local engine.

An actor calls the same object as a forked worker, `pool.Served`. A node's state is sent with the message, so a lost
actor or machine loses no state. Large records go through Ray's object store: once to each machine, however many
messages share them.
"""

from __future__ import annotations

import logging
import math
import os
import pickle
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
from flwr.app import Array, ArrayRecord
from ray.exceptions import RayError

from fedbn_flwr.engines.capabilities import OnReply
from fedbn_flwr.engines.local import identify
from fedbn_flwr.engines.pool import Nodes, Served, WorkerPool
from fedbn_flwr.engines.worker import NodeWorker, Then, keep_freed_memory
from fedbn_flwr.errors import RunFailed, few
from fedbn_flwr.named import in_a_line
from fedbn_flwr.trees import Draft

_SHARED = 25_000  # numbers above which a record goes through the object store; Ray sends smaller ones directly
_REMEMBERED = 4  # records whose place in the object store is remembered
_FETCH_TIMEOUT = 120  # seconds to fetch a result from another machine

Stored = Any  # where a value is in Ray's object store
Needs = Mapping[str, float]  # what Ray reserves for an actor


def machines() -> list[Draft]:
    """The machines of the cluster that are alive, as Ray describes them."""
    return [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]


def fits(needs: Needs) -> int:
    """How many actors with these needs fit on the machines of the cluster. Ray counts in ten-thousandths."""
    return sum(
        min(round(machine["Resources"].get(name, 0) * 1e4) // round(need * 1e4) for name, need in needs.items())
        for machine in machines()
    )


def room(needs: Needs) -> str:
    """What an actor needs and what the machines have, for messages."""

    found = [
        " and ".join(f"{amounts.get(name, 0):g} {name}s" for name in needs)
        for amounts in (needs, *(machine["Resources"] for machine in machines()))
    ]
    return f"each needs {found[0]}, and the machines have {few(found[1:], 8) or 'none'}"


class Actor:
    """In a process on a machine of the cluster: carries calls to what the grid serves, one grid after another."""

    place: Stored = None  # of what it serves

    def __init__(self, folder: str) -> None:
        identify()
        keep_freed_memory()
        logging.getLogger("flwr").setLevel(logging.CRITICAL)  # the server reports errors; a machine's log is not read
        with suppress(OSError):
            os.chdir(folder)  # if the machine has it too

    def where(self) -> tuple[str, str]:
        """The machine's address, and its name in Ray."""
        return ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id()  # type: ignore[no-untyped-call]

    def call(self, places: list[Stored], call: str, *arguments: Any) -> bytes:
        if [self.place] != places:
            (self.place,) = places
            self.served, arrive = ray.get(self.place)
            arrive()
        # As bytes: arrays would stay in the object store as long as the server refers to them.
        return pickle.dumps(getattr(self.served, call)(*arguments), protocol=5)


@dataclass(eq=False)
class ActorWorker(NodeWorker):
    """An actor, on any machine that has room. It stays for the next grid if it is free."""

    needs: Needs
    served: Stored = None
    result: Any = None  # the current job's result in the object store; None if its machine is lost
    machine: str = "the Ray cluster"  # its address
    node: str = ""  # Ray's name of the machine; empty until the actor is ready
    _actor: Any = None

    def launch(self) -> None:
        # Ray starts it as soon as some machine has room.
        reserved = {"num_cpus": self.needs.get("CPU", 0), "num_gpus": self.needs.get("GPU", 0)}
        self._actor = ray.remote(Actor).options(**reserved, scheduling_strategy="SPREAD").remote(os.getcwd())
        self.result = self._actor.where.remote()

    def send(self, then: Then, call: str, *arguments: object) -> None:
        self.then, self.result = then, self._actor.call.remote([self.served], call, *arguments)

    def receive(self) -> tuple[Any, str]:
        how = "its machine failed"
        try:
            if self.result is not None:
                found = ray.get(self.result, timeout=_FETCH_TIMEOUT)
                if self.is_ready:
                    return pickle.loads(found), ""  # noqa: S301  # of our own actor
                self.machine, self.node = found
                return None, ""
        except RayError as error:
            how = in_a_line(error)
        return None, f"the client's actor on {self.machine} was lost ({how})"

    def close(self) -> None:
        if self._actor is not None:
            ray.kill(self._actor)
        self._actor, self.result, self.then, self.node, self.is_ready = None, None, None, "", False


class ActorPool(WorkerPool[ActorWorker]):
    """Actors of the connected Ray cluster.

    Parameters
    ----------
    actors
        The actors, which all have the same needs.
    start_timeout
        Seconds after which the run fails if no actor has started.
    arrive
        Called in each actor before it serves the first node of this grid.
    """

    def __init__(
        self,
        nodes: Nodes,
        on_reply: OnReply,
        actors: Sequence[ActorWorker],
        start_timeout: float,
        arrive: Callable[[], object],
    ) -> None:
        super().__init__(nodes, on_reply, iter(actors).__next__, len(actors))
        served = ray.put((Served(nodes.client_app, nodes.threads or 1), arrive))
        for actor in self.workers:
            actor.served = served
        self._start_timeout = start_timeout
        self._served_at = math.inf  # when an actor was last ready, or the first ones began to start
        self._places: dict[int, tuple[ArrayRecord, Stored]] = {}  # by identity, which the record keeps
        ray.util.register_serializer(ArrayRecord, serializer=self._store, deserializer=_record)

    def _store(self, record: ArrayRecord) -> Stored | dict[str, Array]:
        """The record's arrays or, if they are large, their place in the object store."""
        if sum(math.prod(array.shape) for array in record.values()) < _SHARED:
            return dict(record)
        known = self._places.pop(id(record)) if id(record) in self._places else (record, ray.put(dict(record)))
        self._places[id(record)] = known  # at the end, since the first one is forgotten
        if len(self._places) > _REMEMBERED:
            del self._places[next(iter(self._places))]
        return known[1]

    def wait(self, busy: Sequence[ActorWorker], timeout: float) -> Iterable[ActorWorker]:
        by_result = {actor.result: actor for actor in busy}
        found = ray.wait(list(by_result), num_returns=1, timeout=timeout)[0]
        if found or not timeout:
            return [by_result[result] for result in found]
        # Ray can take minutes to report for each result that its machine is lost.
        alive = {"", *(str(machine["NodeID"]) for machine in machines())}
        lost = [actor for actor in busy if actor.node not in alive]
        for actor in lost:
            actor.result = None
        return lost

    def receive(self, timeout: float) -> None:
        now = time.monotonic()
        self._served_at = now if any(actor.is_ready for actor in self.workers) else min(now, self._served_at)
        if now - self._served_at > self._start_timeout:
            raise RunFailed(
                f"no actor has started on the Ray cluster for {self._start_timeout:g} s; "
                f"{room(self.workers[0].needs)}, which other programs may use; if their processes start slowly, set a "
                "longer engine.node_timeout"
            )
        super().receive(timeout)

    def close(self) -> None:
        ray.util.deregister_serializer(ArrayRecord)
        for actor in self.workers:
            if not actor.is_free:
                actor.close()


def _record(stored: Stored | dict[str, Array]) -> ArrayRecord:
    """In an actor: the record whose arrays or whose place in the object store this is."""
    record = ArrayRecord()
    vars(record)["_data"].update(stored if isinstance(stored, dict) else ray.get(stored))
    return record
