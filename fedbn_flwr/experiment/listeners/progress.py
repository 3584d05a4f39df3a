"""Shows the progress of runs, as a bar on a terminal and as plain lines elsewhere, and stops them on Ctrl-C.

The first Ctrl-C stops the run after the current round, so that no work is lost. The second one, and SIGTERM, stop it
immediately; a resumed run then repeats the rounds after the last checkpoint.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from .base import Listener, RunState


class Progress(Listener):
    """The progress of an experiment's runs, which follow one another; `rounds` has the number of rounds of each."""

    def __init__(self, rounds: Sequence[int], *, plain: bool | None = None, quiet: bool = False) -> None:
        self.console = Console(highlight=False)
        self.label = ""  # the run's, with its number
        shows_bars = self.console.is_terminal or self.console.is_jupyter
        self._plain = quiet or (plain if plain is not None else not shows_bars)
        self._quiet = quiet
        self._rounds = rounds
        self._number = 0  # of the run, from 1
        self._done_rounds = self._counted = 0  # of all runs, and without those of earlier sessions
        self._began = self._printed = time.monotonic()
        self._bar: Bar | None = None
        self._cell: Any = None  # in a notebook: the display of the bar
        self._task: TaskID | None = None
        self._stop_asked = False
        self._handlers: dict[signal.Signals, Any] = {}  # the previous ones

    def __enter__(self) -> Progress:
        # Python's own handler raises at any point of the program, and an exception in a destructor is only printed.
        # Under Flower this is not the main thread. A shell's background job ignores Ctrl-C, and must continue to.
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            self._handlers[signal.SIGINT] = signal.signal(signal.SIGINT, self._interrupt)
        if in_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:  # Flower sets its own handler
            self._handlers[signal.SIGTERM] = signal.signal(signal.SIGTERM, self._terminate)
        if not self._plain:
            self._bar = Bar(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[figures]}"),
                TimeRemainingColumn(),
                console=self.console,
            )
            if self.console.is_jupyter:
                from IPython.display import display

                # Not rich's own display, which needs ipywidgets and is lost when a notebook is saved.
                self._cell = display(self._bar, display_id=True)  # type: ignore[no-untyped-call]
            else:
                self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._show()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _interrupt(self, number: int, frame: Any) -> None:
        if self._stop_asked:
            raise KeyboardInterrupt
        self._stop_asked = True
        print("\nstopping after this round; Ctrl-C again stops at once", file=sys.stderr, flush=True)

    def _terminate(self, number: int, frame: Any) -> None:
        """Stop immediately: the sender may not wait, and may have sent SIGTERM to the worker processes too."""
        raise KeyboardInterrupt

    def next_run(self, label: str) -> None:
        """Called before each run; raises KeyboardInterrupt if the user asked to stop."""
        if self._stop_asked:
            raise KeyboardInterrupt
        self._number += 1
        self.label = f"[{self._number}/{len(self._rounds)}] {label}"

    def skip_run(self) -> None:
        self._done_rounds += self._rounds[self._number - 1]
        self.message(f"{self.label}: finished already")

    def on_start(self, state: RunState) -> None:
        rounds, done = state.run.rounds, state.round
        self._done_rounds += done
        if self._bar is not None:
            self._task = self._bar.add_task(self.label, total=rounds, completed=done, figures="")
            self._show()
        else:
            self._say(f"{self.label}: {rounds} rounds" + (f", continuing after round {done}" if done else ""))

    def on_round(self, state: RunState) -> None:
        state.stop = self._stop_asked
        self._done_rounds += 1
        self._counted += 1
        now = time.monotonic()
        figures = "  ".join(
            f"{name} {state.line[key]:.4f}"
            for key, name in (("accuracy", "accuracy"), ("loss", "loss"), ("train_loss", "train loss"))
            if isinstance(state.line.get(key), float)
        )
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, advance=1, figures=figures)
            if now - self._printed >= 0.2:
                self._printed = now
                self._show()
            return
        last = state.round == state.run.rounds
        if last or now - self._printed >= 2:
            self._printed = now
            left = (now - self._began) / self._counted * (sum(self._rounds) - self._done_rounds)
            ending = "" if last else f"  about {_duration(left)} left"
            self._say(f"{self.label}: round {state.round}/{state.run.rounds}  {figures}{ending}")

    def _show(self) -> None:
        """Draw the bar in a notebook; on a terminal rich does that itself."""
        if self._cell is not None:
            self._cell.update(self._bar)

    def message(self, text: str) -> None:
        if self._bar is not None and self._cell is None:
            self.console.print(text, markup=False)
        else:
            self._say(text)

    def _say(self, text: str) -> None:
        # Not with rich, which wraps lines at 80 columns if there is no terminal.
        if not self._quiet:
            print(text, file=sys.stdout, flush=True)


def _duration(seconds: float) -> str:
    whole = round(seconds)
    if whole < 90:
        return f"{whole} s"
    return f"{whole // 60} min" if whole < 5400 else f"{whole / 3600:.1f} h"
