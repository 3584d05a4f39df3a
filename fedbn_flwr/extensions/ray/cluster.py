"""A connection to a Ray cluster: what its machines get, and actors that serve one grid after another.

They get code and data. The code consists of this package, the modules that actors need, and the loaded modules in the
same folders. Ray sends it to each machine once, and puts its folder first on the actors' path. So a machine needs only
Python and the dependencies, and every actor has the code of this process.

A data set is loaded once, here, and put into Ray's object store, from which all actors of a machine read it without
copies. Data sets larger than `data.memory` are not sent: each machine reads its own files.
"""

from __future__ import annotations

import functools
import logging
import os
import shutil
import signal
import socket
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import ray
import torch
from torch import Tensor

from fedbn_flwr import named, strategies
from fedbn_flwr.errors import RunFailed, UserError
from fedbn_flwr.experiment.data import examples_of, received
from fedbn_flwr.experiment.parts import Parts
from fedbn_flwr.experiment.settings import Experiment
from fedbn_flwr.named import Make, in_a_line
from fedbn_flwr.results.naming import names_in
from fedbn_flwr.storage import temporary_folder

from .actors import ActorPool, ActorWorker, Needs, Stored, fits, machines, room

MakePool = Callable[..., ActorPool]  # for a `LocalGrid`


class Cluster(ExitStack):
    """A Ray cluster, to which this process is connected from `connect` to the end of the `with` statement.

    Parameters
    ----------
    address
        The address of a running cluster. With None it comes from $RAY_ADDRESS; without that variable, a cluster on this
        machine starts, and ends with the connection.
    start_timeout
        Seconds after which a run fails if no actor has started.
    prints
        Whether this process prints what the actors print.
    """

    def __init__(self, address: str | None = None, start_timeout: float = 120, *, prints: bool = False) -> None:
        super().__init__()
        self.address, self.start_timeout, self.prints = address, start_timeout, prints
        self._actors: list[ActorWorker] = []

    def connect(self, modules: Iterable[str] = ()) -> None:
        """Connect this process, unless it is connected, with the code for actors that need these modules."""
        if ray.is_initialized():
            return
        address = self.address or os.environ.get("RAY_ADDRESS") or "local"
        before = signal.getsignal(signal.SIGTERM)
        self.callback(ray.shutdown)
        with temporary_folder("code") as folder:
            stage(Path(folder), modules)
            try:
                host, _, port = address.rpartition(":")
                if port.isdecimal() and "://" not in address:  # otherwise Ray tries for minutes
                    socket.create_connection((host, int(port)), timeout=10).close()
                ray.init(
                    address,
                    runtime_env={"working_dir": folder},
                    logging_level=logging.ERROR,
                    log_to_driver=self.prints,
                    include_dashboard=False,
                )
            except Exception as error:  # as plain Exception, if Ray's processes have not started in time
                raise UserError(  # not SettingsError, since that would try the next run
                    f"no Ray cluster answers at engine.address={address!r} ({in_a_line(error)}); start one with "
                    "`ray start --head`, or leave the address out and unset RAY_ADDRESS to use this machine"
                ) from None
        with suppress(ValueError):  # in another thread
            signal.signal(signal.SIGTERM, before)  # Ray has replaced it with one that prints a trace

    def pool(
        self, count: int | None = None, *, cpus: float = 1, gpus: float = 0, arrive: Callable[[], object] = tuple
    ) -> MakePool:
        """What makes a pool of actors: those that are free after the last grid, and new ones.

        `count` is their number (None: as many as fit), `cpus` and `gpus` are what Ray reserves for each, and `arrive`
        is called in each.
        """
        needs: Needs = {name: need for name, need in (("CPU", cpus), ("GPU", gpus)) if need}
        if count is None and not (count := fits(needs)):
            raise RunFailed(f"no machine of the Ray cluster has room for an actor: {room(needs)}")
        free = [actor for actor in self._actors if actor.is_free and actor.needs == needs]
        for actor in {*self._actors}.difference(free):  # new ones need their room
            actor.close()
        self._actors = free + [ActorWorker(needs) for _ in range(count - len(free))]
        return functools.partial(
            ActorPool, actors=self._actors[:count], start_timeout=self.start_timeout, arrive=arrive
        )


@contextmanager
def pools_of(experiment: Experiment) -> Iterator[Callable[[Parts], MakePool]]:
    """What makes the pools of the runs, on the cluster of the first run; the connection begins with the first pool."""
    first, places = experiment.runs[0].engine, dict[str, Stored]()
    names = {name.partition("(")[0] for name in names_in([run.model_dump(mode="json") for run in experiment.runs])}
    with Cluster(first.address, first.node_timeout) as cluster:

        def pool_of(parts: Parts) -> MakePool:
            cluster.connect(name.partition(":")[0] for name in names)  # now, when all parts are loaded
            engine, data, dataset = parts.run.engine, parts.run.source, parts.dataset
            examples, gpus = examples_of(data), engine.gpus_per_client
            if dataset is not None and dataset.nbytes <= data.memory * 2**30 and examples not in places:
                # As NumPy arrays, since the actors of a machine read these without a copy.
                ray.util.register_serializer(Tensor, serializer=Tensor.numpy, deserializer=torch.from_numpy)
                places[examples] = ray.put(dataset.to(torch.device("cpu")))
                ray.util.deregister_serializer(Tensor)
            if gpus is None:
                gpus = float(engine.device != "cpu" and any("GPU" in machine["Resources"] for machine in machines()))
            own = [name for name in names if name in named.given or name.startswith("__main__:")]
            return cluster.pool(
                None if engine.workers == "auto" else engine.workers,
                cpus=engine.threads if engine.cpus_per_client is None else engine.cpus_per_client,
                gpus=gpus,
                arrive=functools.partial(_arrive, {name: named.load("", name) for name in own}, places),
            )

        yield pool_of


def _arrive(given: Mapping[str, Make], places: Mapping[str, Stored]) -> None:
    """In an actor: use the parts that it cannot import, and the data sets in the object store."""
    named.given.update(given)
    received.update({examples: ray.get(place) for examples, place in places.items()})  # type: ignore[misc]


def stage(folder: Path, modules: Iterable[str]) -> None:
    """Copy this package into `folder`, and `modules` that are not installed, with the loaded modules next to them."""
    names = [name for name in sys.modules if "." not in name and name != "__main__"]
    loaded = {name: source for name in names if (source := _source(name)) is not None}
    roots = {loaded[top].parent for name in modules if (top := name.partition(".")[0]) in loaded}
    package = folder / "fedbn_flwr"
    copies = {folder / source.name: source for source in loaded.values() if source.parent in roots}
    # As in a wheel. In a checkout the strategies' folder is next to the package.
    copies |= {package: Path(__file__).parents[2], package / "strategies": Path(strategies.__path__[0])}
    ignored = shutil.ignore_patterns("__pycache__", ".*", "*.egg-info")
    copy_folder = functools.partial(shutil.copytree, ignore=ignored, dirs_exist_ok=True)
    for place, source in copies.items():
        (copy_folder if source.is_dir() else shutil.copy)(source, place)


def _source(name: str) -> Path | None:
    """The file or folder of a loaded module or package; None if it is installed or a part of Python."""
    paths = [*getattr(sys.modules[name], "__path__", []), getattr(sys.modules[name], "__file__", None)]
    source = Path(paths[0] or sys.prefix).resolve()
    installed = {Path(sysconfig.get_path(key)).resolve() for key in ("stdlib", "purelib", "platlib")}
    return None if paths[0] is None or installed & {*source.parents} else source
