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
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from fedbn_flwr import seeding
from fedbn_flwr.cores import cores
from fedbn_flwr.engines.worker import fork_problem, keep_freed_memory
from fedbn_flwr.errors import FedbnError, RunFailed, SettingsError, StorageError
from fedbn_flwr.results.text import shorten

from ..listeners.progress import News, Progress, Reporter
from ..parts import choose_device
from ..settings import Settings

_FORKS = 3  # attempts to start a process
_START_TIMEOUT = 10  # seconds until it has taken the locks that it needs
_END_TIMEOUT = 20  # seconds that it may take to exit after its run
_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}

CarryOut = Callable[[int, Reporter], None]


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

    `carry_out(place, reporter)` is called in a process of its own. After Ctrl-C or an error such as a full disk no run
    begins, and those that have begun end after their round; this function then raises it.
    """
    todo, running = list(places), dict[Connection, tuple[int, BaseProcess]]()
    stop = multiprocessing.get_context("fork").RawValue("b", 0)  # without a lock, which a killed process would keep
    problems: dict[int, str] = {}
    fatal: StorageError | None = None
    try:
        while todo or running:
            if fatal or progress.stop_asked:
                stop.value = 1
                todo.clear()
            while todo and len(running) < jobs:
                place = todo.pop(0)
                connection, process = _started(place, carry_out, stop)
                running[connection] = place, process
                progress.begin(place)
            for ready in wait(list(running), timeout=0.2):
                assert isinstance(ready, Connection)
                place, process = running[ready]
                found = _received(ready, process)
                if isinstance(found, News):
                    progress.news(place, found)
                    continue
                del running[ready]
                _end(process)
                is_stopped, problem = isinstance(found, KeyboardInterrupt), str(found or "")
                progress.end(place, "stopped" if is_stopped else problem and failed_because(problem))
                if isinstance(found, StorageError):
                    fatal = found
                elif problem:
                    problems[place] = problem
    finally:
        for _, process in running.values():
            process.kill()
            _end(process)
    if fatal:
        raise fatal
    if progress.stop_asked:
        raise KeyboardInterrupt
    return problems


def failed_because(problem: str) -> str:
    """A line: the reasons of clients are in lines of their own, of which the first is shown."""
    return "failed: " + shorten(" ".join(line.strip(" -") for line in problem.splitlines()[:2]), 300)


def _started(place: int, carry_out: CarryOut, stop: Any) -> tuple[Connection, BaseProcess]:
    fork = multiprocessing.get_context("fork")
    for _ in range(_FORKS):
        connection, other = fork.Pipe(duplex=False)
        process = fork.Process(target=_serve, args=(place, carry_out, other, stop, os.getpid()), daemon=True)
        # It receives signals only when it has decided what to do with them.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            other.close()
        if connection.poll(_START_TIMEOUT):  # where this process has other threads, one may have held a lock
            connection.recv()
            return connection, process
        process.kill()
        _end(process)
    raise RunFailed(
        f"processes for runs cannot start: {_FORKS} of them did nothing for {_START_TIMEOUT} s, because other "
        "threads of this process use PyTorch's random numbers or its output; end them, or use --jobs 1"
    )


def _received(connection: Connection, process: BaseProcess) -> News | BaseException | None:
    """The news of a run, or what ended it: None if it is finished."""
    try:
        found: News | BaseException | None = connection.recv()
    except (EOFError, OSError):
        process.join(_END_TIMEOUT)
        return RunFailed(f"its process died (exit code {process.exitcode}); continue with --resume")
    return found


def _end(process: BaseProcess) -> None:
    process.join(_END_TIMEOUT)
    process.kill()
    process.join()


def _serve(place: int, carry_out: CarryOut, connection: Connection, stop: Any, parent: int) -> None:
    # Ctrl-C and the end of a terminal reach every process; the parent decides when a run ends.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    keep_freed_memory()
    seeding.states()  # takes the lock of PyTorch's generator
    torch.set_num_threads(1)  # a forked process has no pool of threads
    sys.stdout.flush()
    sys.stderr.flush()

    def send(found: object) -> None:
        with contextlib.suppress(OSError):  # the parent has ended
            connection.send(found)

    def stop_asked() -> bool:
        return bool(stop.value) or os.getppid() != parent

    send("started")
    ended: BaseException | None = None
    try:
        if (problem := fork_problem()) is not None:
            raise RunFailed(problem)
        carry_out(place, Reporter(send, stop_asked))
    except (FedbnError, KeyboardInterrupt) as error:
        ended = error
    send(ended)
