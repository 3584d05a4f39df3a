"""Shows the progress of runs, within a round too, and stops them on Ctrl-C.

On a terminal: a bar of all rounds, and one of each run with what it does. Elsewhere, in a notebook too: a line at most
every five seconds.

Ctrl-C, SIGTERM and SIGHUP stop the runs after their current round, with a checkpoint, so that no work is lost. The
second one stops them immediately; a resumed run then repeats the rounds after the last checkpoint.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.table import Column

from fedbn_flwr.tasks import title_of
from fedbn_flwr.text import duration
from fedbn_flwr.trees import Tree

from .listener import FinishedRound, Listener, Running

_LINES, _DRAWN = 5.0, 0.2  # seconds between lines, and between reports of a run
_BAR = 12  # characters


@dataclass(frozen=True)
class News:
    """What a run reports: the rounds that are finished, or an event."""

    round: int = 0
    metrics: str = ""  # of that round
    within: str = ""  # how far the next round is
    event: str = ""  # to be shown as a line


class Reporter(Listener):
    """Sends the news of a run, perhaps from another process, and stops the run if `stop_asked`."""

    def __init__(
        self, send: Callable[[News], None] = lambda news: None, stop_asked: Callable[[], bool] = lambda: False
    ) -> None:
        self.send = send
        self._stop_asked = stop_asked
        self._latest = News()
        self._sent = 0.0

    def on_start(self, running: Running, finished: FinishedRound) -> None:
        self._latest = News(finished.number)
        self.message(
            in_rounds(running.run.rounds) + (f", continuing after round {finished.number}" if finished.number else "")
        )

    def report(self, what: str, done: int, total: int) -> None:
        """Report how far the current round is."""
        if time.monotonic() - self._sent > _DRAWN:
            self._sent = time.monotonic()
            self.send(replace(self._latest, within=f"{what}: {done} of {total}"))

    def on_round(self, running: Running, finished: FinishedRound) -> FinishedRound:
        self._latest = News(finished.number, metrics_in_words(finished.line, running.prepared.task.main))
        self.send(self._latest)
        for note in running.prepared.rule.notes().values() if finished.is_last else ():
            if isinstance(note, Mapping) and "in_words" in note:
                self.message(note["in_words"])
        if finished.stopped:
            self.message(finished.stopped)
        return replace(finished, stop=KeyboardInterrupt() if self._stop_asked() else None)

    def message(self, text: str) -> None:
        self.send(replace(self._latest, event=text))


class Progress:
    """The progress of an experiment's runs, by their places in it; `rounds` has the number of rounds of each."""

    def __init__(
        self,
        labels: Sequence[str],
        rounds: Sequence[int],
        *,
        plain: bool = False,
        quiet: bool = False,
    ) -> None:
        console = Console(highlight=False)
        self._draws = console.is_terminal and not (plain or quiet)
        self._quiet = quiet
        self._labels, self._rounds = labels, rounds
        self._bars = Bars(
            TextColumn("{task.description}", markup=False),
            BarColumn(_BAR),
            TextColumn("{task.completed:g}/{task.total:g}"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[text]}", markup=False, table_column=Column(ratio=1, no_wrap=True)),
            expand=True,  # in a narrow terminal the last column is cut, not the others
            console=console,
            transient=True,
            refresh_per_second=4,
            disable=not self._draws,
            get_time=time.monotonic,
            speed_estimate_period=math.inf,
        )
        self._all = self._bars.add_task("all runs", total=sum(rounds), text="")
        self._tasks: dict[int, TaskID] = {}  # of the runs that have begun, by place
        self._printed = time.monotonic()
        self._stack = ExitStack()
        self.stop_asked = False

    def __enter__(self) -> Progress:
        # Python's own handler raises at any point of the program, and an exception in a destructor is only printed.
        # Under Flower this is not the main thread. A shell's background job ignores Ctrl-C, and must continue to;
        # Flower sets its own handlers of the other signals, and nohup ignores SIGHUP.
        signals = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
        for number in signals if threading.current_thread() is threading.main_thread() else ():
            if (before := signal.getsignal(number)) is signal.SIG_DFL or before is signal.default_int_handler:
                self._stack.callback(signal.signal, number, signal.signal(number, self._interrupt))
        self._stack.enter_context(self._bars)
        for log in logging.getLogger("flwr").handlers if self._draws else ():  # its lines are printed above the bars
            if isinstance(log, logging.StreamHandler):
                self._stack.callback(log.setStream, log.setStream(sys.stderr))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _interrupt(self, number: int, frame: object) -> None:
        at_once = self.stop_asked or not self._tasks
        self.stop_asked = True  # compiled code can swallow the exception (pydantic does): the run then ends by this
        if at_once:
            raise KeyboardInterrupt
        with suppress(OSError):  # SIGHUP: the terminal is gone
            print("\nstopping after this round; Ctrl-C again stops at once", file=sys.stderr, flush=True)

    # --- what happens, in the order of an experiment ---

    def status(self, text: str) -> None:
        """Say what happens before the first run or after the last one, where the text can be drawn over."""
        self._bars.update(self._all, text=text, refresh=True)

    def skip(self, places: Sequence[int], diverged: Collection[int]) -> None:
        """Count runs that have ended before, some of which diverged."""
        self._bars.update(self._all, advance=sum(self._rounds[place] for place in places))
        if finished := len(places) - len(diverged):
            self.message(f"{finished} of {len(self._labels)} runs are finished already")
        for place in sorted(diverged):
            self.message(f"{self._labels[place]} diverged before and would again; delete its folder to repeat it")

    def begin(self, place: int) -> Reporter:
        """Show that a run begins; its news may come from another process."""
        title, total = f"[{place + 1}/{len(self._labels)}] {self._labels[place]}", self._rounds[place]
        self._tasks[place] = self._bars.add_task(title, total=total, text="starting", metrics="")
        self.status("")
        return Reporter(functools.partial(self.news, place), lambda: self.stop_asked)

    def news(self, place: int, news: News) -> None:
        task, now = self._bars.tasks[self._tasks[place]], time.monotonic()
        self._bars.update(self._all, advance=news.round - task.completed)
        self._bars.update(task.id, completed=news.round, text=news.within or news.metrics, metrics=news.metrics)
        if news.event:
            self.message(f"{task.description}: {news.event}")
        elif not self._draws and now - self._printed >= _LINES:
            self._printed = now
            left = self._bars.tasks[self._all].time_remaining
            text = f"round {news.round + bool(news.within)}/{task.total:g}  {news.within or news.metrics}"
            self.message(f"{task.description}: {text}" + (f"  about {duration(left)} left" if left else ""))

    def end(self, place: int, problem: str = "") -> None:
        """Show that a run is finished, or why it ended."""
        task = self._bars.tasks[self._tasks[place]]
        took = f"{in_rounds(int(task.completed))} in {duration(task.elapsed or 0.0)}  {task.fields['metrics']}".rstrip()
        self.message(f"{task.description}: {problem or took}")
        self._bars.update(self._all, advance=task.remaining)
        self._bars.update(task.id, visible=False)

    def message(self, text: str) -> None:
        if self._draws:
            self._bars.console.print(text, markup=False, soft_wrap=True)
        elif not self._quiet:
            try:
                print(text, file=sys.stdout, flush=True)  # rich would wrap it at 80 columns without a terminal
            except BrokenPipeError:  # its reader has ended, for instance `| head`; the run continues
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                self._quiet = True


def in_rounds(rounds: int) -> str:
    return f"{rounds} round" if rounds == 1 else f"{rounds} rounds"


def metrics_in_words(line: Tree, main: str) -> str:
    """The main metric and the losses of a round, from its line in the history."""
    keys = [key for key in dict.fromkeys((main, "loss", "train_loss")) if isinstance(line.get(key), float)]
    return "  ".join(f"{title_of(key)} {line[key]:.4f}" for key in keys)
