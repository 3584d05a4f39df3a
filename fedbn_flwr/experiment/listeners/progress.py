"""Shows the progress of runs and stops them on Ctrl-C.

On a terminal and in a notebook: a bar of the current run's rounds, with the time passed and left, and below it how far
the current round is; of runs side by side, a line for each. Elsewhere: a line after rounds, at most every two seconds,
and within a long round every ten.

The first Ctrl-C stops the runs after their current round, so that no work is lost. The second one, SIGTERM and
SIGHUP stop them immediately; a resumed run then repeats the rounds after the last checkpoint.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.jupyter import JupyterMixin
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fedbn_flwr.experiment.logs import is_json, working_at, write_json

from .base import Listener, RunState

_BETWEEN_LINES = 2.0  # seconds, after rounds
_BETWEEN_LINES_OF_ALL = 10.0  # of runs side by side
_WITHIN_ROUND = 10.0  # seconds, between lines of one round
_BAR = 30  # characters


@dataclass(frozen=True)
class News:
    """What a run reports: the rounds that are finished, or an event."""

    round: int = 0
    figures: str = ""  # of that round
    within: str = ""  # how far the next round is
    message: str = ""  # an event, to be shown as a line
    is_last: bool = False


class Reporter(Listener):
    """Sends the news of a run, which may be in another process, and stops it if `stop_asked`."""

    def __init__(
        self, send: Callable[[News], None] = lambda news: None, stop_asked: Callable[[], bool] = lambda: False
    ) -> None:
        self._send_news = send
        self._stop_asked = stop_asked
        self._latest = News()
        self._sent = 0.0

    def on_start(self, state: RunState) -> None:
        self._send(News(state.round, within="starting"))

    def report(self, what: str, done: int, total: int) -> None:
        """How far the current round is."""
        if time.monotonic() - self._sent > 0.2:
            self._send(replace(self._latest, within=f"{what}: {done} of {total}"))

    def on_round(self, state: RunState) -> None:
        state.stop = self._stop_asked()
        self._send(News(state.round, figures_of(state.line), is_last=state.is_last))
        for note in state.prepared.rule.notes().values() if state.is_last else ():
            if isinstance(note, Mapping) and "in_words" in note:
                self.message(note["in_words"])

    def message(self, text: str) -> None:
        self._send_news(replace(self._latest, message=text))

    def _send(self, news: News) -> None:
        self._latest, self._sent = news, time.monotonic()
        self._send_news(news)


@dataclass
class _Running:
    began: float
    news: News = field(default_factory=News)
    is_known: bool = False  # it has reported the round that it begins with
    last_round: float = 0.0  # when it ended


class Progress:
    """The progress of an experiment's runs; `rounds` has the number of rounds of each.

    `examples` has the number of examples that each run trains on: the time that is left is estimated from it.
    """

    def __init__(
        self,
        labels: Sequence[str],
        rounds: Sequence[int],
        examples: Sequence[int | None] = (),
        *,
        several: bool = False,  # at the same time
        plain: bool | None = None,
        quiet: bool = False,
    ) -> None:
        self.console = Console(highlight=False)
        draws = (self.console.is_terminal or self.console.is_jupyter) and not is_json()
        self._draws = not quiet and (draws if plain is None else not plain)
        self._quiet = quiet
        self._several = several
        self._labels, self._rounds = labels, rounds
        # The work of a round of each run, in examples or, if those of a run are not known, in rounds.
        work = [count / of for count, of in zip(examples, rounds, strict=False) if count]
        self._work = work if len(work) == len(rounds) else [1.0] * len(rounds)
        self._running: dict[int, _Running] = {}  # by place
        self._ended = 0
        self._within = ""  # the activity between runs
        self._done = self._counted = 0.0  # the work of all runs, and without that of earlier sessions
        self._began = self._printed = self._last_round = time.monotonic()
        self._training_began: float | None = None
        self._live: Live | None = None  # on a terminal
        self._cell: Any = None  # in a notebook: the display
        self.stop_asked = False
        self._handlers: dict[signal.Signals, Any] = {}  # the previous ones
        self._streams: list[tuple[logging.StreamHandler[Any], Any]] = []  # log handlers with their previous streams

    def __enter__(self) -> Progress:
        # Python's own handler raises at any point of the program, and an exception in a destructor is only printed.
        # Under Flower this is not the main thread. A shell's background job ignores Ctrl-C, and must continue to.
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            self._handlers[signal.SIGINT] = signal.signal(signal.SIGINT, self._interrupt)
        for number in (signal.SIGTERM, signal.SIGHUP):  # Flower sets its own handlers; nohup ignores SIGHUP
            if in_main and signal.getsignal(number) is signal.SIG_DFL:
                self._handlers[number] = signal.signal(number, self._terminate)
        if self._draws and self.console.is_jupyter:
            from IPython.display import display

            # Not rich's own display, which needs ipywidgets and is lost when a notebook is saved.
            self._cell = display(_View(self), display_id=True)
        elif self._draws:
            self._live = Live(_View(self), console=self.console, refresh_per_second=4, transient=True)
            self._live.start()
            for handler in logging.getLogger("flwr").handlers:  # log lines are then printed above the bar
                if isinstance(handler, logging.StreamHandler):
                    self._streams.append((handler, handler.setStream(sys.stderr)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handler, stream in self._streams:
            handler.setStream(stream)
        if self._live is not None:
            self._live.stop()
            self._live = None
        self._running, self._within = {}, "finished" if error is None else "stopped"
        self._show()
        for number, previous in self._handlers.items():
            signal.signal(number, previous)

    def _interrupt(self, number: int, frame: Any) -> None:
        if self.stop_asked or self._training_began is None:
            raise KeyboardInterrupt
        self.stop_asked = True
        print("\nstopping after this round; Ctrl-C again stops at once", file=sys.stderr, flush=True)

    def _terminate(self, number: int, frame: Any) -> None:
        """Stop immediately: the sender may not wait, and may have sent SIGTERM to the worker processes too."""
        raise KeyboardInterrupt

    # --- what happens, in the order of an experiment ---

    def status(self, text: str) -> None:
        """What happens before the first run or after the last one; shown only where it can be drawn over."""
        self._within = f"{text} ..."
        self._show()

    def skip(self, places: Sequence[int]) -> None:
        """These runs are finished already."""
        self._ended += len(places)
        self._done += sum(self._rounds[place] * self._work[place] for place in places)
        if places:
            self.message(f"{len(places)} of {len(self._labels)} runs are finished already")

    def begin(self, place: int) -> Reporter:
        """A run begins in this process, unless its news come from another one."""
        now = time.monotonic()
        self._training_began = self._training_began or now  # from now on, Ctrl-C lets rounds finish
        self._running[place] = _Running(now, last_round=now)
        return Reporter(lambda news: self.news(place, news), lambda: self.stop_asked)

    def news(self, place: int, news: News) -> None:
        run, now = self._running[place], time.monotonic()
        if news.message:
            self._say_of(place, news.message)
            return
        more = news.round - run.news.round
        if more > 0:
            self._done += more * self._work[place]
        if more > 0 and run.is_known:
            self._counted += more * self._work[place]
            self._last_round = run.last_round = now
        elif not run.is_known and not self._draws and not self._several:
            continued = f", continuing after round {news.round}" if news.round else ""
            self._say_of(place, f"{self._rounds[place]} rounds{continued}")
        run.news, run.is_known = news, True
        self._update(place, now)

    def end(self, place: int, problem: str = "") -> None:
        """A run is finished, or has ended for this reason."""
        run = self._running.pop(place)
        self._ended += 1
        self._done += (self._rounds[place] - run.news.round) * self._work[place]
        if problem or self._draws or self._several:  # else its last round has a line
            took = f"{run.news.round} rounds in {duration(time.monotonic() - run.began)}  {run.news.figures}".rstrip()
            self._say_of(place, problem or took, run.news.round)
        self._show()

    def message(self, text: str) -> None:
        if self._live is not None:
            self.console.print(text, markup=False, soft_wrap=True)
        else:
            self._say(text)

    # --- output ---

    def _title(self, place: int) -> str:
        return f"[{place + 1}/{len(self._labels)}] {self._labels[place]}"

    def _say_of(self, place: int, text: str, number: int | None = None) -> None:
        """A line about one run; other lines are about all of them."""
        working_at(run=self._labels[place], round=self._running[place].news.round if number is None else number)
        self.message(f"{self._title(place)}: {text}")
        if self._several:
            working_at(run="", round=0)

    def _update(self, place: int, now: float) -> None:
        """Show what is new, at most a few times a second or, in lines, every few seconds."""
        run, rounds = self._running[place], self._rounds[place]
        between = _BETWEEN_LINES_OF_ALL if self._several else _WITHIN_ROUND if run.news.within else _BETWEEN_LINES
        ends = run.news.is_last and not self._several
        starts = run.news.within == "starting" and self._draws
        if not (starts or ends) and now - self._printed < (0.2 if self._draws else between):
            return
        self._printed = now
        self._show()
        if self._draws or run.news.within == "starting":
            return
        if self._several:
            counts = (
                f"{self._labels[each]} {self._running[each].news.round}/{self._rounds[each]}" for each in self._now()
            )
            self._say(f"{self._counts()}; rounds: {', '.join(counts)}")
        elif run.news.within:
            passed = duration(now - run.last_round)
            self._say_of(place, f"round {run.news.round + 1}/{rounds}  {run.news.within} after {passed}")
        else:
            ending = "" if ends else f"  about {duration(self._left(now))} left"
            self._say_of(place, f"round {run.news.round}/{rounds}  {run.news.figures}{ending}")

    def _left(self, now: float) -> float:
        """Seconds to the end of all runs, if all examples take as long as those of this session did on average."""
        assert self._training_began is not None
        each = (self._last_round - self._training_began) / self._counted
        total = sum(rounds * work for rounds, work in zip(self._rounds, self._work, strict=True))
        return max(0.0, each * (total - self._done) - (now - self._last_round))

    def _now(self) -> list[int]:
        return sorted(self._running)

    def _counts(self) -> str:
        left = f", about {duration(self._left(time.monotonic()))} left" if self._counted else ""
        return f"{self._ended} of {len(self._labels)} runs ended, {len(self._running)} running{left}"

    def render(self, width: int) -> Group:
        """A bar of each run, and how far its current round is."""
        now = time.monotonic()
        passed = clock(now - self._began)
        if not self._running:
            return Group(Text(f"{self._within}  {passed}"))
        grid = Table.grid(padding=(0, 1, 0, 0))
        left = f"  about {duration(self._left(now))} left" if self._counted else ""
        for place, run in sorted(self._running.items()):
            news, total = run.news, self._rounds[place]
            counts = f"{news.round}/{total}  {news.within or news.figures}"
            bar = 12
            if not self._several:
                counts = f" {news.round}/{total}  {passed}{left}"
                bar = min(_BAR, max(4, width - len(self._title(place)) - len(counts) - 2))
            grid.add_row(
                Text(self._title(place), overflow="ellipsis", no_wrap=True),
                ProgressBar(total=total, completed=news.round, width=bar),
                Text(counts, overflow="ellipsis", no_wrap=True),
            )
        if self._several:
            return Group(Text(f"{self._counts()}  {passed}", no_wrap=True, overflow="ellipsis"), grid)
        parts = [f"round {news.round + 1}, {news.within}"] if news.within else []
        parts += [f"after round {news.round}: {news.figures}"] if news.figures else []
        return Group(grid, Text("  " + "  |  ".join(parts), no_wrap=True, overflow="ellipsis"))

    def _show(self) -> None:
        """Draw now; on a terminal rich also does that four times a second, in a notebook nothing else does."""
        if self._live is not None:
            self._live.refresh()
        if self._cell is not None:
            self._cell.update(_View(self))

    def _say(self, text: str) -> None:
        if self._quiet:
            return
        try:
            if is_json():
                write_json("INFO", text)
            else:  # not with rich, which wraps lines at 80 columns if there is no terminal
                print(text, file=sys.stdout, flush=True)
        except BrokenPipeError:  # its reader has ended, for instance `| head`; the run continues
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            self._quiet = True


class _View(JupyterMixin):
    """What rich draws, always the current state."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def __rich_console__(self, console: Console, options: Any) -> Any:
        yield self._progress.render(options.max_width)


def figures_of(line: Mapping[str, Any]) -> str:
    """Accuracy and losses of a round, from its line in the history."""
    names = (("accuracy", "accuracy"), ("loss", "loss"), ("train_loss", "train loss"))
    return "  ".join(f"{name} {line[key]:.4f}" for key, name in names if isinstance(line.get(key), float))


def clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"


def duration(seconds: float) -> str:
    whole = round(seconds)
    if whole < 90:
        return f"{whole} s"
    return f"{whole // 60} min" if whole < 5400 else f"{whole / 3600:.1f} h"
