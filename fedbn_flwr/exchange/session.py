"""A training round that pauses at every exchange to answer a message, and continues with the next message.

The round runs in its own thread and is parked inside `exchange`. A Flower client may receive its next message in
another process: parking is only a cache, and a process without the parked round repeats it with the agreements so far
(`Session(..., agreed=[...])`). The numbers are the same.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from fedbn_flwr import seeding

from .codec import Agreement, Contribution
from .step import Exchange


class _Abandoned(BaseException):
    """Ends a parked round that receives no more messages."""


class Session:
    """Runs `work(exchange)` until its next exchange or its end, one piece at a time.

    Parameters
    ----------
    work
        The round; called once, in another thread.
    agreed
        Answers to the first exchanges, from an earlier session of the same round.
    patience
        Seconds that a parked round waits for its next message.
    """

    def __init__(
        self, work: Callable[[Exchange], Any], agreed: Sequence[Agreement] = (), *, patience: float = 3600
    ) -> None:
        self._work = work
        self._answers: queue.SimpleQueue[Agreement | None] = queue.SimpleQueue()
        self._events: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        for answer in agreed:
            self._answers.put(answer)
        self._given = len(agreed)
        self._patience = patience
        self._threads = torch.get_num_threads()
        self._reached = 0  # number of exchanges that the round has reached
        self._thread: threading.Thread | None = None

    def advance(self, answer: Agreement | None = None) -> Any:
        """Continue (with the cohort's agreement, after an exchange) to the next Contribution or the round's result."""
        # All threads share torch's global random generators, but the round and the caller have separate random streams:
        # the caller's state is saved before the round continues and sets its own.
        outside = seeding.states()
        try:
            if answer is not None:
                self._given += 1
                self._answers.put(answer)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, daemon=True)
                self._thread.start()
            kind, value = self._events.get()
        finally:
            seeding.set_states(outside)
        if kind == "failed":
            raise value
        return value

    def abandon(self) -> None:
        """End a parked round and free its memory."""
        # At its end the round resets the generators to their state at its beginning, which is not the caller's.
        outside = seeding.states()
        self._answers.put(None)
        if self._thread is not None:
            self._thread.join(self._patience)
            # PyTorch still frees memory of the thread then: if Python ended meanwhile, it would abort the process.
            task, deadline = Path(f"/proc/self/task/{self._thread.native_id}"), time.monotonic() + 1
            while task.exists() and time.monotonic() < deadline:
                time.sleep(0.001)
        seeding.set_states(outside)

    def _run(self) -> None:
        torch.set_num_threads(self._threads)  # the number is a setting of the thread
        try:
            self._events.put(("done", self._work(self._exchange)))
        except _Abandoned:
            pass
        except BaseException as error:
            self._events.put(("failed", error))

    def _exchange(self, contribution: Contribution) -> Agreement:
        self._reached += 1
        if self._reached > self._given:
            state = seeding.states()
            self._events.put(("pending", contribution))
            answer = self._wait()
            seeding.set_states(state)
        else:
            answer = self._wait()
        return answer

    def _wait(self) -> Agreement:
        try:
            answer = self._answers.get(timeout=self._patience)
        except queue.Empty:
            raise _Abandoned from None
        if answer is None:
            raise _Abandoned
        return answer
