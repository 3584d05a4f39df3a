"""Carries out runs side by side, each in a process that is forked after the data are loaded.

The processes share the memory of the data. A run in a process has no workers, and is the same bit for bit as a run
whose clients are shared out among workers.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import torch

from fedbn_flwr import seeding
from fedbn_flwr.cores import cores
from fedbn_flwr.engines.worker import fork_problem, keep_freed_memory
from fedbn_flwr.errors import FedbnError, RunFailed, SettingsError, StorageError
from fedbn_flwr.results.text import shorten

from ..listeners.progress import News, Progress, Reporter
from ..model import choose_device
from ..settings import Settings

_FORKS = 3  # attempts to start a process
_START_TIMEOUT = 10  # seconds until it has taken the locks that it needs
_END_TIMEOUT = 20  # seconds until a process that was asked to end is killed

CarryOut = Callable[[int, Reporter], None]


@dataclass(frozen=True)
class Ended:
    """How a run ended; without a problem it is finished."""

    problem: str = ""
    stops_all: bool = False  # such as a full disk
    interrupted: bool = False


def jobs_of(runs: Sequence[Settings], unfinished: int, jobs: int | None) -> int:
    """The number of runs to carry out at the same time: `jobs`, or by default one per core if there are enough runs."""
    if jobs is not None and jobs < 1:
        raise SettingsError(f"--jobs is {jobs}; expected a number of runs at the same time, 1 or more")
    for run in runs:
        reason = (
            f"trains on a GPU (engine.device={run.engine.device})"
            if choose_device(run.engine.device).type == "cuda"
            else f"has engine.threads={run.engine.threads}"
            if run.engine.threads > 1
            else ""
        )
        if reason and (jobs or 1) > 1:
            raise SettingsError(f"--jobs is {jobs}, but the run {run.label!r} {reason}; leave --jobs out")
        if reason:
            return 1
    if jobs is not None:
        return max(1, min(jobs, unfinished))
    if any(run.engine.workers != "auto" for run in runs):
        return 1
    # With fewer runs than cores, the cores share out the clients of one run at a time.
    return cores() if unfinished >= cores() else 1


def side_by_side(places: Sequence[int], carry_out: CarryOut, jobs: int, progress: Progress) -> dict[int, str]:
    """Carry out the runs at these places of the experiment; returns the reason of each that failed.

    `carry_out(place, reporter)` is called in a process of its own. After Ctrl-C no run begins, and those that have
    begun end after their round; this function then raises KeyboardInterrupt.
    """
    todo, running = list(places), dict[Connection, _Process]()
    problems: dict[int, str] = {}
    fatal: str | None = None
    asked = False
    try:
        while running or (todo and not (fatal or progress.stop_asked)):
            while todo and len(running) < jobs and not (fatal or progress.stop_asked):
                process = _Process.start(todo.pop(0), carry_out)
                running[process.connection] = process
                progress.begin(process.place)
            if (fatal or progress.stop_asked) and not asked:
                asked = True
                for process in running.values():
                    process.ask_to_stop()
            for connection in wait(list(running), timeout=0.2):
                process = running[connection]  # type: ignore[index]
                found = process.receive()
                if isinstance(found, News):
                    progress.news(process.place, found)
                    continue
                del running[process.connection]
                process.close()
                progress.end(
                    process.place, "stopped" if found.interrupted else found.problem and failed_because(found.problem)
                )
                if found.stops_all:
                    fatal = found.problem
                elif found.problem:
                    problems[process.place] = found.problem
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.close()
    if fatal:
        raise StorageError(fatal)
    if progress.stop_asked:
        raise KeyboardInterrupt
    return problems


def failed_because(problem: str) -> str:
    """A line: the reasons of clients are in lines of their own, of which the first is shown."""
    return "failed: " + shorten(" ".join(line.strip(" -") for line in problem.splitlines()[:2]), 300)


@dataclass(frozen=True)
class _Process:
    place: int
    process: BaseProcess
    connection: Connection

    @classmethod
    def start(cls, place: int, carry_out: CarryOut) -> _Process:
        fork = multiprocessing.get_context("fork")
        for _ in range(_FORKS):
            connection, other = fork.Pipe()
            process = fork.Process(target=_serve, args=(place, carry_out, other, connection, os.getpid()), daemon=True)
            with _without_signals():
                process.start()
            other.close()
            started = cls(place, process, connection)
            if connection.poll(_START_TIMEOUT):  # where this process has other threads, one may have held a lock
                connection.recv()
                return started
            process.kill()
            started.close()
        raise RunFailed(
            f"processes for runs cannot start: {_FORKS} of them did nothing for {_START_TIMEOUT} s, because other "
            "threads of this process use PyTorch's random numbers or its output; end them, or use --jobs 1"
        )

    def receive(self) -> News | Ended:
        try:
            found = self.connection.recv()
        except (EOFError, OSError):
            self.process.join(_END_TIMEOUT)
            return Ended(f"its process died (exit code {self.process.exitcode}); continue with --resume")
        assert isinstance(found, News | Ended)
        return found

    def ask_to_stop(self) -> None:
        with contextlib.suppress(OSError):  # it has ended
            self.connection.send(None)

    def terminate(self) -> None:
        self.process.terminate()

    def close(self) -> None:
        self.connection.close()
        self.process.join(_END_TIMEOUT)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


@contextlib.contextmanager
def _without_signals() -> Iterator[None]:
    """A process that is started here receives signals only when it has decided what to do with them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}


def _serve(place: int, carry_out: CarryOut, connection: Connection, parents: Connection, parent: int) -> None:
    parents.close()
    # Ctrl-C and the end of a terminal reach every process; the parent decides when a run ends.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _interrupt)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    keep_freed_memory()
    seeding.states()  # takes the lock of PyTorch's generator
    torch.set_num_threads(1)  # a forked process has no pool of threads
    sys.stdout.flush()
    sys.stderr.flush()
    with contextlib.suppress(OSError):  # the parent has ended
        connection.send(None)
        if (problem := fork_problem()) is not None:
            connection.send(Ended(problem))
            return
        connection.send(_carried_out(place, carry_out, reporter_to(connection, parent)))


def reporter_to(connection: Connection, parent: int) -> Reporter:
    """In the process of a run: sends its news, and stops it when the other end asks for it or has ended."""
    alone = False

    def send(news: News) -> None:
        nonlocal alone
        try:
            connection.send(news)
        except OSError:  # the run stops after this round, with a checkpoint
            alone = True

    return Reporter(send, lambda: alone or connection.poll() or os.getppid() != parent)


def _interrupt(number: int, frame: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the files of the run are written once
    raise KeyboardInterrupt


def _carried_out(place: int, carry_out: CarryOut, reporter: Reporter) -> Ended:
    try:
        carry_out(place, reporter)
    except KeyboardInterrupt:
        return Ended(interrupted=True)
    except StorageError as error:
        return Ended(str(error), stops_all=True)
    except FedbnError as error:
        return Ended(str(error))
    return Ended()
