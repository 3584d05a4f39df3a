"""Workers, which do one job at a time outside of the server's process. The local engine forks its workers.

A forked process shares the memory of its parent, which causes four problems:

- If another thread of the parent holds a lock during the fork, as in a notebook, the lock stays locked in the new
  process. So a worker that does not start is forked again.
- The new process inherits OpenMP's record of a thread pool, but not the threads. Parallel arithmetic would wait for
  them forever, for instance after a network calls `torch.set_num_threads(4)`. So the pool ends before the fork.
- PyTorch's own thread pool is replaced by the first thread that sets its number of threads. The engine of gradients
  does so in a thread of its own, and two at once end the process. So the new process does it before other threads.
- gRPC prepares for a fork by default, but not while another thread of the parent is in one of its calls. A client that
  uses gRPC itself may then crash, and its worker is restarted, or hang. GRPC_ENABLE_FORK_SUPPORT=1 changes nothing, and
  with 0 such clients never work.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import multiprocessing
import os
import pickle
import re
import signal
import socket
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from fedbn_flwr.errors import LOG

NAME = "fedbn worker"  # of the processes
START_TIMEOUT = 10.0  # seconds until a forked worker has taken the locks that it will need
_STARTS = 3  # attempts to start a worker
_TOO_SLOW = (
    f"worker processes cannot start: one did nothing for {START_TIMEOUT:g} s. The machine is very busy, or another "
    "thread of this process draws PyTorch's random numbers or prints whenever one starts; in both cases use workers=0"
)
_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
_WATCH = 2  # seconds between checks that the parent lives
_IDLE = 0.05  # seconds without a job until a worker returns freed memory to the system
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # of glibc's malloc.h
_OMP_PAUSE_HARD = 2  # of OpenMP's omp.h

Then = Callable[[Any, str], object]  # gets a job's result, or the reason why there is none


class NodeWorker(ABC):
    """Does one job at a time. It is started before its first job, and restarted after a crash."""

    then: Then | None = None  # gets the result of the current job; the first job is the start
    is_ready = False
    problem = ""  # why it is not started again
    _failures = 0  # failed starts in a row

    @property
    def is_free(self) -> bool:
        return self.is_ready and self.then is None

    def begin(self) -> None:
        """Start the worker unless it has started, without waiting until it is ready."""
        if not (self.is_ready or self.then or self.problem):
            self.launch()
            self.then = self._on_start

    def _on_start(self, problem: str | None, lost: str) -> None:
        self.is_ready = not (problem or lost)
        self._failures = 0 if self.is_ready else self._failures + 1
        if not self.is_ready:
            LOG.warning("a worker could not be started: %s", problem or lost)
            self.close()
        if self._failures == _STARTS:
            self.problem = problem or lost

    def proceed(self) -> None:
        """Wait for the result of the current job, and pass it on."""
        then, self.then = self.then, None
        result, lost = self.receive()
        if lost:
            self.close()
        assert then is not None
        then(result, lost)

    @abstractmethod
    def launch(self) -> None: ...

    @abstractmethod
    def send(self, then: Then, call: str, *arguments: object) -> None:
        """Begin a job: call a method of the object that this worker serves, such as `pool.Served.handle`."""

    @abstractmethod
    def receive(self) -> tuple[Any, str]:
        """The result of the current job and, if it is lost, the reason. The start's result is a problem or None."""

    @abstractmethod
    def close(self) -> None:
        """End the worker; begin() starts it again."""


class Channel:
    """Objects between two processes.

    multiprocessing's `Connection` would copy each array three times. And it would not notice that the other end was
    closed as long as another forked process has a copy of that end.
    """

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._file = end.makefile("rb")

    def fileno(self) -> int:
        return self._end.fileno()

    def send(self, value: object) -> None:
        with self._end.makefile("wb") as file:
            pickle.dump(value, file, protocol=5)

    def receive(self) -> Any:
        """The next object; EOFError if the other end is closed."""
        try:
            return pickle.load(self._file)  # noqa: S301 (both ends are processes of one run)
        except (OSError, pickle.UnpicklingError) as error:
            raise EOFError from error

    def close(self) -> None:
        with contextlib.suppress(OSError):  # the other end is closed
            self._end.shutdown(socket.SHUT_RDWR)
        self._file.close()
        self._end.close()


class Worker(NodeWorker):
    """A forked process."""

    process: BaseProcess | None = None

    def __init__(self, served: object) -> None:
        self.served = served

    def begin(self) -> None:
        if self.process is not None and not self.is_ready and time.monotonic() - self._began > START_TIMEOUT:
            self._on_start(None, _TOO_SLOW)
        super().begin()

    def launch(self) -> None:
        return_freed_memory()  # otherwise each process would have a copy of it as soon as it uses it
        end_openmp_threads()
        here, there = socket.socketpair()
        self.channel, self._began = Channel(here), time.monotonic()
        fork = multiprocessing.get_context("fork")
        self.process = fork.Process(target=_serve, args=(self.served, there), name=NAME, daemon=True)
        with there, _signals_later():
            self.process.start()
        atexit.register(self.close)  # else Python would wait for a process that ignores SIGTERM

    def send(self, then: Then, call: str, *arguments: object) -> None:
        # One job at a time: with several, each end could wait for the other to read.
        self.then = then
        with contextlib.suppress(OSError):  # it died while idle: receive() reports it
            self.channel.send((call, arguments))

    def receive(self) -> tuple[Any, str]:
        try:
            return self.channel.receive(), ""
        except EOFError:
            assert self.process is not None
            self.process.join(5)
            code = self.process.exitcode
            how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
            return None, f"its process died ({how})"

    def close(self) -> None:
        if self.process is not None and self.process.pid is not None:  # otherwise it was interrupted before its start
            self.channel.close()
            self.process.join(0.5)  # it ends at once, unless a client is still training
            self.process.kill()  # SIGTERM is not enough if it waits for a lock or still has this process's handlers
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)  # processes that its clients have started
            self.process.join(5)
        atexit.unregister(self.close)
        self.process, self.then, self.is_ready = None, None, False


@contextlib.contextmanager
def _signals_later() -> Iterator[None]:
    """Hold back signals around a fork: in the new process until it has handlers, in this one until it knows its child.

    The new process inherits the signal mask. In this process a mask is not enough, since other threads receive signals.
    """
    noted: list[int] = []
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: [*map(signal.raise_signal, noted)])
        for number in _SIGNALS if threading.current_thread() is threading.main_thread() else ():
            if (handler := signal.getsignal(number)) is not None:  # otherwise the handler is not Python's
                stack.callback(signal.signal, number, handler)
                signal.signal(number, lambda number, _: noted.append(number))
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        stack.callback(signal.pthread_sigmask, signal.SIG_SETMASK, before)
        yield


def fork_problem() -> str | None:
    """Why this forked process cannot train, or None: PyTorch refuses if the parent has threads for gradients."""
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
    os.killpg(0, signal.SIGKILL)


def _serve(served: object, end: socket.socket) -> None:
    """The new process: take the locks that other threads may hold, and do jobs until the parent ends it."""
    multiprocessing.current_process().daemon = False  # so that a DataLoader may have processes of its own
    os.setpgid(0, 0)  # a group with the processes that its clients start, which end with it
    gc.freeze()  # the collector would write to each object, and so copy the memory that this process shares
    torch.get_rng_state()  # this takes the lock of PyTorch's generator
    torch.set_num_threads(torch.get_num_threads())  # a thread pool of its own
    sys.stdout.flush()
    sys.stderr.flush()
    channel, problem = Channel(end), fork_problem()
    threading.Thread(target=_end_with, args=(os.getppid(),), name="parent", daemon=True).start()
    keep_freed_memory()
    for number in _SIGNALS:  # they may reach every process of a job; the parent decides when workers end
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which programs that a client starts would inherit
    forks_have_default_signals()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    with contextlib.suppress(EOFError, OSError):  # the parent closed its end or has ended
        channel.send(problem)
        while True:
            _serve_next(served, channel)


def forks_have_default_signals() -> None:
    """From now on, let processes that clients fork from this one have signals as in any Python process.

    They come later than the fork: Python drops those for which a new process still has this one's handlers.
    """
    block, unblock = (partial(signal.pthread_sigmask, how, _SIGNALS) for how in (signal.SIG_BLOCK, signal.SIG_UNBLOCK))
    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=_default_signals)


def _default_signals() -> None:
    for number in _SIGNALS:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


def _serve_next(served: object, channel: Channel) -> None:
    """Do a job. It is a function of its own so that no message or reply stays in memory while the worker waits."""
    if not wait([channel.fileno()], _IDLE):
        return_freed_memory()  # the server aggregates or evaluates now, and needs memory too
    call, arguments = channel.receive()
    channel.send(getattr(served, call)(*arguments))


def end_openmp_threads() -> None:
    """End the threads that OpenMP keeps for this thread; it starts new ones when they are needed (Linux only)."""
    with contextlib.suppress(OSError), open("/proc/self/maps") as maps:
        for path in {
            f"/{line.partition('/')[2].strip()}" for line in maps if re.search(r"/lib(g|i)?omp[\w.-]*$", line)
        }:
            with contextlib.suppress(OSError, AttributeError):  # an OpenMP from before version 5
                ctypes.CDLL(path).omp_pause_resource_all(_OMP_PAUSE_HARD)


def keep_freed_memory() -> None:
    """Make malloc keep freed memory for the next arrays, except blocks of more than 32 MiB (glibc only).

    Otherwise a model's arrays are returned to the system after each message, and allocating them again page by page
    takes longer than filling them. With larger blocks the process would grow: smaller arrays go into the hole that one
    leaves, and the next one no longer fits. glibc's own limit is 32 MiB, too. Threads share the main thread's memory,
    because malloc returns a thread's own memory at once, and a layer-wise round runs in a thread. The settings apply to
    the whole process, so only the processes of a run may call this.
    """
    with contextlib.suppress(OSError, AttributeError):
        malloc = ctypes.CDLL(None).mallopt
        malloc(_M_MMAP_THRESHOLD, 32 << 20)
        malloc(_M_TRIM_THRESHOLD, -1)  # never
        malloc(_M_ARENA_MAX, 1)


def return_freed_memory() -> None:
    """Return freed memory to the system (glibc only). Call it before work that does not need the memory again."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
