"""Carries out all runs of an experiment, one after another or side by side, each by the loop of `run.loop`.

Side by side, each run has a worker process that is forked after the data are loaded, so that all share their memory. A
run in a process has no workers, and is the same bit for bit as a run whose clients are shared out among workers.
"""

from __future__ import annotations

import functools
import logging
import multiprocessing
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from ctypes import c_byte
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch
from flwr.serverapp import Grid

from fedbn_flwr.client.app import client_app
from fedbn_flwr.cores import cores
from fedbn_flwr.engines.local import LocalGrid
from fedbn_flwr.engines.network import poll_often
from fedbn_flwr.engines.pool import ForkPool, Pool
from fedbn_flwr.engines.worker import Worker
from fedbn_flwr.errors import (
    Diverged,
    FedbnError,
    RunFailed,
    SettingsError,
    StorageError,
    UserError,
    by_reason,
    few,
    forget_said,
    needs,
)
from fedbn_flwr.extensions import declared, part
from fedbn_flwr.messages.protocol import Config
from fedbn_flwr.results.folder.places import OF_RUN_CONFIG, from_here, options_as, out_folder
from fedbn_flwr.results.folder.writer import RunFolder
from fedbn_flwr.results.naming import names_in, only_here
from fedbn_flwr.results.read.runs import find_runs
from fedbn_flwr.results.report.rows import Row, choose, group
from fedbn_flwr.results.report.seen import decided, next_step, seen
from fedbn_flwr.results.report.write import report_on
from fedbn_flwr.results.text import shorten
from fedbn_flwr.trees import Tree

from ..data import examples_of
from ..file.layers import from_run_config
from ..listeners.progress import News, Progress, Reporter
from ..node import ClientMaker
from ..parts import Parts, choose_device
from ..prepare import check_rounds, prepare, workers_of
from ..settings import Experiment, Settings
from .loop import run_one
from .survey import FILE, Survey

CarryOut = Callable[[int, Reporter], None]


@dataclass(frozen=True)
class Outcome:
    report: str
    failures: Sequence[tuple[str, str]] = ()  # failed runs, each with its reason
    rows: Sequence[Row] = ()  # of the report
    hint: str = ""

    def announce(self, experiment: str = "") -> None:
        """Print what came out and, for the user of `fedbn run EXPERIMENT`, what comes next."""
        goes_on = experiment and self.rows and not self.failures
        after = seen(self.rows), decided(self.rows), next_step(self.rows, experiment) if goes_on else ""
        blocks = ("\n".join(filter(None, block)) for block in ((self.report, self.hint), after))
        print("", "\n\n".join(filter(None, blocks)), sep="\n", flush=True)
        check_failures(self.failures)


def check_failures(failures: Sequence[tuple[str, str]]) -> None:
    if failures:
        raise RunFailed(f"{len(failures)} of the runs failed:\n" + "\n".join(by_reason(failures)))


def run_folders(experiment: Experiment, out: Path) -> list[RunFolder]:
    return [RunFolder(out / name) for name in experiment.by_folder]


def is_begun(out: Path) -> bool:
    return any(out.glob("*/config.yaml"))  # of any run: those to resume may not have begun


def open_folders(experiment: Experiment, out: Path, *, resume: bool) -> list[RunFolder]:
    """The folder of each run. All are checked before the first run trains."""
    folders = run_folders(experiment, out)
    if resume and not is_begun(out):
        names = few((folder.path.name for folder in folders), 3)
        raise SettingsError(
            f"{str(out)!r} has no run to resume; expected one of the folders {names} in it; give the --out of the "
            "runs, or start them without resuming"
        )
    for run, folder in zip(experiment.runs, folders, strict=True):
        given, begun = run.model_dump(mode="json"), folder.config()
        if resume and begun and (lost := only_here(given) - names_in(begun)):
            raise SettingsError(
                f"{str(folder.path)!r} cannot be resumed: {min(lost).partition('@')[0]!r} was defined inside a "
                "function, and nothing tells whether it is still the same; define it at the top of a module or cell"
            )
        folder.check(given, resume=resume)
    there = (RunFolder(file.parent).config().get("name") for file in out.glob("*/config.yaml"))
    if (other := next(there, None)) not in (None, experiment.name):
        raise SettingsError(
            f"{str(out)!r} has runs of the experiment {other!r}, and these are of {experiment.name!r}; give another "
            "--out. `fedbn report DIR DIR` compares runs of several folders"
        )
    return folders


def run_experiment(
    experiment: Experiment,
    make_grid: Callable[[Parts], AbstractContextManager[Grid]],
    out: Path,
    *,
    resume: bool = False,
    jobs: int | None = 1,
    plain: bool = False,
    quiet: bool = False,
    own_data: bool = False,
) -> Outcome:
    """Carry out all runs, each on the grid of the context manager `make_grid(parts)`.

    They follow one another, or `jobs` of them run side by side (None: as many as suits them, see `jobs_of`).
    `own_data`: nodes may have data of their own.
    """
    forget_said()
    folders = open_folders(experiment, out, resume=resume)
    given = [run.model_dump(mode="json") for run in experiment.runs]
    ended = {place: folder.end(given[place]) for place, folder in enumerate(folders)} if resume else {}
    todo = [place for place in range(len(folders)) if not ended.get(place)]
    failed = {place: end.error or "" for place, end in ended.items() if end and end.status == "failed"}
    if failed and len(folders) == 1:
        raise Diverged(failed[0])
    jobs = jobs_of(experiment.runs, len(todo), jobs)
    rounds, clients = zip(*((run.rounds, run.training_clients) for run in experiment.runs), strict=True)
    with Progress([*experiment.by_folder], rounds, clients, plain=plain, quiet=quiet) as progress:
        progress.status("loading data")
        prepared = dict(zip(todo, prepare(experiment, todo, own_data=own_data), strict=True))
        checksums = {
            examples_of(item.run.source): item.dataset.checksum
            for item in prepared.values()
            if item.dataset is not None
        }
        for run, folder in zip(experiment.runs, folders, strict=True):  # finished runs too: a report averages all
            folder.check_data(checksums.get(examples_of(run.source)))
        for place, item in prepared.items():
            check_rounds(item, folders[place])
        gives_hint = not own_data and "hint" in declared("pools")  # Flower decides where its nodes train
        hint = part("pools", "hint")(prepared.values(), jobs) if gives_hint else ""
        together = f", {jobs} at a time" if jobs > 1 else ""
        progress.message(f"{len(folders)} {'runs' if len(folders) > 1 else 'run'}{together}, in {from_here(out)}")

        def run_at(place: int, listener: Reporter) -> None:
            folder = folders[place]
            item = prepared.pop(place)  # the dict must not keep the model of a finished run
            about = {
                "data_commit": item.dataset and item.dataset.commit,
                "data_checksum": item.dataset and item.dataset.checksum,
                "runs_at_the_same_time": jobs,
            }
            with make_grid(item) as grid, folder.locked():  # no folder is made if no Ray cluster answers
                # Another process may have begun this run while this one was loading data.
                folder.check(given[place], resume=resume)
                run_one(item, grid, folder, listener, folder.begin(given[place], about))

        progress.skip([place for place in range(len(folders)) if place not in todo], failed)
        if jobs > 1:
            failed |= side_by_side(todo, run_at, jobs, progress)
        else:
            failed |= one_after_another(todo, run_at, progress, is_single=len(folders) == 1)
        failures = [(folders[place].path.name, problem) for place, problem in sorted(failed.items())]
        progress.status("writing the report")
        try:
            every = group(find_runs([out]))
            surveys = [str(Survey.read(at.path)) for at in folders if (at.path / FILE).exists()]
            report = "\n\n".join([*surveys, report_on(every, out, whole=False)])
        except (UserError, StorageError) as error:
            check_failures(failures)  # no run wrote anything
            raise RunFailed(f"the runs are complete, but {error}; fedbn report {out} repeats the report") from None
    return Outcome(report, failures, rows=choose(every), hint=hint)


# --- several runs -------------------------------------------------------------


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
        with suppress(OSError):  # the parent has ended
            self.news.send((self.place, news))


def failed_because(problem: str) -> str:
    """The problem in one line, with the first of the clients' reasons; empty without a problem."""
    return problem and "failed: " + shorten(" ".join(line.strip(" -") for line in problem.splitlines()[:2]), 300)


# --- on which engine ----------------------------------------------------------


def carry_out(
    experiment: Experiment,
    out: Path,
    *,
    resume: bool,
    jobs: int | None = None,
    quiet: bool = False,
    node_config: Config | Sequence[Config] | None = None,
) -> Outcome:
    """Carry out all runs on the engine of the first one.

    `jobs` (see `run_experiment`) and `node_config` (see `LocalGrid`) are for the local engine.
    """
    name = experiment.runs[0].engine.name
    if is_ray := name == "ray":
        if jobs not in (None, 1):
            raise SettingsError(f"--jobs is {jobs}, which is for the local engine, but engine.name is 'ray'")
        jobs = 1
    with needs("run", f"engine.name={name!r}"):
        pools = part("engines", name)(experiment) if is_ray else nullcontext(local_pool)
    with pools as pool_of:

        def make_grid(parts: Parts) -> LocalGrid:
            return LocalGrid(
                client_app(ClientMaker(experiment)),
                parts.run.clients,
                pool=pool_of(parts),
                work=parts.work(),
                threads=parts.run.engine.threads,
                node_config=node_config,
            )

        own_data = node_config is not None
        return run_experiment(experiment, make_grid, out, resume=resume, jobs=jobs, quiet=quiet, own_data=own_data)


def local_pool(parts: Parts) -> Callable[..., Pool] | None:
    together = 1 if parts.run.engine.together == 1 else part("pools", "clients_at_once")(parts)
    if together > 1:
        return functools.partial(part("pools", "together"), most=together)
    return functools.partial(ForkPool, count=workers) if (workers := workers_of(parts.run)) else None


class OneLine(logging.Filter):
    """Replaces the traceback of a FedbnError by its message, unless FEDBN_DEBUG is set.

    Flower's next record, which calls the error an unhandled exception and refers to a web page, is left out.
    """

    has_failed = False

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, FedbnError) and not os.environ.get("FEDBN_DEBUG"):
            record.msg, record.args, record.exc_info = "%s", (str(error),), None
            self.has_failed = True
        return not (self.has_failed and record.getMessage().startswith("Exit Code: "))


def serve(grid: Grid, run_config: Tree) -> Outcome:
    """Carry out the experiment of a Flower run on the grid of its ServerApp."""
    experiment = from_run_config(run_config)
    counts = {run.clients for run in experiment.runs}
    if len(counts) > 1:
        raise SettingsError(f"the runs have {sorted(counts)} clients; under flwr run all must have the same number")
    grid = poll_often(grid)
    resume = bool(run_config.get("resume"))
    with options_as(*OF_RUN_CONFIG):
        out = out_folder(experiment.name, str(run_config.get("out") or ""), resume=resume)
        return run_experiment(
            experiment, lambda parts: nullcontext(grid), out, resume=resume, plain=True, own_data=True
        )
