"""Shows how far runs are, and stops them on Ctrl-C.

Each run that ends has a line. On a terminal, live lines below show all runs together and each one that trains.
Elsewhere, in a notebook too, a line says how far all runs are whenever nothing was printed for a minute.

Ctrl-C, SIGTERM and SIGHUP stop the runs after their current round, with a checkpoint, so that no work is lost. The
second one stops them immediately; a resumed run then repeats the rounds after the last checkpoint.
"""

from __future__ import annotations

import functools
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace

from rich.console import Console
from rich.progress import BarColumn, Task, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.table import Column

from fedbn_flwr.errors import LOG
from fedbn_flwr.results.text import duration
from fedbn_flwr.tasks import title_of
from fedbn_flwr.trees import Draft, Tree

from .evaluate import Choose, Evaluate, Unseen
from .listener import FinishedRound, Listener, Running

_SILENCE = 60.0  # seconds without a line
_TITLE, _BAR = 32, 10  # characters


@dataclass(frozen=True)
class News:
    """How far a run is."""

    round: int = 0  # finished
    here: int = 0  # rounds that this session finished
    words: str = "starting"  # then the last metrics


class Reporter(Listener):
    """Sends the news of a run, perhaps from another process, and stops the run if `stop_asked`."""

    after = (Evaluate, Unseen, Choose)

    def __init__(
        self, send: Callable[[News], None] = lambda news: None, stop_asked: Callable[[], bool] = lambda: False
    ) -> None:
        self.send = send
        self._stop_asked = stop_asked
        self._here, self._line = 0, Draft()

    def on_start(self, running: Running, finished: FinishedRound) -> None:
        self.send(News(finished.number))

    def on_round(self, running: Running, finished: FinishedRound) -> FinishedRound:
        self._here += 1
        self._line |= finished.line  # not every round is evaluated
        notes = running.prepared.rule.notes().values() if finished.is_last else ()
        remarks = [str(note["in_words"]) for note in notes if isinstance(note, Mapping) and "in_words" in note]
        metrics = metrics_in_words(self._line, running.prepared.task.main)
        words = "; ".join(filter(None, (metrics, *remarks, finished.stopped)))
        self.send(News(finished.number, self._here, words))
        return replace(finished, stop=KeyboardInterrupt() if self._stop_asked() else None)


class Progress:
    """The progress of an experiment's runs, by their places in it.

    `rounds` has the number of rounds of each, and `clients` how many clients train in a round, by which its time goes.
    """

    def __init__(
        self,
        labels: Sequence[str],
        rounds: Sequence[int],
        clients: Sequence[int] = (),
        *,
        plain: bool = False,
        quiet: bool = False,
    ) -> None:
        console = Console(highlight=False)
        self._draws = console.is_terminal and not (plain or quiet)
        self._quiet = quiet
        self._bars = Bars(
            TextColumn("{task.description}", markup=False, table_column=Column(max_width=_TITLE, no_wrap=True)),
            BarColumn(_BAR),
            TimeElapsedColumn(),
            TextColumn("{task.fields[text]}", markup=False, table_column=Column(ratio=1, no_wrap=True)),
            expand=True,  # in a narrow terminal the last column is cut first
            console=console,
            transient=True,
            refresh_per_second=4,
            disable=not self._draws,
            get_time=time.monotonic,
        )
        self._all = self._bars.add_task("all runs", text="")
        for place, label in enumerate(labels):
            about: Draft = {"clients": clients[place] if clients else 1, "news": News(), "text": ""}
            title = f"[{place + 1}/{len(labels)}] {label}"
            self._bars.add_task(title, start=False, total=rounds[place], visible=False, **about)
        self._began, self._printed = 0.0, time.monotonic()
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
        for log in LOG.handlers if self._draws else ():  # its lines are printed above the bars
            if isinstance(log, logging.StreamHandler):
                self._stack.callback(log.setStream, log.setStream(sys.stderr))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _interrupt(self, number: int, frame: object) -> None:
        at_once = self.stop_asked or not self._began
        self.stop_asked = True  # compiled code can swallow the exception (pydantic does): the run then ends by this
        if at_once:
            raise KeyboardInterrupt
        with suppress(OSError):  # SIGHUP: the terminal is gone
            print("\nstopping after this round; Ctrl-C again stops at once", file=sys.stderr, flush=True)

    # --- what happens, in the order of an experiment ---

    def status(self, text: str) -> None:
        """Say what happens before the first run or after the last one, where the text can be drawn over."""
        self._bars.update(self._all, text=text, refresh=True)

    def skip(self, places: Collection[int], diverged: Collection[int]) -> None:
        """Leave out runs that have ended before, some of which diverged."""
        if finished := len(places) - len(diverged):
            self.message(f"{finished} of {len(self._bars.tasks) - 1} runs are finished already")
        for place in sorted(places):
            self._bars.update(self._task(place).id, total=0)
            if place in diverged:
                self._say(place, "diverged before and would again; delete its folder to repeat it")

    def begin(self, place: int) -> Reporter:
        """Show that a run begins; its news may come from another process."""
        self._began = self._began or time.monotonic()
        self._bars.start_task(self._task(place).id)
        self._bars.update(self._task(place).id, visible=True)
        self.news(place, News())
        return Reporter(functools.partial(self.news, place), lambda: self.stop_asked)

    def news(self, place: int, news: News) -> None:
        task = self._task(place)
        self._bars.update(task.id, completed=news.round, news=news, text=f"{news.round}/{task.total:g}  {news.words}")
        runs = [(run.fields["clients"], run.fields["news"].here, run.remaining or 0) for run in self._bars.tasks[1:]]
        made, left = (sum(run[0] * run[column] for run in runs) for column in (1, 2))
        seconds = (time.monotonic() - self._began) * left / max(made, 1)
        text = f"{100 * made / max(made + left, 1):.0f} %"
        text += f", about {duration(seconds)} left" if 20 * made > left > 0 else ""
        self._bars.update(self._all, completed=made, total=made + left, text=text)
        if left and not self._draws and time.monotonic() - self._printed > _SILENCE:
            self.message(f"all runs: {text}")

    def end(self, place: int, problem: str = "") -> None:
        """Show that a run is finished, or why it ended."""
        task, news = self._task(place), self._task(place).fields["news"]
        rounds = f"{news.round} round{'s' * (news.round != 1)}"
        part = f", the last {news.here}" if news.here < news.round else ""
        took = f"{rounds}{part} in {duration(task.elapsed or 0.0)}  {news.words}".rstrip()
        self._say(place, problem or took)
        self._bars.update(task.id, total=task.completed, visible=False)

    def message(self, text: str) -> None:
        self._printed = time.monotonic()
        if self._draws:
            self._bars.console.print(text, markup=False, soft_wrap=True)
        elif not self._quiet:
            try:
                print(text, file=sys.stdout, flush=True)  # rich would wrap it at 80 columns without a terminal
            except BrokenPipeError:  # its reader has ended, for instance `| head`; the run continues
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                self._quiet = True

    def _say(self, place: int, text: str) -> None:
        self.message(f"{self._task(place).description}: {text}")

    def _task(self, place: int) -> Task:
        return self._bars.tasks[1 + place]


def metrics_in_words(line: Tree, main: str) -> str:
    """The main metric and the training loss of a round, from its line in the history."""
    keys = [key for key in dict.fromkeys((main, "train_loss")) if isinstance(line.get(key), float)]
    return "  ".join(f"{title_of(key)} {line[key]:.4f}" for key in keys)
