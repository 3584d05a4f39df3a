"""The progress of runs that are carried out side by side, each in a process that reports to this one."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

from rich.console import Group
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from .base import Listener, RunState
from .progress import Progress, clock, duration, figures_of

_BETWEEN_LINES = 10.0  # seconds


@dataclass(frozen=True)
class News:
    """What the process of a run reports: the rounds that are finished, or an event."""

    round: int = 0
    figures: str = ""  # of that round
    within: str = ""  # how far the next round is
    message: str = ""  # an event, to be shown as a line


class Reporter(Listener):
    """In the process of a run: reports its rounds, and stops it when the other end asks for it or has ended."""

    def __init__(self, connection: Connection, parent: int) -> None:
        self._connection = connection
        self._parent = parent
        self._round = 0
        self._figures = ""
        self._sent = 0.0
        self._alone = False  # no process reads

    def on_start(self, state: RunState) -> None:
        self._round = state.round
        self._send(News(state.round))

    def report(self, what: str, done: int, total: int) -> None:
        if time.monotonic() - self._sent > 0.5:
            self._send(News(self._round, self._figures, f"{what}: {done} of {total}"))

    def on_round(self, state: RunState) -> None:
        self._round, self._figures = state.round, figures_of(state.line)
        self._send(News(state.round, self._figures))
        if self._alone or self._connection.poll() or os.getppid() != self._parent:  # or asked to stop
            state.stop = True

    def message(self, text: str) -> None:
        self._send(News(self._round, self._figures, message=text))

    def _send(self, news: News) -> None:
        self._sent = time.monotonic()
        try:
            self._connection.send(news)
        except OSError:  # the run stops after this round, with a checkpoint
            self._alone = True


class Board(Progress):
    """All runs of an experiment, of which several are running; on a terminal with a line for each of these."""

    def __init__(
        self,
        labels: Sequence[str],
        rounds: Sequence[int],
        images: Sequence[int | None] = (),
        *,
        plain: bool | None = None,
        quiet: bool = False,
    ) -> None:
        super().__init__(rounds, images, plain=plain, quiet=quiet)
        self._labels = labels
        self._running: dict[int, tuple[News, float]] = {}  # by place: its last news, and when it began
        self._ended = 0

    @property
    def stop_asked(self) -> bool:
        return self._stop_asked

    def skip(self, places: Sequence[int]) -> None:
        """These runs are finished already."""
        self._ended += len(places)
        self._done += sum(self._rounds[place] * self._work[place] for place in places)
        if places:
            self.message(f"{len(places)} of {len(self._labels)} runs are finished already")

    def begin(self, place: int) -> None:
        now = time.monotonic()
        self._number = 1  # from now on, Ctrl-C lets rounds finish
        self._training_began = self._training_began or now
        self._running[place] = (News(), now)

    def news(self, place: int, news: News) -> None:
        before, began = self._running[place]
        self._running[place] = (news, began)
        if news.message:
            self._message(place, news.round, news.message)
        if (more := news.round - before.round) > 0:
            self._done += more * self._work[place]
            if before.round or more == 1:  # else a resumed run reports the rounds of earlier sessions
                self._counted += more * self._work[place]
                self._last_round = time.monotonic()
        self._tell()

    def end(self, place: int, problem: str = "") -> None:
        """A run is finished, or has ended for this reason."""
        now = time.monotonic()
        last, began = self._running.pop(place)
        self._ended += 1
        self._done += (self._rounds[place] - last.round) * self._work[place]
        what = problem or f"{last.round} rounds in {duration(now - began)}  {last.figures}".rstrip()
        self._message(place, last.round, what)
        self._tell()

    def _message(self, place: int, number: int, text: str) -> None:
        """A line about one run; other lines are about all of them."""
        self._name, self._round = self._labels[place], number
        self.message(f"{self._title(place)}: {text}")
        self._name, self._round = "", 0

    def _title(self, place: int) -> str:
        return f"[{place + 1}/{len(self._labels)}] {self._labels[place]}"

    def _tell(self) -> None:
        self._show()
        now = time.monotonic()
        if self._draws or now - self._printed < _BETWEEN_LINES:
            return
        self._printed = now
        rounds = (f"{self._labels[place]} {news.round}/{self._rounds[place]}" for place, (news, _) in self._now())
        self._say(f"{self._counts()}; rounds: {', '.join(rounds)}")

    def _now(self) -> list[tuple[int, tuple[News, float]]]:
        return sorted(self._running.items())

    def _counts(self) -> str:
        left = f", about {duration(self._left(time.monotonic()))} left" if self._counted else ""
        return f"{self._ended} of {len(self._labels)} runs ended, {len(self._running)} running{left}"

    def render(self, width: int) -> Group:
        if not self._running:
            return super().render(width)
        head = f"{self._counts()}  {clock(time.monotonic() - self._began)}"
        grid = Table.grid(padding=(0, 1, 0, 0))
        for place, (news, _) in self._now():
            total = self._rounds[place]
            grid.add_row(
                Text(self._title(place), overflow="ellipsis", no_wrap=True),
                ProgressBar(total=total, completed=news.round, width=12),
                Text(f"{news.round}/{total}  {news.within or news.figures}", overflow="ellipsis", no_wrap=True),
            )
        return Group(Text(head, no_wrap=True, overflow="ellipsis"), grid)
