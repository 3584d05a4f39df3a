"""Workers that are new interpreters, because a GPU cannot be used in a process that is forked after its first use.

Each gets its ClientApp, and one GPU. It imports what the app refers to by name. Tensors in a GPU's memory that the app
holds are not copied: all processes of that GPU read the same memory (CUDA IPC). Models are copied, because each process
trains its own.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import logging
import multiprocessing
import os
import pickle
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from logging import WARNING
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.reduction import DupFd, ForkingPickler
from types import ModuleType
from typing import IO, TYPE_CHECKING, Any

from flwr.clientapp import ClientApp
from flwr.common import log

from fedbn_flwr.engines.logs import use_json
from fedbn_flwr.engines.worker import UNGUARDED, Handler, Worker, serve, without_interrupts
from fedbn_flwr.errors import RunFailed

if TYPE_CHECKING:
    from torch import Tensor

_START_TIMEOUT = 300  # seconds until a process has imported PyTorch and the app
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_AT_THE_TOP = (
    "it and what it refers to must be at the top of a module: not in a function, nor in a notebook, nor below "
    'if __name__ == "__main__"; or use workers=0'
)


@dataclass
class Spawned:
    """What spawned processes get: `served`, and one of `gpus` GPUs each; with 0 no choice of GPU is made."""

    served: Any
    gpus: int = 0
    _copies: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)  # by tensor and GPU

    def pack(self, number: int) -> Packed:
        """The data from which process `number` makes `served`."""
        file = tempfile.TemporaryFile()  # noqa: SIM115 (closed when the process has started)
        try:
            _Pickler(file, number % self.gpus if self.gpus else None, self._copies).dump(self.served)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise RunFailed(f"worker processes cannot get the ClientApp: {error}; {_AT_THE_TOP}") from error
        file.seek(0)
        return Packed(file)

    @contextmanager
    def environment(self, number: int) -> Iterator[None]:
        """The environment that process `number` is started in.

        It sees one GPU, so that "cuda" is that GPU in all of its threads, also in code of the user.
        """
        if not self.gpus:
            yield
            return
        before = os.environ.get(_VISIBLE)
        gpu = number % self.gpus
        os.environ[_VISIBLE] = before.split(",")[gpu].strip() if before else str(gpu)
        try:
            yield
        finally:
            if before is None:
                del os.environ[_VISIBLE]
            else:
                os.environ[_VISIBLE] = before


class SpawnedWorker(Worker):
    """A process that is a new interpreter; `handle` is the `Spawned` that it gets."""

    handle: Any

    def start(self) -> None:
        self.begin()
        if not self._is_ready and not self.becomes_ready(_START_TIMEOUT):
            self.close()
            raise RunFailed(f"a worker process was not ready after {_START_TIMEOUT} s; use fewer workers, or workers=0")

    def launch(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.connection, other = spawn.Pipe()
        packed = self.handle.pack(self.number)
        level = logging.getLogger("flwr").getEffectiveLevel()
        self.process = spawn.Process(target=_serve, args=(packed, level, other), daemon=True)
        resource_tracker.ensure_running()  # the start of the first process would start it, and unblock Ctrl-C
        with packed.file, self.handle.environment(self.number), without_interrupts():
            self.process.start()
        other.close()

    def died_early(self) -> str:
        how = self.how_it_ended()
        assert self.process is not None
        if self.process.exitcode == UNGUARDED:
            return (
                "a worker process imports the script, and the script trains when it is imported; put what trains below "
                'if __name__ == "__main__": (docs/python.md), or use workers=0'
            )
        return (
            f"a worker process ended while it started ({how}); the output above may have the reason; or use workers=0"
        )


def spawned(handle: Handler, count: int, gpus: int) -> list[Worker]:
    """`count` workers, on `gpus` GPUs in turn."""
    shared = Spawned(handle, gpus)
    return [SpawnedWorker(number, shared) for number in range(count)]  # type: ignore[arg-type]


def _serve(packed: Packed, level: int, connection: Connection) -> None:
    logging.getLogger("flwr").setLevel(level)
    use_json()
    try:
        handle = packed.load()
    except RunFailed as error:
        with contextlib.suppress(OSError):  # the parent has ended
            connection.send(str(error))
    else:
        serve(handle, connection)


class Packed:
    """A file that a new process reads when it has started. (A full pipe would make this process wait for it.)"""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return _opened, (DupFd(self.file.fileno()),)

    def load(self) -> Any:
        """What was packed; RunFailed if this process cannot import it."""
        try:
            with self.file as file:
                return pickle.load(file)  # noqa: S301 (from the process that started this one)
        except Exception as error:  # of any module that is imported
            raise RunFailed(
                f"a worker process cannot load the ClientApp ({type(error).__name__}: {error}); {_AT_THE_TOP}"
            ) from error


def _opened(descriptor: Any) -> Packed:
    return Packed(os.fdopen(descriptor.detach(), "rb"))


class _Pickler(ForkingPickler):
    def __init__(self, file: IO[bytes], gpu: int | None, copies: dict[tuple[int, int], tuple[Tensor, Tensor]]) -> None:
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

    def _shared(self, tensor: Tensor, gpu: int) -> Any:
        """A tensor in the memory of a GPU that is this process's cuda:`gpu` and the only GPU of the other process."""
        from torch.multiprocessing.reductions import reduce_tensor

        key = (id(tensor), gpu)
        if key not in self._copies:  # one for all processes of the GPU
            self._copies[key] = (tensor, tensor.to(f"cuda:{gpu}"))
        try:
            rebuild, arguments = reduce_tensor(self._copies[key][1])
        except RuntimeError as error:
            log(WARNING, "processes cannot share the memory of a GPU here, so each has a copy of the data: %s", error)
            return _copied, (tensor.cpu(),)
        index = list(inspect.signature(rebuild).parameters).index("storage_device")
        return rebuild, (*arguments[:index], 0, *arguments[index + 1 :])


def _copied(tensor: Tensor) -> Tensor:
    return tensor.cuda()


def _loaded(content: bytes) -> Any:
    import torch

    def here(storage: Any, location: str) -> Any:
        return storage.cuda() if location.startswith("cuda") else storage  # not on the GPU of that number

    return torch.load(io.BytesIO(content), map_location=here, weights_only=False)


def _app(app: ClientApp) -> Any:
    """How another process finds an app: by its name in a module, or from the arguments of `client_app`."""
    module, name = _name_of(app)
    if type(app) is not ClientApp and module in ("", "__main__"):  # it may be below if __name__ == "__main__"
        return NotImplemented
    if not name:
        raise pickle.PicklingError("it is in no module")
    return _find, (module, name)


def _name_of(app: ClientApp) -> tuple[str, str]:
    for module, content in list(sys.modules.items()):
        if isinstance(content, ModuleType) and module != "__mp_main__":
            for name, value in list(vars(content).items()):
                if value is app:
                    return module, name
    return "", ""


def _find(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)
