"""A worker process of the local engine.

It is forked, so it shares the memory of its parent. Where the parent has other threads, as in a notebook, a lock that
one of them holds at the fork stays locked in the new process: a worker that does not start is forked again.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from flwr.app import Error, Message, RecordDict
from flwr.common.constant import ErrorCode

from fedbn_flwr import seeding
from fedbn_flwr.errors import RunFailed

from .context_cache import keep_freed_memory

_FORKS = 3  # attempts to start a worker
_START_TIMEOUT = 10  # seconds until a worker has taken the locks that it will need


@dataclass
class Worker:
    """A process that serves nodes, one message at a time; a dead one is replaced."""

    answer: Callable[[Any], Message | RecordDict]  # called in the process
    queue: deque[Message] = field(default_factory=deque)
    current: Message | None = None
    process: BaseProcess | None = None
    connection: Connection = field(init=False)

    def send_next(self) -> None:
        # One message at a time: with several, each end could wait for the other to read.
        if self.current is not None or not self.queue:
            return
        self.start()
        self.current = self.queue.popleft()
        with contextlib.suppress(OSError):  # it died while idle: receive() reports it
            self.connection.send(self.current)

    def receive(self) -> Message:
        message, self.current = self.current, None
        assert message is not None
        try:
            reply = self.connection.recv()
            assert isinstance(reply, Message)
            return reply
        except (EOFError, OSError):
            assert self.process is not None
            self.process.join(5)
            code = self.process.exitcode
            how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
            self.close()
            reason = f"the client's process died ({how}); its nodes start with empty states"
            return Message(Error(ErrorCode.CLIENT_APP_CRASHED, reason), reply_to=message)

    def ask(self, node: int, question: object) -> RecordDict:
        if self.current is not None or self.queue:
            raise RuntimeError(f"node {node} is busy; its state can be read and written only between rounds")
        self.start()
        try:
            self.connection.send(question)
            answer = self.connection.recv()
        except (EOFError, OSError) as error:
            self.close()
            reason = f"the process that serves node {node} died, and its nodes' states are lost"
            raise RuntimeError(reason) from error
        assert isinstance(answer, RecordDict)
        return answer

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
        self.process = fork.Process(target=_serve, args=(self.answer, other, self.connection), daemon=True)
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


def _serve(answer: Callable[[Any], Message | RecordDict], connection: Connection, parents: Connection) -> None:
    parents.close()
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
        while (message := connection.recv()) is not None:
            connection.send(answer(message))
