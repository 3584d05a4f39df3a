"""Carries out runs one after another, or side by side, each in a worker process forked after the data are loaded.

Says how many runs and worker processes train at the same time.

The processes share the memory of the data. A run in a process has no workers, and is the same bit for bit as a run
whose clients are shared out among workers.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
from collections.abc import Callable, Sequence
from ctypes import c_byte
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait

import torch

from fedbn_flwr.cores import cores
from fedbn_flwr.engines.worker import NAME, Worker
from fedbn_flwr.errors import FedbnError, RunFailed, SettingsError, StorageError
from fedbn_flwr.results.text import shorten

from ..listeners.progress import News, Progress, Reporter
from ..parts import choose_device
from ..settings import Settings

CarryOut = Callable[[int, Reporter], None]


def jobs_of(runs: Sequence[Settings], unfinished: int, jobs: int | None) -> int:
    """How many runs train at the same time: `jobs`, or by default one per core if there are enough runs."""
    if jobs is not None and jobs < 1:
        raise SettingsError(f"--jobs is {jobs}; expected a number of runs at the same time, 1 or more")
    engines = [run.engine for run in runs]
    alone = any(engine.threads > 1 or choose_device(engine.device).type == "cuda" for engine in engines)
    if alone and jobs is not None and jobs > 1:
        raise SettingsError(f"--jobs is {jobs}, but a run trains on a GPU or has engine.threads above 1; leave it out")
    if jobs is None:  # with fewer runs than cores, the cores share out the clients of one run at a time
        shared = alone or unfinished < cores() or any(engine.workers != "auto" for engine in engines)
        jobs = 1 if shared else cores()
    return max(1, min(jobs, unfinished))


def workers_of(run: Settings) -> int:
    """The number of worker processes on this machine."""
    # A worker trains with one thread, and the process of one of several runs cannot have workers of its own.
    if run.engine.threads > 1 or multiprocessing.current_process().name == NAME:
        return 0
    on_gpu = choose_device(run.engine.device).type == "cuda"
    if run.engine.workers == "auto":
        return cores() if cores() > 1 and not on_gpu else 0
    if on_gpu and run.engine.workers:
        raise SettingsError(
            f"engine.workers is {run.engine.workers}, but processes of the local engine cannot use a GPU; give 0, or "
            "engine.name ray with gpus_per_client, for instance 0.25"
        )
    return run.engine.workers


# --- runs ---


def one_after_another(
    places: Sequence[int], carry_out: CarryOut, progress: Progress, *, is_single: bool
) -> dict[int, str]:
    """Carry out the runs at these places of the experiment in this process, and return the reason of each that failed.

    Divergence is a result too, so the remaining runs are still carried out. The error of a single run is raised.
    """
    problems: dict[int, str] = {}
    for place in places:
        if progress.stop_asked:
            raise KeyboardInterrupt
        try:
            carry_out(place, progress.begin(place))
        except (RunFailed, SettingsError, StorageError) as error:  # another process may write the folder
            if is_single:
                raise
            problems[place] = str(error)
        progress.end(place, failed_because(problems.get(place, "")))
    return problems


def side_by_side(places: Sequence[int], carry_out: CarryOut, jobs: int, progress: Progress) -> dict[int, str]:
    """Carry out the runs at these places of the experiment, and return the reason of each that failed.

    `carry_out(place, reporter)` is called in a process of its own. After Ctrl-C no run begins, and those that
    have begun end after their round.
    """
    todo, running = list(places), dict[int, Worker]()
    fork = multiprocessing.get_context("fork")
    stop = fork.RawValue("b", 0)  # without a lock, which a killed process would keep
    news, sent = fork.Pipe(duplex=False)  # for all runs: the system doesn't interleave messages this short
    problems: dict[int, str] = {}

    def end(place: int, error: BaseException | None, lost: str) -> None:
        running.pop(place).close()
        problem = f"{lost}; continue with --resume" if lost else str(error or "")
        progress.end(place, "stopped" if isinstance(error, KeyboardInterrupt) else failed_because(problem))
        if problem:
            problems[place] = problem

    try:
        while todo or running:
            if progress.stop_asked:
                stop.value = 1
                todo.clear()
            while todo and len(running) < jobs:
                place = todo.pop(0)
                running[place] = Worker(_Run(place, carry_out, sent, stop))
                progress.begin(place)
            for place, worker in running.items():
                worker.begin()
                if worker.problem:
                    raise RunFailed(worker.problem)
                if worker.is_free:
                    worker.send(functools.partial(end, place), "carry_out")
            ready = wait([news, *(worker.channel.fileno() for worker in running.values())], timeout=0.2)
            while news.poll():  # first, since the run that sent them may have ended
                progress.news(*news.recv())
            for worker in [worker for worker in running.values() if worker.channel.fileno() in ready]:
                worker.proceed()
    finally:
        for worker in running.values():
            worker.close()
    if progress.stop_asked:
        raise KeyboardInterrupt
    return problems


@dataclass(frozen=True)
class _Run:
    """A run that a worker carries out, once."""

    place: int
    call: CarryOut
    news: Connection
    stop: c_byte  # 1: stop

    def carry_out(self) -> BaseException | None:
        """Return the error that ended the run; None if it is finished."""
        torch.set_num_threads(1)  # the other cores are for the other runs
        try:
            self.call(self.place, Reporter(self._send, lambda: bool(self.stop.value)))
        except (FedbnError, KeyboardInterrupt) as error:
            return error
        return None

    def _send(self, news: News) -> None:
        with contextlib.suppress(OSError):  # the parent has ended
            self.news.send((self.place, news))


def failed_because(problem: str) -> str:
    """The problem in one line, with the first of the clients' reasons; empty without a problem."""
    return problem and "failed: " + shorten(" ".join(line.strip(" -") for line in problem.splitlines()[:2]), 300)
