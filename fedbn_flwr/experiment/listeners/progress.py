"""Shows the progress of runs, within a round too, and stops them on Ctrl-C.

On a terminal and in a notebook: how many runs have ended and the time left, and a bar of each run's rounds with how far
its current round is. Elsewhere: a line after rounds, at most every two seconds, and within a long round every ten.

The first Ctrl-C stops the runs after their current round, so that no work is lost. The second one, SIGTERM and
SIGHUP stop them immediately; a resumed run then repeats the rounds after the last checkpoint.
"""

from __future__ import annotations

import itertools
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from flwr.app import Message, MessageType
from flwr.serverapp import Grid
from rich.console import Console
from rich.live import Live
from rich.text import Text

from fedbn_flwr.engines.base import GridAround
from fedbn_flwr.messages import protocol
from fedbn_flwr.results.text import duration
from fedbn_flwr.tasks import title_of

from .listener import Listener, Round, Running

_AFTER_ROUND, _WITHIN_ROUND, _DRAWN = 2.0, 10.0, 0.2  # seconds between lines, and between two views of a notebook
_BAR = 12  # characters


@dataclass(frozen=True)
class News:
    """What a run reports: the rounds that are finished, or an event."""

    round: int = 0
    figures: str = ""  # of that round
    within: str = ""  # how far the next round is
    message: str = ""  # an event, to be shown as a line; the first one, that it begins


class Reporter(Listener):
    """Sends the news of a run, which may be in another process, and stops it if `stop_asked`."""

    def __init__(
        self, send: Callable[[News], None] = lambda news: None, stop_asked: Callable[[], bool] = lambda: False
    ) -> None:
        self._send_news = send
        self._stop_asked = stop_asked
        self._latest = News()
        self._sent = 0.0

    def on_start(self, running: Running, at: Round) -> Round:
        self._latest = News(at.number, within="starting")
        self.message(counted(running.run.rounds) + (f", continuing after round {at.number}" if at.number else ""))
        return at

    def stops_after(self, at: Round) -> bool:
        """Whether the user asked to stop after this round."""
        return self._stop_asked()

    def report(self, what: str, done: int, total: int) -> None:
        """How far the current round is."""
        if time.monotonic() - self._sent > _DRAWN:
            self._send(replace(self._latest, within=f"{what}: {done} of {total}"))

    def on_round(self, running: Running, at: Round) -> Round:
        self._send(News(at.number, figures_of(at.line, running.prepared.task.main)))
        for note in running.prepared.rule.notes().values() if at.is_last else ():
            if isinstance(note, Mapping) and "in_words" in note:
                self.message(note["in_words"])
        return replace(at, stop=self.stops_after(at))

    def message(self, text: str) -> None:
        self._send_news(replace(self._latest, message=text))

    def _send(self, news: News) -> None:
        self._latest, self._sent = news, time.monotonic()
        self._send_news(news)


_COUNTED = {
    MessageType.TRAIN: "clients trained",
    MessageType.EVALUATE: "clients evaluated",
    protocol.PARTITION_QUERY: "clients ready",
    protocol.STATISTICS_QUERY: "clients' statistics",
}


class WatchedGrid(GridAround):
    """A grid that reports each reply when it arrives, and what strategies report."""

    def __init__(self, inner: Grid, watcher: Callable[[str, int, int], None]) -> None:
        super().__init__(inner)
        self._watcher = watcher  # gets what is counted, how many are done, and of how many

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        messages = list(messages)
        if messages and (what := _COUNTED.get(messages[0].metadata.message_type)):
            done = itertools.count(1)
            self.report(what, 0, len(messages))
            self.observe(lambda _: self.report(what, next(done), len(messages)))
        return self.inner.send_and_receive(messages, timeout=timeout)

    def report(self, what: str, done: int, total: int) -> None:
        self._watcher(what, done, total)


@dataclass
class _Running:
    began: float
    last_round: float  # when it ended
    news: News = News()  # the latest; it is frozen


class Progress:
    """The progress of an experiment's runs; `rounds` has the number of rounds of each.

    The time left is estimated as if the rounds of all runs took as long as those of this session did on average.
    """

    def __init__(
        self,
        labels: Sequence[str],
        rounds: Sequence[int],
        *,
        plain: bool = False,
        quiet: bool = False,
    ) -> None:
        self.console = Console(highlight=False)
        self._draws = (self.console.is_terminal or self.console.is_jupyter) and not (quiet or plain)
        self._quiet = quiet
        self._labels, self._rounds = labels, rounds
        self._running: dict[int, _Running] = {}  # by place
        self._left_over = dict(enumerate(rounds))  # the rounds that are left of the runs that have not ended, by place
        self._counted = 0  # rounds of this session
        self._within = ""  # the activity between runs
        self._began = self._printed = self._last_round = time.monotonic()
        self._training_began: float | None = None
        self._show: Callable[[], object] = lambda: None  # draws now, on a terminal or in a notebook
        self._stack = ExitStack()
        self.stop_asked = False

    def __enter__(self) -> Progress:
        # Python's own handler raises at any point of the program, and an exception in a destructor is only printed.
        # Under Flower this is not the main thread. A shell's background job ignores Ctrl-C, and must continue to;
        # Flower sets its own handlers of the other signals, and nohup ignores SIGHUP.
        at_once = signal.default_int_handler  # who sent SIGTERM may not wait, or has sent it to the workers too
        handlers = {signal.SIGINT: self._interrupt, signal.SIGTERM: at_once, signal.SIGHUP: at_once}
        for number, handler in handlers.items() if threading.current_thread() is threading.main_thread() else ():
            if (before := signal.getsignal(number)) is signal.SIG_DFL or before is signal.default_int_handler:
                self._stack.callback(signal.signal, number, signal.signal(number, handler))
        if self._draws and self.console.is_jupyter:
            from IPython.display import display

            # Not rich's own display, which needs ipywidgets and is lost when a notebook is saved.
            cell = display(self.render(), display_id=True)
            self._show = lambda: cell.update(self.render())
        elif self._draws:
            live = Live(get_renderable=self.render, console=self.console, refresh_per_second=4, transient=True)
            live.start()
            self._show = live.refresh
            self._stack.callback(live.stop)
            for log in logging.getLogger("flwr").handlers:  # log lines are then printed above the bars
                if isinstance(log, logging.StreamHandler):
                    self._stack.callback(log.setStream, log.setStream(sys.stderr))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._running, self._within = {}, "finished" if error is None else "stopped"
        self._show()
        self._stack.close()

    def _interrupt(self, number: int, frame: Any) -> None:
        if self.stop_asked or self._training_began is None:
            raise KeyboardInterrupt
        self.stop_asked = True
        print("\nstopping after this round; Ctrl-C again stops at once", file=sys.stderr, flush=True)

    # --- what happens, in the order of an experiment ---

    def status(self, text: str) -> None:
        """What happens before the first run or after the last one; shown only where it can be drawn over."""
        self._within = f"{text} ..."
        self._show()

    def skip(self, places: Sequence[int]) -> None:
        """These runs are finished already."""
        for place in places:
            del self._left_over[place]
        if places:
            self.message(f"{len(places)} of {len(self._labels)} runs are finished already")

    def begin(self, place: int) -> Reporter:
        """A run begins in this process, unless its news come from another one."""
        now = time.monotonic()
        self._training_began = self._training_began or now  # from now on, Ctrl-C lets rounds finish
        self._running[place], self._printed = _Running(now, now), now
        return Reporter(lambda news: self.news(place, news), lambda: self.stop_asked)

    def news(self, place: int, news: News) -> None:
        run, now, rounds = self._running[place], time.monotonic(), self._rounds[place]
        before, run.news = run.news.round, replace(news, message="")
        self._left_over[place] = rounds - news.round
        if news.message:
            self._say_of(place, news.message)
            self._show()
            return
        if news.round > before:
            self._counted += 1
            self._last_round = run.last_round = now
        between = _DRAWN if self._draws else _WITHIN_ROUND if news.within else _AFTER_ROUND
        if now - self._printed < between:
            return
        self._printed = now
        if self._draws:
            self._show()
        elif news.within:
            passed = duration(now - run.last_round)
            self._say_of(place, f"round {news.round + 1}/{rounds}  {news.within} after {passed}")
        else:
            self._say_of(place, f"round {news.round}/{rounds}  {news.figures}{self._left()}")

    def end(self, place: int, problem: str = "") -> None:
        """A run is finished, or has ended for this reason."""
        run = self._running[place]
        took = f"{counted(run.news.round)} in {duration(time.monotonic() - run.began)}  {run.news.figures}".rstrip()
        self._say_of(place, problem or took)
        del self._running[place], self._left_over[place]
        self._show()

    def message(self, text: str) -> None:
        if self._draws and self.console.is_terminal:
            self.console.print(text, markup=False, soft_wrap=True)
        elif not self._quiet:
            try:
                print(text, file=sys.stdout, flush=True)  # rich would wrap it at 80 columns without a terminal
            except BrokenPipeError:  # its reader has ended, for instance `| head`; the run continues
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                self._quiet = True

    # --- output ---

    def _title(self, place: int) -> str:
        return f"[{place + 1}/{len(self._labels)}] {self._labels[place]}"

    def _say_of(self, place: int, text: str) -> None:
        self.message(f"{self._title(place)}: {text}")

    def _left(self) -> str:
        """The time to the end of all runs; empty before the first round of this session."""
        if not self._counted or self._training_began is None:
            return ""
        each = (self._last_round - self._training_began) / self._counted
        left = each * sum(self._left_over.values()) - (time.monotonic() - self._last_round)
        return f"  about {duration(max(0.0, left))} left"

    def render(self) -> Text:
        """How far all runs are, and a bar of each that is running."""
        passed = duration(time.monotonic() - self._began)
        ended = f"{len(self._labels) - len(self._left_over)} of {len(self._labels)} runs ended"
        lines = [f"{ended}  {passed}{self._left()}" if self._running else f"{self._within}  {passed}"]
        for place, run in sorted(self._running.items()):
            news, total = run.news, self._rounds[place]
            bar = "━" * (_BAR * news.round // total)
            lines.append(f"{self._title(place)} {bar:─<{_BAR}} {news.round}/{total}  {news.within or news.figures}")
        return Text("\n".join(lines), no_wrap=True, overflow="ellipsis")


def counted(rounds: int) -> str:
    return f"{rounds} round" if rounds == 1 else f"{rounds} rounds"


def figures_of(line: Mapping[str, Any], main: str) -> str:
    """The main figure and the losses of a round, from its line in the history."""
    keys = [key for key in dict.fromkeys((main, "loss", "train_loss")) if isinstance(line.get(key), float)]
    return "  ".join(f"{title_of(key)} {line[key]:.4f}" for key in keys)
