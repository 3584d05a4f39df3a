"""A worker process of the local engine. Any worker can serve any node: the node's state travels with the message.

A forked worker shares the memory of its parent. Where the parent has other threads, as in a notebook, a lock that one
of them holds at the fork stays locked in the new process: a worker that does not start is forked again.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Protocol

from flwr.app import Message, RecordDict

from fedbn_flwr import seeding
from fedbn_flwr.errors import RunFailed

from .context_cache import keep_freed_memory, return_freed_memory
from .transport import receive, send

if TYPE_CHECKING:  # the exchange's modules are imported when a strategy uses them
    from fedbn_flwr.exchange.codec import Agreement, Contribution

_FORKS = 3  # attempts to start a worker
_START_TIMEOUT = 10  # seconds until a forked worker has taken the locks that it will need
_WATCH = 2  # seconds between two looks whether the parent lives
_IDLE = 1  # seconds without a message, after which a worker returns freed memory to the system
UNGUARDED = 97  # exit code of a process that found its main script unguarded


@dataclass(frozen=True)
class Task:
    """A message to a node, and the node's state; None if the worker has the state."""

    message: Message
    state: RecordDict | None


@dataclass(frozen=True)
class Done:
    """A node's reply and its new state; None if the worker keeps it, because the node's round is not complete."""

    reply: Message
    state: RecordDict | None
    seconds: float


@dataclass(frozen=True, eq=False)
class Exchange:
    """The agreement of an exchange, with which the layer-wise rounds of these nodes continue in the worker."""

    nodes: list[int]
    agreement: Agreement


@dataclass(frozen=True)
class Lost:
    """There is no result, because the worker is lost."""

    reason: str


Job = Task | Exchange | int  # the number of a node that the worker keeps: it gives up its state
Result = Done | dict[int, "Contribution | str"] | RecordDict | Lost  # of a task, an exchange, a node; of each
Handler = Callable[[Job], Result]  # what a worker does with a job
_REST = "rest"  # asks a worker to return freed memory; it does not reply


class NodeWorker(Protocol):
    """A worker that handles one job at a time; one that is lost is replaced."""

    current: Job | None  # what it does

    @property
    def is_free(self) -> bool:
        """Whether a job can be sent to it."""

    def begin(self) -> None:
        """Start it if it is not started, without waiting until it is ready."""

    def send(self, job: Job) -> None: ...

    def receive(self) -> tuple[Job, Result]:
        """The current job and its result, as soon as there is one."""

    def close(self) -> None: ...


@dataclass
class Worker:
    """A forked process that handles one job at a time; a dead one is replaced."""

    number: int
    handle: Handler
    current: Job | None = None
    process: BaseProcess | None = None
    connection: Connection = field(init=False)
    _is_ready: bool = False

    @property
    def is_free(self) -> bool:
        return self.current is None

    def send(self, job: Job) -> None:
        # One job at a time: with several, each end could wait for the other to read.
        self.start()
        self.current = job
        with contextlib.suppress(OSError):  # it died while idle: receive() reports it
            send(self.connection, job)

    def receive(self) -> tuple[Job, Result]:
        """The current job and its result, as soon as there is one."""
        job, self.current = self.current, None
        assert job is not None
        try:
            return job, receive(self.connection)
        except (EOFError, OSError):
            how = self.how_it_ended()
            self.close()
            return job, Lost(f"the client's process died ({how})")

    def rest(self) -> None:
        """Let the idle process return freed memory."""
        if self._is_ready and self.is_free:
            with contextlib.suppress(OSError):  # it died while idle
                send(self.connection, _REST)

    def begin(self) -> None:
        """Start the process if there is none, without waiting until it is ready."""
        if self.process is None:
            self.launch()

    def start(self) -> None:
        """Start the process if there is none, and wait until it is ready."""
        for _ in range(_FORKS):
            self.begin()
            if self._is_ready or self.becomes_ready(_START_TIMEOUT):
                return
            self.close()
        raise RunFailed(
            f"worker processes cannot start: {_FORKS} of them did nothing for {_START_TIMEOUT} s, because other "
            "threads of this process use PyTorch's random numbers or its output; end them, or use workers=0"
        )

    def becomes_ready(self, timeout: float) -> bool:
        """Whether the process, which has been started, is ready within `timeout` seconds; RunFailed if it cannot be."""
        if not self.connection.poll(timeout):
            return False
        try:
            problem = self.connection.recv()
        except (EOFError, OSError):
            problem = self.died_early()
        if problem is not None:
            self.close()
            raise RunFailed(problem)
        self._is_ready = True
        return True

    def died_early(self) -> str | None:
        """Why the process, which was not ready yet, has ended; None: receive() reports it."""
        return None

    def how_it_ended(self) -> str:
        assert self.process is not None
        self.process.join(5)
        code = self.process.exitcode
        return f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"

    def launch(self) -> None:
        """Start a process."""
        return_freed_memory()  # otherwise each process would have a copy of it as soon as it uses it
        fork = multiprocessing.get_context("fork")
        self.connection, other = fork.Pipe()
        self.process = fork.Process(target=_serve_forked, args=(self.handle, self.connection, other), daemon=True)
        with without_interrupts():
            self.process.start()
        other.close()

    def close(self) -> None:
        if self.process is not None:
            with contextlib.suppress(OSError):
                send(self.connection, None)
            self.connection.close()
            self.process.join(0.5)  # it ends at once, unless a client is still training
            if self.process.is_alive():
                self.process.kill()  # it may wait for a lock, and has this process's handler of other signals
                self.process.join(5)
        self.process, self._is_ready = None, False


@contextlib.contextmanager
def without_interrupts() -> Iterator[None]:
    """A process that is started here receives Ctrl-C only when it has decided what to do with it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_if_unguarded() -> None:
    """End this process if it is a new worker that executes the main script of the process that started it.

    A spawned process imports the main script, in which only code below `if __name__ == "__main__"` is not executed.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        sys.exit(UNGUARDED)


def _serve_forked(handle: Handler, parent: Connection, connection: Connection) -> None:
    parent.close()
    if "torch" in sys.modules:
        seeding.states()  # takes the lock of PyTorch's generator
    sys.stdout.flush()
    sys.stderr.flush()
    if (problem := fork_problem()) is None:
        serve(handle, connection)
    else:
        with contextlib.suppress(OSError):  # the parent has ended
            connection.send(problem)


def fork_problem() -> str | None:
    """Why this forked process cannot train: PyTorch refuses if its parent has threads that compute gradients."""
    if "torch" not in sys.modules:
        return None
    import torch

    try:
        torch.zeros((), requires_grad=True).backward()
    except RuntimeError:
        return (
            "PyTorch cannot train in copies of this process, which has trained a compiled model or on a GPU; start a "
            "new process, or use workers=0"
        )
    return None


def _end_with(parent: int) -> None:
    """End this process when its parent was killed, although a client may still be training."""
    while os.getppid() == parent:
        time.sleep(_WATCH)
    os._exit(1)


def serve(handle: Handler, connection: Connection) -> None:
    threading.Thread(target=_end_with, args=(os.getppid(),), name="parent", daemon=True).start()
    keep_freed_memory()
    # Ctrl-C reaches every process of a terminal; the parent decides when workers end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the parent's handler is not for this process
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    with contextlib.suppress(EOFError, OSError):  # the parent closed its end or has ended
        connection.send(None)
        while _serve_next(handle, connection):
            pass


def _serve_next(handle: Handler, connection: Connection) -> bool:
    """Answer a message. A function, so that no message or reply stays in memory while the worker waits."""
    if not connection.poll(_IDLE):
        return_freed_memory()  # the server aggregates or evaluates now, and needs memory too
    match receive(connection):
        case None:
            return False
        case str():  # _REST
            return_freed_memory()
        case job:
            send(connection, handle(job))
    return True
