"""A worker process of the local engine. Any worker can serve any node: the node's state travels with the message.

It is forked, so it shares the memory of its parent. Where the parent has other threads, as in a notebook, a lock that
one of them holds at the fork stays locked in the new process: a worker that does not start is forked again.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Protocol

from flwr.app import Error, Message, RecordDict
from flwr.common.constant import ErrorCode

from fedbn_flwr import seeding
from fedbn_flwr.errors import RunFailed

from .context_cache import keep_freed_memory

_FORKS = 3  # attempts to start a worker
_START_TIMEOUT = 10  # seconds until a worker has taken the locks that it will need


@dataclass(frozen=True)
class Task:
    """A message to a node, and the node's state; None if the worker has the state."""

    message: Message
    state: RecordDict | None


@dataclass(frozen=True)
class Done:
    """A node's reply and its new state; None if the worker keeps it, because the node's round is not complete."""

    reply: Message
    state: RecordDict | None
    seconds: float | None = None  # None: the process died


class NodeWorker(Protocol):
    """A worker that handles one message at a time; one that is lost is replaced."""

    current: Message | None  # the message that it handles

    @property
    def is_free(self) -> bool:
        """Whether a message can be sent to it."""

    def start(self) -> None: ...

    def send(self, task: Task) -> None: ...

    def receive(self) -> tuple[Message, Done]:
        """The current message and its result, as soon as there is one; an error reply if the worker is lost."""

    def take_state(self, node: int) -> RecordDict | None:
        """The state of a node that the idle worker keeps; None if the worker is lost."""

    def close(self) -> None: ...


@dataclass
class Worker:
    """A process that handles one message at a time; a dead one is replaced."""

    handle: Callable[[Task], Done]  # called in the process
    give_state: Callable[[int], RecordDict]  # called in the process: the state of a node that it keeps
    current: Message | None = None
    process: BaseProcess | None = None
    connection: Connection = field(init=False)

    @property
    def is_free(self) -> bool:
        return self.current is None

    def send(self, task: Task) -> None:
        # One message at a time: with several, each end could wait for the other to read.
        self.start()
        self.current = task.message
        with contextlib.suppress(OSError):  # it died while idle: receive() reports it
            self.connection.send(task)

    def receive(self) -> tuple[Message, Done]:
        """The current message and its result, as soon as there is one."""
        message, self.current = self.current, None
        assert message is not None
        try:
            done = self.connection.recv()
            assert isinstance(done, Done)
            return message, done
        except (EOFError, OSError):
            assert self.process is not None
            self.process.join(5)
            code = self.process.exitcode
            how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
            self.close()
            reason = f"the client's process died ({how}); its node has the state from before this message"
            return message, Done(Message(Error(ErrorCode.CLIENT_APP_CRASHED, reason), reply_to=message), None)

    def take_state(self, node: int) -> RecordDict | None:
        """The state of a node that the idle worker keeps; None if the process has died."""
        try:
            self.connection.send(node)
            state = self.connection.recv()
        except (EOFError, OSError):
            self.close()
            return None
        assert isinstance(state, RecordDict)
        return state

    def start(self) -> None:
        for _ in range(_FORKS):
            if self.process is None:
                self._fork()
                if not self.connection.poll(_START_TIMEOUT):
                    self.close()
                    continue
                with contextlib.suppress(EOFError, OSError):  # it died: receive() reports it
                    self.connection.recv()
            return
        raise RunFailed(
            f"worker processes cannot start: {_FORKS} of them did nothing for {_START_TIMEOUT} s, because other "
            "threads of this process use PyTorch's random numbers or its output; end them, or use workers=0"
        )

    def _fork(self) -> None:
        fork = multiprocessing.get_context("fork")
        self.connection, other = fork.Pipe()
        self.process = fork.Process(target=_serve, args=(self, other), daemon=True)
        self.process.start()
        other.close()

    def close(self) -> None:
        if self.process is not None:
            with contextlib.suppress(OSError):
                self.connection.send(None)
            self.connection.close()
            self.process.join(0.5)  # it ends at once, unless a client is still training
            if self.process.is_alive():
                self.process.terminate()
                self.process.join(5)
        self.process = None


def _serve(worker: Worker, connection: Connection) -> None:
    worker.connection.close()  # the parent's end
    keep_freed_memory()
    # Ctrl-C reaches every process of a terminal; the parent decides when workers end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # close() sends it; the parent's handler is not for this process
    if "torch" in sys.modules:
        seeding.states()  # takes the lock of PyTorch's generator
    sys.stdout.flush()
    sys.stderr.flush()
    connection.send(None)
    with contextlib.suppress(EOFError, OSError):  # the parent closed its end or has ended
        while (task := connection.recv()) is not None:
            connection.send(worker.handle(task) if isinstance(task, Task) else worker.give_state(task))
