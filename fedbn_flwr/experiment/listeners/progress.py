"""Shows the progress of runs and stops them on Ctrl-C.

On a terminal and in a notebook: a bar of the current run's rounds, with the time passed and left, and below it how far
the current round is. Elsewhere: a line after rounds, at most every two seconds, and within a long round every ten.

The first Ctrl-C stops the run after the current round, so that no work is lost. The second one, SIGTERM and
SIGHUP stop it immediately; a resumed run then repeats the rounds after the last checkpoint.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.jupyter import JupyterMixin
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fedbn_flwr.engines.logs import is_json, working_at, write_json

from .base import Listener, RunState

_BETWEEN_LINES = 2.0  # seconds, after rounds
_WITHIN_ROUND = 10.0  # seconds, between lines of one round
_BAR = 30  # characters


class Progress(Listener):
    """The progress of an experiment's runs, which follow one another; `rounds` has the number of rounds of each.

    `images` has the number of images that each run trains on: the time that is left is estimated from it.
    """

    def __init__(
        self,
        rounds: Sequence[int],
        images: Sequence[int | None] = (),
        *,
        plain: bool | None = None,
        quiet: bool = False,
    ) -> None:
        self.console = Console(highlight=False)
        self._name = ""  # the run's label
        self.label = ""  # the same with its number
        draws = (self.console.is_terminal or self.console.is_jupyter) and not is_json()
        self._draws = not quiet and (draws if plain is None else not plain)
        self._quiet = quiet
        self._rounds = rounds
        # The work of a round of each run, in images or, if those of a run are not known, in rounds.
        work = [count / of for count, of in zip(images, rounds, strict=False) if count]
        self._work = work if len(work) == len(rounds) else [1.0] * len(rounds)
        self._number = 0  # of the run, from 1
        self._round = self._total = 0  # of the run: the last finished round, and all
        self._figures = ""  # of that round
        self._within = ""  # how far the current round is, or the current activity between runs
        self._done = self._counted = 0.0  # the work of all runs, and without that of earlier sessions
        self._began = self._run_began = self._printed = time.monotonic()
        self._training_began: float | None = None
        self._last_round = 0.0  # when it ended
        self._live: Live | None = None  # on a terminal
        self._cell: Any = None  # in a notebook: the display
        self._stop_asked = False
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
        self._total, self._within = 0, "finished" if error is None else "stopped"
        self._show()
        for number, previous in self._handlers.items():
            signal.signal(number, previous)

    def _interrupt(self, number: int, frame: Any) -> None:
        if self._stop_asked or not self._number:
            raise KeyboardInterrupt
        self._stop_asked = True
        print("\nstopping after this round; Ctrl-C again stops at once", file=sys.stderr, flush=True)

    def _terminate(self, number: int, frame: Any) -> None:
        """Stop immediately: the sender may not wait, and may have sent SIGTERM to the worker processes too."""
        raise KeyboardInterrupt

    # --- what happens, in the order of an experiment ---

    def status(self, text: str) -> None:
        """What happens before the first run or after the last one; shown only where it can be drawn over."""
        self._total, self._within = 0, f"{text} ..."
        self._show()

    def next_run(self, label: str) -> None:
        """Called before each run; raises KeyboardInterrupt if the user asked to stop."""
        if self._stop_asked:
            raise KeyboardInterrupt
        self._number += 1
        self._name = label
        self.label = f"[{self._number}/{len(self._rounds)}] {label}"

    def skip_run(self) -> None:
        self._done += self._rounds[self._number - 1] * self._work[self._number - 1]
        self.message(f"{self.label}: finished already")

    def on_start(self, state: RunState) -> None:
        rounds, done = state.run.rounds, state.round
        self._done += done * self._work[self._number - 1]
        self._round, self._total, self._figures, self._within = done, rounds, "", "starting"
        self._run_began = self._printed = self._last_round = time.monotonic()
        if self._training_began is None:
            self._training_began = self._run_began
        if not self._draws:
            self._say(f"{self.label}: {rounds} rounds" + (f", continuing after round {done}" if done else ""))
        self._show()

    def report(self, what: str, done: int, total: int) -> None:
        """How far the current round is."""
        self._within = f"{what}: {done} of {total}"
        now = time.monotonic()
        if now - self._printed < (0.2 if self._draws else _WITHIN_ROUND):
            return
        self._printed = now
        self._show()
        if not self._draws and self._total:
            passed = duration(now - self._last_round)
            self._say(f"{self.label}: round {self._round + 1}/{self._total}  {self._within} after {passed}")

    def on_round(self, state: RunState) -> None:
        state.stop = self._stop_asked
        work = self._work[self._number - 1]
        self._done += work * (1 if state.ended is None else 1 + state.run.rounds - state.round)
        self._counted += work
        self._round, self._within = state.round, ""
        self._last_round = now = time.monotonic()
        self._figures = figures_of(state.line)
        last = state.is_last
        if self._draws and last:
            self.message(f"{self.label}: {state.round} rounds in {duration(now - self._run_began)}  {self._figures}")
        for note in state.prepared.rule.notes().values() if last else ():
            if isinstance(note, Mapping) and "in_words" in note:
                self.message(f"{self.label}: {note['in_words']}")
        if not last and now - self._printed < (0.2 if self._draws else _BETWEEN_LINES):
            return
        self._printed = now
        self._show()
        if not self._draws:
            ending = "" if last else f"  about {duration(self._left(now))} left"
            self._say(f"{self.label}: round {state.round}/{state.run.rounds}  {self._figures}{ending}")

    def message(self, text: str) -> None:
        if self._live is not None:
            self.console.print(text, markup=False, soft_wrap=True)
        else:
            self._say(text)

    # --- output ---

    def _left(self, now: float) -> float:
        """Seconds to the end of all runs, if all images take as long as those of this session did on average."""
        assert self._training_began is not None
        each = (self._last_round - self._training_began) / self._counted
        total = sum(rounds * work for rounds, work in zip(self._rounds, self._work, strict=True))
        return max(0.0, each * (total - self._done) - (now - self._last_round))

    def render(self, width: int) -> Group:
        """The bar of the current run, and how far the current round is."""
        now = time.monotonic()
        passed = clock(now - self._began)
        if not self._total:
            return Group(Text(f"{self._within}  {passed}"))
        left = f"  about {duration(self._left(now))} left" if self._counted else ""
        counts = f" {self._round}/{self._total}  {passed}{left}"
        bar = min(_BAR, max(4, width - len(self.label) - len(counts) - 2))
        first = Table.grid(padding=(0, 1, 0, 0))
        first.add_row(
            Text(self.label, overflow="ellipsis", no_wrap=True),
            ProgressBar(total=self._total, completed=self._round, width=bar),
            Text(counts, no_wrap=True),
        )
        parts = [f"round {self._round + 1}, {self._within}"] if self._within else []
        parts += [f"after round {self._round}: {self._figures}"] if self._figures else []
        return Group(first, Text("  " + "  |  ".join(parts), no_wrap=True, overflow="ellipsis"))

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
                working_at(run=self._name, round=self._round)
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
