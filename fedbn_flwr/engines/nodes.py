"""The nodes of a grid in one process: their contexts, and what they do with messages and exchanges."""

from __future__ import annotations

import os
import sys
import time
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode

from .context_cache import Contexts
from .schedule import keeps_node
from .worker import Done, Exchange, Job, Result, Task

if TYPE_CHECKING:  # the exchange's modules are imported when a strategy uses them
    from fedbn_flwr.exchange.codec import Agreement, Contribution


@runtime_checkable
class ParksRounds(Protocol):
    """A ClientApp that continues a node's layer-wise round, which is parked in its process, without a message."""

    def exchange(self, context: Context, agreement: Agreement) -> Contribution: ...


@dataclass
class Nodes:
    """The nodes of a grid. A worker has a copy, in which it sets a node's state for each message."""

    client_app: ClientApp
    contexts: Contexts
    threads: int | None

    def handle(self, job: Job) -> Result:
        """Do a job in a worker process."""
        match job:
            case Task():
                return self._handle(job)
            case Exchange():
                return self.exchange(job)
            case node:
                with self.contexts.using(node) as context:
                    state, context.state = context.state, RecordDict()
                return state

    def _handle(self, task: Task) -> Done:
        began = time.perf_counter()
        with self.contexts.using(task.message.metadata.dst_node_id) as context:
            if task.state is not None:
                context.state = task.state
            reply = self.answer(task.message, context)
            state = None
            if not keeps_node(task.message):
                state, context.state = context.state, RecordDict()
        return Done(reply, state, time.perf_counter() - began)

    def exchange(self, exchange: Exchange) -> dict[int, Contribution | str]:
        """Continue the parked rounds of the nodes in this process; the reason in place of each that fails."""
        app, answers = self.client_app, dict[int, "Contribution | str"]()
        assert isinstance(app, ParksRounds)
        for node in exchange.nodes:
            try:
                answers[node] = app.exchange(self.contexts[node], exchange.agreement)
            except (Exception, SystemExit) as error:
                answers[node] = _reason(error)
        return answers

    def answer(self, message: Message, context: Context) -> Message:
        """The ClientApp's reply, or an error reply."""
        self._limit_threads()
        try:
            # The messages of a round share their content; a change by one client must not reach the next.
            content = message.content
            own = RecordDict({key: record.copy() for key, record in content.items()})
            message = Message(content=own, metadata=message.metadata)  # type: ignore[call-overload]
            reply = self.client_app(message, context)
        except (Exception, SystemExit) as error:
            code, reason = ErrorCode.CLIENT_APP_RAISED_EXCEPTION, _reason(error)
        else:
            code = ErrorCode.CLIENT_APP_RAISED_EXCEPTION
            if not isinstance(reply, Message):  # a handler returned nothing
                reason = f"the ClientApp returned {type(reply).__name__} instead of a Message"  # type: ignore[unreachable]
            elif (problem := _mismatch(message, reply)) is not None:
                reason = problem
            else:
                return reply
        return Message(Error(code, reason), reply_to=message)

    def _limit_threads(self) -> None:
        if self.threads is not None and "torch" in sys.modules:
            import torch

            if torch.get_num_threads() != self.threads:
                torch.set_num_threads(self.threads)


def _reason(error: BaseException) -> str:
    """The text of the exception that is being handled, for the server."""
    if os.environ.get("FEDBN_DEBUG"):
        traceback.print_exc(file=sys.stderr)
    return str(error) or type(error).__name__


def _mismatch(message: Message, reply: Message) -> str | None:
    """Why this is not the node's reply to this message; Flower's SuperLink refuses such replies too."""
    asked, given = message.metadata, reply.metadata
    if given.reply_to_message_id != asked.message_id:
        return f"it replied to message {given.reply_to_message_id!r} instead of {asked.message_id!r}"
    if given.src_node_id != asked.dst_node_id:
        return f"its reply says that it is from node {given.src_node_id} instead of {asked.dst_node_id}"
    return None
