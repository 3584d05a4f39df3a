"""A round's exchanges by calls of the clients, while Flower waits for the replies to the round's train messages.

The loop runs in its own thread, with an exchange service that is open for this round only.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, wait

from flwr.app import ArrayRecord, Message, MessageType
from flwr.serverapp import Grid

from fedbn_flwr.engines.base import capabilities
from fedbn_flwr.errors import MessageError, SettingsError
from fedbn_flwr.exchange.carriers import Exchanges, content_like
from fedbn_flwr.exchange.codec import Agreement, Contribution
from fedbn_flwr.messages.aggregate import Arrays
from fedbn_flwr.messages.gate import sent_model
from fedbn_flwr.norms.roles import Role, roles

from . import client
from .config import ExchangeConfig
from .server import ExchangeService
from .wire import HEADER_LIMIT, contribution_from_bytes, to_bytes

_ROUND_SECONDS = 6 * 3600.0  # for all exchanges of a round; the round's own timeout is usually shorter
_JOIN_SECONDS = 60  # to close the service after the last reply has arrived


class StreamCarrier:
    """Runs the exchanges on a service, as their `Carrier`, and observes the replies to the train messages."""

    def __init__(self, settings: ExchangeConfig, grid: Grid, messages: Sequence[Message], timeout: float) -> None:
        self._engine = capabilities(grid)
        served = self._engine.start()
        if served is not None and served < (count := len(list(grid.get_node_ids()))):
            raise SettingsError(
                f"the direct exchange needs all {count} clients alive at once, and this engine serves {served} "
                "at a time; set engine.workers to the number of clients, or strategy.direct to false"
            )
        self._message, self._timeout = messages[0], timeout
        self._model = sent_model(messages[0].content)
        self._nodes = [message.metadata.dst_node_id for message in messages]
        self._up: list[Arrays] = []  # the contributions to the current exchange
        self._ended: Future[list[int]] = Future()  # the nodes that took part in all exchanges
        limit = _message_limit(self._model)
        self._service = ExchangeService(settings, self._nodes, limit=limit, seconds=_ROUND_SECONDS)
        ca = settings.read("ca")
        self._config = {
            client.DIRECT: self._service.address,
            client.DIRECT_TIMEOUT: float(timeout),
            **({} if settings.certificate else {client.DIRECT_INSECURE: True}),
            **({} if ca is None else {client.DIRECT_CA: ca.decode()}),
        }

    def run(self, exchanges: Exchanges) -> list[Message]:
        threading.Thread(target=self._run, args=[exchanges], daemon=True, name="fedbn-exchanges").start()
        self._engine.observe(self.replied, self.given_up)
        asked = {node: {**self._config, client.DIRECT_TOKEN: token} for node, token in self._service.tokens.items()}
        contents = {node: content_like(self._message, self._model, config) for node, config in asked.items()}
        return [Message(content, node, MessageType.TRAIN) for node, content in contents.items()]

    def finish(self, replies: Iterable[Message]) -> tuple[list[Message], int]:
        """Raises the error that ended the exchanges."""
        replies = list(replies)
        for reply in replies:
            self.replied(reply)
        wait([self._ended], 1)
        self._service.lose(self._nodes, "its train message was answered, or given up, before the exchanges ended")
        done = self._ended.result(_JOIN_SECONDS)
        # Clients that dropped out were already reported; ignore their final reply.
        lost = {*self._nodes}.difference(done)
        return [reply for reply in replies if reply.metadata.src_node_id not in lost], len(done)

    # --- what an engine that observes replies calls ---

    def replied(self, reply: Message) -> None:
        """A client that has answered the train message takes part in no more exchanges."""
        reason = "it trained without the exchanges; serve the client with fedbn_flwr.client_app"
        if reply.has_error():
            reason = reply.error.reason or f"error code {reply.error.code}"
        self._service.lose([reply.metadata.src_node_id], reason)

    def given_up(self) -> frozenset[int]:
        failed = self._ended.done() and self._ended.exception() is not None
        return frozenset(self._nodes if failed else self._service.lost)

    # --- the loop's carrier, in the thread ---

    def ask(self, nodes: Sequence[int], step: int, agreement: Agreement | None) -> dict[int, Contribution | str]:
        if agreement is not None:
            self._send(nodes, agreement, last=False)
        answers = {node: _answer(content) for node, content in self._service.collect(nodes, self._timeout).items()}
        self._up = [answer.tensors for answer in answers.values() if isinstance(answer, Contribution)]
        return answers

    def _run(self, exchanges: Exchanges) -> None:
        try:
            with self._service:
                done = exchanges(self)
                self._send(done.nodes, done.agreement, last=True)
            self._ended.set_result(done.nodes)
        except BaseException as error:
            self._ended.set_exception(error)

    def _send(self, nodes: Sequence[int], agreement: Agreement, *, last: bool) -> None:
        self._engine.count_exchange(self._up, [agreement.tensors] * len(nodes))
        self._service.answer(nodes, to_bytes(agreement), last=last)


def _answer(content: bytes | str) -> Contribution | str:
    try:
        return content if isinstance(content, str) else contribution_from_bytes(content)
    except MessageError as error:
        return f"its message cannot be read: {error}"


def _message_limit(model: ArrayRecord) -> int:
    """Bytes of a client's largest message: mean and variance of the widest batch norm in float64, and a header."""
    widest = max(math.prod(model[key].shape) for key, role in roles(model).items() if role is Role.STATISTICS)
    return 2 * 8 * widest + HEADER_LIMIT
