"""Carries out an experiment on a Ray cluster: what the actors need is sent to its machines.

The data set is loaded once, here, and put into Ray's object store, from which all actors of a machine read it without a
copy of their own. Data sets that are streamed from files are not sent: each machine opens its own files.
"""

from __future__ import annotations

import functools
import io
import math
import pickle
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import ray
import torch
from flwr.app import Context
from flwr.serverapp import Grid
from torch import Tensor

from fedbn_flwr import named
from fedbn_flwr.client.app import client_app
from fedbn_flwr.client.client import BNClient
from fedbn_flwr.cores import cores
from fedbn_flwr.data.dataset import DataSet
from fedbn_flwr.experiment.data import loaded_data, receive
from fedbn_flwr.experiment.flower_mods import client_mods
from fedbn_flwr.experiment.node import Clients, run_of
from fedbn_flwr.experiment.parts import Parts, choose_device
from fedbn_flwr.experiment.settings import Engine, Experiment

from .cluster import connected
from .grid import Actors, Place, RayGrid, machines


@contextmanager
def ray_grids(experiment: Experiment) -> Iterator[Callable[[Parts], AbstractContextManager[Grid]]]:
    """Grids on the Ray cluster of the first run, one for each run; the connection begins with the first grid."""
    sent = Sent(experiment)
    first = experiment.runs[0].engine
    idle = Actors()
    with ExitStack() as stack:

        @functools.cache
        def connect() -> None:  # now, when all parts are loaded
            stack.enter_context(connected(first.address, sent.modules(), _cores(first)))
            stack.callback(idle.close)

        @contextmanager
        def make_grid(parts: Parts) -> Iterator[Grid]:
            connect()
            sent.send_data(parts)
            run, engine = parts.run, parts.run.engine
            with RayGrid(
                client_app(sent.make_client, mods=client_mods(experiment)),
                run.clients,
                workers=None if engine.workers == "auto" else engine.workers,
                place=_place(engine),
                start_timeout=engine.node_timeout,
                idle=idle,
                work=parts.work(),
                threads=engine.threads,
                state_memory=engine.state_memory,
            ) as grid:
                yield grid

        yield make_grid


def _cores(engine: Engine) -> int | None:
    """The cores that a cluster of this machine must offer, if that is more than it has."""
    if engine.workers == "auto":
        return None
    return max(cores(), math.ceil(engine.workers * _cpus(engine)))


def _cpus(engine: Engine) -> float:
    return engine.threads if engine.cpus_per_client is None else engine.cpus_per_client


def _place(engine: Engine) -> Place:
    gpus = engine.gpus_per_client
    if gpus is None:
        gpus = 1.0 if engine.device != "cpu" and any(each["Resources"].get("GPU") for each in machines()) else 0.0
    return Place(_cpus(engine), gpus)


@dataclass
class Sent:
    """An experiment with the data and the code that its clients need, in the form in which it is sent to actors."""

    experiment: Experiment
    sent: list[tuple[str, Any]] = field(default_factory=list)  # data sets, with their place in the object store
    main: dict[str, Any] = field(default_factory=dict)  # parts that a script or a notebook defines
    _received: set[tuple[str, str]] = field(default_factory=set)  # in an actor: the data sets on its devices

    def __post_init__(self) -> None:
        self.clients = Clients(self.experiment)

    def modules(self) -> list[str]:
        """The modules that the experiment names, which are loaded; parts of this program itself are kept in `main`."""
        found = []
        for name in sorted(named.names_in([run.model_dump(mode="json") for run in self.experiment.runs])):
            module, _, path = name.partition(":")
            top = path.partition(".")[0]
            if module == "__main__" and hasattr(sys.modules[module], top):
                self.main[top] = getattr(sys.modules[module], top)
            elif module in sys.modules:
                found.append(module)
        return found

    def send_data(self, parts: Parts) -> None:
        if parts.dataset is None:
            return
        loaded = loaded_data(parts.run.data, str(parts.device))
        if loaded is not None and all(loaded[0] != other for other, _ in self.sent):
            self.sent.append((loaded[0], ray.put(_flat(loaded[1].to(torch.device("cpu"))))))

    def make_client(self, context: Context, config: Mapping[str, Any]) -> BNClient:
        """The client of a node, in an actor."""
        for name, part in self.main.items():
            setattr(sys.modules["__main__"], name, part)
        device = str(choose_device(run_of(self.experiment, config).engine.device))
        for examples, place in self.sent:
            if (examples, device) not in self._received:
                receive(examples, device, _dataset(ray.get(place)).to(torch.device(device)))
                self._received.add((examples, device))
        return self.clients(context, config)


# --- data sets in the object store -------------------------------------------


class _Pickler(pickle.Pickler):
    """Pickles tensors as NumPy arrays, whose memory need not be copied."""

    def reducer_override(self, value: Any) -> Any:
        return (_tensor, (value.numpy(),)) if isinstance(value, Tensor) else NotImplemented


def _tensor(values: np.ndarray) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # nothing writes to it
        return torch.from_numpy(values)


def _flat(dataset: DataSet) -> list[Any]:
    buffers: list[pickle.PickleBuffer] = []
    file = io.BytesIO()
    _Pickler(file, protocol=5, buffer_callback=buffers.append).dump(dataset)
    return [file.getvalue(), *(np.frombuffer(buffer.raw(), np.uint8) for buffer in buffers)]


def _dataset(flat: list[Any]) -> DataSet:
    dataset = pickle.loads(flat[0], buffers=flat[1:])  # noqa: S301  # of our own server
    assert isinstance(dataset, DataSet)
    return dataset
