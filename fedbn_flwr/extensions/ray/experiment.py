"""Carries out an experiment on a Ray cluster, and sends data and code to its machines.

The data set is loaded once, here, and put into Ray's object store, from which all actors of a machine read it without
copies. Data sets larger than `data.memory` are not sent: each machine reads its own files.

The code consists of this package, the modules that the experiment names, and the loaded modules in the same folders.
Ray sends it to each machine once, and puts its folder first on the actors' path. So a machine needs only Python and the
dependencies, and every actor has the code of this process.
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
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
import torch
from flwr.app import Context
from flwr.serverapp import Grid
from torch import Tensor

from fedbn_flwr.client.app import client_app
from fedbn_flwr.client.client import BNClient
from fedbn_flwr.engines.local import LocalGrid
from fedbn_flwr.errors import RunFailed, UserError
from fedbn_flwr.experiment.data import examples_of, receive
from fedbn_flwr.experiment.node import ClientMaker, named_run
from fedbn_flwr.experiment.parts import Parts, choose_device
from fedbn_flwr.experiment.ray_settings import START, set_ray_defaults
from fedbn_flwr.experiment.settings import Engine, Experiment
from fedbn_flwr.messages.protocol import Config
from fedbn_flwr.named import give, in_a_line, names_in, not_importable
from fedbn_flwr.storage import temporary_folder

from .grid import Actor, Stored, end, machines, ray_grid


@contextmanager
def ray_grids(experiment: Experiment) -> Iterator[Callable[[Parts], AbstractContextManager[Grid]]]:
    """Grids on the Ray cluster of the first run, one for each run; the connection begins with the first grid."""
    sent = Sent(experiment)
    first = experiment.runs[0].engine
    idle: dict[tuple[float, float], list[Actor]] = {}  # those between two runs, by the CPUs and GPUs of each
    with ExitStack() as stack:

        @functools.cache
        def connect() -> None:  # now, when all parts are loaded
            stack.enter_context(connected(first.address, sent.modules()))
            stack.callback(lambda: end([actor for actors in idle.values() for actor in actors]))

        def make_grid(parts: Parts) -> LocalGrid:
            connect()
            sent.send_data(parts)
            run, engine = parts.run, parts.run.engine
            cpus = engine.threads if engine.cpus_per_client is None else engine.cpus_per_client
            gpus = _gpus(engine)
            for other in idle.keys() - {(cpus, gpus)}:
                end(idle.pop(other))  # new actors need their room
            return ray_grid(
                client_app(sent),
                run.clients,
                workers=None if engine.workers == "auto" else engine.workers,
                cpus=cpus,
                gpus=gpus,
                start_timeout=engine.node_timeout,
                idle=idle.setdefault((cpus, gpus), []),
                work=parts.work(),
                threads=engine.threads,
            )

        yield make_grid


def _gpus(engine: Engine) -> float:
    if engine.gpus_per_client is not None:
        return engine.gpus_per_client
    return 1.0 if engine.device != "cpu" and any(machine["Resources"].get("GPU") for machine in machines()) else 0.0


@dataclass(frozen=True)
class Sent(ClientMaker):
    """An experiment's clients with their data and code, in the form in which they are sent to actors."""

    sent: dict[str, Stored] = field(default_factory=dict)  # where data sets are in the object store
    given: dict[str, Any] = field(default_factory=dict)  # that a script, a notebook or a function defines

    def modules(self) -> list[str]:
        """The modules that the experiment names; `given` keeps what actors cannot import."""
        names = names_in([run.model_dump(mode="json") for run in self.experiment.runs])
        self.given.update(not_importable(names))
        return [name.partition(":")[0] for name in names if not name.startswith("__main__:")]

    def send_data(self, parts: Parts) -> None:
        data, dataset = parts.run.source, parts.dataset
        if dataset is None or dataset.nbytes > data.memory * 2**30:  # too large: each machine reads its files
            return
        if (examples := examples_of(data)) not in self.sent:
            # As NumPy arrays, since the actors of a machine read these without a copy.
            ray.util.register_serializer(Tensor, serializer=Tensor.numpy, deserializer=torch.from_numpy)
            self.sent[examples] = ray.put(dataset.to(torch.device("cpu")))
            ray.util.deregister_serializer(Tensor)

    def __call__(self, context: Context, config: Config) -> BNClient:
        """In an actor."""
        give(self.given)
        device = str(choose_device(named_run(self.experiment, config).engine.device))
        for examples, place in self.sent.items():
            _receive(examples, device, place)
        return super().__call__(context, config)


@functools.cache
def _receive(examples: str, device: str, place: Any) -> None:
    """In an actor: use the data set at this place in the object store."""
    receive(examples, device, ray.get(place).to(torch.device(device)))


_PACKAGE = Path(__file__).resolve().parents[2]
_NOT_CODE = shutil.ignore_patterns("__pycache__", ".*", "*.egg-info")


@contextmanager
def connected(address: str | None = None, modules: Iterable[str] = ()) -> Iterator[None]:
    """A connection of this process to a Ray cluster, with the code for its actors.

    Parameters
    ----------
    address
        The address of a running cluster. With None it comes from $RAY_ADDRESS; without that variable, a cluster on this
        machine starts, and ends with the connection.
    modules
        Names of modules that the actors need.
    """
    if ray.is_initialized():  # the caller has connected, with its own runtime environment
        yield
        return
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    set_ray_defaults(os.environ)
    with temporary_folder("code") as folder:
        stage(Path(folder), modules)
        before = signal.getsignal(signal.SIGTERM)
        try:
            host, _, port = address.rpartition(":")
            if port.isdecimal() and "://" not in address:  # otherwise Ray tries for minutes
                socket.create_connection((host, int(port)), timeout=10).close()
            ray.init(
                address,
                runtime_env={"working_dir": folder},
                logging_level=logging.ERROR,
                log_to_driver=False,
                include_dashboard=False,
            )
        except (OSError, ValueError) as error:
            raise UserError(  # not SettingsError, since that would try the next run
                f"no Ray cluster answers at engine.address={address!r} ({in_a_line(error)}); start one with "
                "`ray start --head`, or leave the address out and unset RAY_ADDRESS to use this machine"
            ) from None
        except Exception as error:  # as plain Exception, if Ray's processes have not started in time
            raise RunFailed(
                f"Ray cannot be used at engine.address={address!r}: {in_a_line(error)} If its processes start slowly, "
                f"because other programs use the machine, set a longer engine.node_timeout ({os.environ[START]} s)"
            ) from None
        with suppress(
            ValueError
        ):  # in another thread: Ray would replace the main thread's handler with one that prints a trace
            signal.signal(signal.SIGTERM, before)
        try:
            yield
        finally:
            ray.shutdown()


def stage(folder: Path, modules: Iterable[str]) -> None:
    """Copy this package into `folder`, and `modules` that are not installed, with the loaded modules next to them."""
    roots = {source.parent for name in modules if (source := _source(name.partition(".")[0])) is not None}
    loaded = [_source(name) for name in list(sys.modules) if "." not in name and name != "__main__"]
    for source in {_PACKAGE, *(path for path in loaded if path is not None and path.parent in roots)}:
        if source.is_dir():
            shutil.copytree(source, folder / source.name, ignore=_NOT_CODE)
        else:
            shutil.copy(source, folder)
    # As in a wheel. In a checkout this folder is next to the package.
    strategies = _PACKAGE.parent / "strategies"
    if strategies.is_dir() and not _is_installed(strategies):
        shutil.copytree(strategies, folder / _PACKAGE.name / "strategies", ignore=_NOT_CODE)


def _source(name: str) -> Path | None:
    """The file or folder of a loaded module or package; None if it is installed or a part of Python."""
    module = sys.modules.get(name)
    paths = [*getattr(module, "__path__", []), getattr(module, "__file__", None)]
    source = Path(paths[0] or "").resolve()
    return None if paths[0] is None or _is_installed(source) else source


def _is_installed(source: Path) -> bool:
    paths = sysconfig.get_paths()
    return any(source.is_relative_to(Path(paths[key]).resolve()) for key in ("stdlib", "purelib", "platlib"))
