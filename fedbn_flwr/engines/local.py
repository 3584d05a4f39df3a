"""The local engine: a Flower `Grid` that calls the ClientApp directly with each message.

It needs no polling and no object store. With `workers=0` this process serves all nodes, and a debugger can step
through. Otherwise worker processes serve them. They are forked: they share the memory of data loaded before, and only
messages and states are pickled. With `gpus` they are spawned, because CUDA does not work in forked processes: the
workers of the extension `gpu`.
"""

from __future__ import annotations

from multiprocessing.connection import wait
from typing import Literal, Unpack

from flwr.clientapp import ClientApp

from fedbn_flwr import extensions
from fedbn_flwr.errors import MissingPackage

from .grid import NodeOptions, WorkersGrid
from .nodes import Nodes
from .worker import Worker, leave_if_unguarded


class LocalGrid(WorkersGrid[Worker]):
    """A grid of `num_nodes` nodes on this machine, for one run: nodes keep their states until it is closed.

    Parameters
    ----------
    client_app
        The app that answers the messages to the nodes.
    num_nodes
        Number of nodes; node i has `partition-id` i and `num-partitions` in its node config, as in Flower's simulation.
    workers
        Processes that serve the nodes; 0 (default): this process.
    gpus
        GPUs on which workers train: worker i sees GPU i modulo `gpus` and no other. 0 (default): workers train on the
        CPU.
    start
        How workers are started: "fork", or "spawn", the only way with `gpus`. A spawned process imports the app: it and
        what it refers to must be at the top of a module, and what trains in a script below `if __name__ == "__main__"`.
    threads
        PyTorch's threads while serving nodes: 1 in workers; in this process None leaves their number unchanged.
        Results can depend on it in the last bit.
    **nodes
        Options of the nodes:

        - `work`: the expected relative duration of each node's messages, for instance its number of images. Workers
          begin with the longest; from the second message of a node on, the duration of its last one counts.
        - `run_config`, `node_config`: the configs in the ClientApp's context; `node_config` is one mapping for all
          nodes, or one per node.
        - `node_ids`: node ids, 1 to `num_nodes` by default.
        - `state_memory`: GiB that the nodes' states (FedBN's batch norms, for instance) may take in memory; beyond it
          the states of the least recently served nodes are written to a temporary folder.
    """

    def __init__(
        self,
        client_app: ClientApp,
        num_nodes: int,
        *,
        workers: int = 0,
        gpus: int = 0,
        start: Literal["fork", "spawn"] | None = None,
        threads: int | None = None,
        **nodes: Unpack[NodeOptions],
    ) -> None:
        if workers and threads not in (None, 1):
            # A forked process inherits OpenMP's record of a thread pool without its threads, and would wait for them.
            raise ValueError(f"threads is {threads}; worker processes train with one, or give workers=0")
        if gpus < 0 or gpus > max(workers, 0):
            raise ValueError(f"gpus is {gpus}, workers {workers}; expected gpus=0, or at least a worker for each GPU")
        if start not in (None, "fork", "spawn") or (gpus and start == "fork"):
            raise ValueError(f"start is {start!r} with gpus={gpus}; expected spawn, or fork without GPUs")
        if (gpus or start == "spawn") and "spawn" not in extensions.declared("workers"):
            raise MissingPackage("gpus and start='spawn' need the extension fedbn_flwr.extensions.gpu")
        leave_if_unguarded()
        self._gpus = min(gpus, num_nodes)
        self._spawns = gpus > 0 or start == "spawn"
        super().__init__(client_app, num_nodes, workers=workers, threads=threads, **nodes)

    def _make_workers(self, served: Nodes, count: int) -> list[Worker]:
        if not self._spawns:
            return [Worker(number, served.handle) for number in range(count)]
        spawned: list[Worker] = extensions.part("workers", "spawn")(served.handle, count, self._gpus)
        return spawned

    def start(self) -> int:
        """Start the workers now; processes are forked before this one has threads that a fork would lose."""
        for worker in self._workers:
            worker.begin()
        for worker in self._workers:
            worker.start()
        return len(self._workers) or 1

    def rest(self) -> None:
        for worker in self._workers:
            worker.rest()

    def _wait(self, timeout: float | None) -> list[int]:
        busy = {worker.connection: i for i, worker in enumerate(self._workers) if worker.current is not None}
        return [busy[connection] for connection in wait(list(busy), timeout)] if busy else []  # type: ignore[index]
