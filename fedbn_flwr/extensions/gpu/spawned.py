"""Workers that are new interpreters, because a GPU cannot be used in a process that is forked after its first use.

Each gets its ClientApp, and one GPU. It imports what the app refers to by name. Tensors in a GPU's memory that the app
holds are not copied: all processes of that GPU read the same memory (CUDA IPC). Models are copied, because each process
trains its own.
"""

from __future__ import annotations

import inspect
import io
import logging
import math
import multiprocessing
import operator
import os
import pickle
import pkgutil
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from logging import WARNING
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from types import ModuleType
from typing import IO, Any

from flwr.clientapp import ClientApp
from flwr.common import log

from fedbn_flwr.engines.nodes import Nodes
from fedbn_flwr.engines.worker import UNGUARDED, Channel, Worker, serve
from fedbn_flwr.errors import RunFailed
from fedbn_flwr.experiment.logs import use_json

_START_TIMEOUT = 300  # seconds until a process has imported PyTorch and the app
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_AT_THE_TOP = (
    "it and what it refers to must be at the top of a module: not in a function, nor in a notebook, nor below "
    'if __name__ == "__main__"; or use workers=0'
)


Copies = dict[tuple[int, int], tuple[Any, Any]]  # by tensor and GPU


class SpawnedWorker(Worker):
    """A process that is a new interpreter, which sees one GPU; None: no choice of GPU is made."""

    starts = 1

    def __init__(self, nodes: Nodes, gpu: int | None, copies: Copies) -> None:
        super().__init__(nodes)
        self._gpu, self._copies = gpu, copies

    def launch(self) -> None:
        data = packed(self.nodes, self._gpu, self._copies)
        with environment(self._gpu):
            super().launch()
        self._began = math.inf  # to import can take long, and there is no lock to wait for
        # In a thread: the socket holds less, and the process reads when it has imported what it needs.
        threading.Thread(target=self.channel.write, args=(data,), daemon=True).start()

    def new_process(self, end: socket.socket) -> BaseProcess:
        resource_tracker.ensure_running()  # the start of the first process would start it, and unblock Ctrl-C
        level = logging.getLogger("flwr").getEffectiveLevel()
        return multiprocessing.get_context("spawn").Process(target=_serve, args=(end, level), daemon=True)

    def why_it_ended(self, code: int | None) -> str:
        if self.is_ready:
            return super().why_it_ended(code)
        if code == UNGUARDED:
            return (
                "a worker process imports the script, and the script trains when it is imported; put what trains below "
                'if __name__ == "__main__": (docs/python.md), or use workers=0'
            )
        return f"{super().why_it_ended(code)} while it started; the output above may have the reason; or use workers=0"


def spawned(nodes: Nodes, count: int, gpus: int) -> tuple[list[Worker], float]:
    """`count` workers, on `gpus` GPUs in turn, and the seconds in which one must be ready."""
    copies: Copies = {}
    return [SpawnedWorker(nodes, i % gpus if gpus else None, copies) for i in range(count)], _START_TIMEOUT


def packed(value: Any, gpu: int | None, copies: Copies) -> memoryview:
    """What another process, which sees this GPU only, reads as the value."""
    file = io.BytesIO()
    try:
        _Pickler(file, gpu, copies).dump(value)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise RunFailed(f"worker processes cannot get the ClientApp: {error}; {_AT_THE_TOP}") from error
    return file.getbuffer()


@contextmanager
def environment(gpu: int | None) -> Iterator[None]:
    """The environment to start a process in that sees one GPU: "cuda" is that one in all of its threads."""
    before = os.environ.get(_VISIBLE)
    if gpu is not None:
        os.environ[_VISIBLE] = before.split(",")[gpu].strip() if before else str(gpu)
    try:
        yield
    finally:
        os.environ.pop(_VISIBLE, None)
        if before is not None:
            os.environ[_VISIBLE] = before


def _serve(end: socket.socket, level: int) -> None:
    logging.getLogger("flwr").setLevel(level)
    use_json()
    channel, problem = Channel(end), ""
    nodes: Any = None
    try:
        nodes = channel.receive()
    except Exception as error:  # of any module that is imported
        problem = f"a worker process cannot load the ClientApp ({type(error).__name__}: {error}); {_AT_THE_TOP}"
    serve(nodes, channel, problem)


class _Pickler(ForkingPickler):
    def __init__(self, file: IO[bytes], gpu: int | None, copies: Copies) -> None:
        super().__init__(file)
        self._gpu = gpu
        self._copies = copies

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, ClientApp):
            return _app(value)
        if (torch := sys.modules.get("torch")) is None:
            return NotImplemented
        if isinstance(value, torch.nn.Module) or (isinstance(value, torch.Tensor) and value.requires_grad):
            content = io.BytesIO()
            torch.save(value, content)
            return _loaded, (content.getvalue(),)
        if self._gpu is not None and isinstance(value, torch.Tensor) and value.is_cuda:
            return self._shared(value, self._gpu)
        return NotImplemented

    def _shared(self, tensor: Any, gpu: int) -> Any:
        """A tensor in the memory of a GPU that is this process's cuda:`gpu` and the only GPU of the other process."""
        from torch.multiprocessing.reductions import reduce_tensor

        key = (id(tensor), gpu)
        if key not in self._copies:  # one for all processes of the GPU
            self._copies[key] = (tensor, tensor.to(f"cuda:{gpu}"))
        try:
            rebuild, arguments = reduce_tensor(self._copies[key][1])
        except RuntimeError as error:
            log(WARNING, "processes cannot share the memory of a GPU here, so each has a copy of the data: %s", error)
            return operator.methodcaller("cuda"), (tensor.cpu(),)
        index = list(inspect.signature(rebuild).parameters).index("storage_device")
        return rebuild, (*arguments[:index], 0, *arguments[index + 1 :])


def _loaded(content: bytes) -> Any:
    import torch

    def here(storage: Any, location: str) -> Any:
        return storage.cuda() if location.startswith("cuda") else storage  # not on the GPU of that number

    return torch.load(io.BytesIO(content), map_location=here, weights_only=False)


def _app(app: ClientApp) -> Any:
    """How another process finds an app: by its name in a module, or from the arguments of `client_app`."""
    names = [
        f"{module}:{name}"
        for module, content in list(sys.modules.items())
        if isinstance(content, ModuleType) and module != "__mp_main__"
        for name, value in list(vars(content).items())
        if value is app
    ]
    if type(app) is not ClientApp and (not names or names[0].startswith("__main__:")):
        return NotImplemented  # it may be below if __name__ == "__main__"
    if not names:
        raise pickle.PicklingError("it is in no module")
    return pkgutil.resolve_name, (names[0],)
