"""The nodes of a grid: their contexts, and what a process that serves them does with messages and exchanges."""

from __future__ import annotations

import math
import os
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode

from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.arrays import size_in
from fedbn_flwr.messages.serialization import dump, parse
from fedbn_flwr.storage import temporary_folder, writing

from .schedule import keeps_node

if TYPE_CHECKING:  # the exchange's modules are imported when a strategy uses them
    from fedbn_flwr.exchange.codec import Agreement, Contribution
    from fedbn_flwr.exchange.round import Answers


class Contexts(dict[int, Context]):
    """The contexts of all nodes: the states used last are in memory, up to `limit` bytes in all, others in files."""

    def __init__(self, contexts: Mapping[int, Context], limit: float = math.inf) -> None:
        super().__init__(contexts)
        self._limit = limit
        self._folder = temporary_folder("nodes") if math.isfinite(limit) else None
        self._sizes: dict[int, int] = {}  # of the states in memory; those used last at the end
        self._total = 0

    @contextmanager
    def use(self, node: int) -> Iterator[Context]:
        """The context of a node, with its state. Then those used longest ago go to files, if too large."""
        context = self[node]
        if self._folder is None:
            yield context
            return
        if (file := self._file(node)).exists():
            context.state = RecordDict({**parse(file.read_bytes()), **context.state})
            file.unlink()
        yield context
        self._total -= self._sizes.pop(node, 0)
        _, self._sizes[node] = size_in(context.state)
        self._total += self._sizes[node]
        while self._total > self._limit and len(self._sizes) > 1:
            other = next(iter(self._sizes))
            self._total -= self._sizes.pop(other)
            try:
                data = dump(self[other].state)
            except ValueError:  # an array of a type that cannot be stored: it stays in memory
                continue
            with writing(self._file(other)):
                self._file(other).write_bytes(data)
            self[other].state = protocol.volatile(self[other].state)  # which `dump` leaves out

    def close(self) -> None:
        if self._folder is not None:
            self._folder.cleanup()

    def _file(self, node: int) -> Path:
        assert self._folder is not None
        return Path(self._folder.name, f"node-{node}")


@dataclass
class Nodes:
    """The nodes that a process serves: all of them, or in a worker those whose layer-wise rounds are parked there."""

    client_app: ClientApp
    threads: int | None
    contexts: Contexts

    def serve(self, message: Message, context: Context | None) -> tuple[Message, RecordDict | None]:
        """In a worker: the reply, and the node's new state. None instead of context or state: the worker has it."""
        node = message.metadata.dst_node_id
        context = self.contexts.pop(node) if context is None else context
        reply = self.answer(message, context)
        if not keeps_node(message):
            return reply, context.state
        self.contexts[node] = context
        return reply, None

    def exchange(self, nodes: Sequence[int], agreement: Agreement) -> Answers:
        """Continue the nodes' rounds, which are parked in this process; the reason in place of each that fails."""
        answers: dict[int, Contribution | str] = {}
        for node in nodes:
            try:
                with self.contexts.use(node) as context:
                    answers[node] = self.client_app.exchange(context, agreement)  # type: ignore[attr-defined]
            except (Exception, SystemExit) as error:
                answers[node] = _reason(error)
        return answers

    def answer(self, message: Message, context: Context) -> Message:
        """The ClientApp's reply, or an error reply."""
        if self.threads is not None and torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)
        asked = message.metadata
        try:
            # The messages of a round share their content; a change by one client must not reach the next.
            own = RecordDict({key: record.copy() for key, record in message.content.items()})
            reply = self.client_app(Message(content=own, metadata=asked), context)  # type: ignore[call-overload]
            if not isinstance(reply, Message):  # a handler returned nothing
                reason = f"the ClientApp returned {type(reply).__name__} instead of a Message"  # type: ignore[unreachable]
            # Flower's SuperLink refuses such replies too.
            elif (given := reply.metadata).reply_to_message_id != asked.message_id:
                reason = f"it replied to message {given.reply_to_message_id!r} instead of {asked.message_id!r}"
            elif given.src_node_id != asked.dst_node_id:
                reason = f"its reply says that it is from node {given.src_node_id} instead of {asked.dst_node_id}"
            else:
                return reply
        except (Exception, SystemExit) as error:
            reason = _reason(error)
        return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)


def _reason(error: BaseException) -> str:
    """The text of the exception that is being handled, for the server."""
    if os.environ.get("FEDBN_DEBUG"):
        traceback.print_exc(file=sys.stderr)
    return str(error) or type(error).__name__
