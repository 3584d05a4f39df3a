"""A round's exchanges over streams, while Flower waits for the replies to the round's train messages.

The loop runs in its own thread, with an exchange service that is open for this round only.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Sequence

from flwr.app import ArrayRecord, Message, MessageType
from flwr.serverapp import Grid

from fedbn_flwr.engines.base import capabilities
from fedbn_flwr.errors import FedbnError, MessageError, SettingsError
from fedbn_flwr.exchange.carriers import Exchanges, RoundMessages
from fedbn_flwr.exchange.codec import Agreement, Contribution
from fedbn_flwr.norms.roles import Role, roles

from . import client
from .config import ExchangeConfig
from .server import ExchangeService, Lost
from .wire import HEADER_LIMIT, answer_from_bytes, to_bytes

_ROUND_SECONDS = 6 * 3600.0  # for all exchanges of a round; the round's own timeout is usually shorter
_JOIN_SECONDS = 60  # to close the streams after the last reply has arrived


class StreamCarrier:
    """Runs the exchanges over streams, as their `Carrier`, and observes the replies to the train messages."""

    def __init__(self, service: ExchangeConfig, grid: Grid, about: RoundMessages, timeout: float) -> None:
        self._engine = capabilities(grid)
        served = self._engine.start()
        if served is not None and served < (count := len(list(grid.get_node_ids()))):
            raise SettingsError(
                f"the direct exchange needs all {count} clients alive at once, and this engine serves {served} "
                "at a time; set engine.workers to the number of clients, or strategy.direct to false"
            )
        self._settings, self._about, self._timeout = service, about, timeout
        self._nodes = frozenset(about.nodes)
        self._contributions: list[Contribution] = []  # to the current exchange
        self._done: frozenset[int] | None = None  # the nodes that took part in all exchanges
        self._error: BaseException | None = None
        self._service = ExchangeService(service, about.nodes, limit=_message_limit(about.model), seconds=_ROUND_SECONDS)

    def run(self, exchanges: Exchanges) -> list[Message]:
        self._thread = threading.Thread(target=self._run, args=[exchanges], daemon=True, name="fedbn-exchanges")
        self._thread.start()
        self._engine.observe(self.replied, self.given_up)
        return [
            Message(self._about.content(self._about.model, self._config_for(token)), node, MessageType.TRAIN)
            for node, token in self._service.tokens.items()
        ]

    def _config_for(self, token: str) -> dict[str, str | bool | float]:
        """The config with which the client that has this token connects to the service."""
        config: dict[str, str | bool | float] = {
            client.DIRECT: self._service.address,
            client.DIRECT_TOKEN: token,
            client.DIRECT_TIMEOUT: float(self._timeout),
        }
        if not self._settings.encrypted:
            config[client.DIRECT_INSECURE] = True
        elif (ca := self._settings.read("ca")) is not None:
            config[client.DIRECT_CA] = ca.decode()
        return config

    def finish(self, replies: Iterable[Message]) -> tuple[list[Message], int]:
        """Raises the error that ended the exchanges."""
        replies = list(replies)
        for reply in replies:
            self.replied(reply)
        if self._done is None:
            self._thread.join(1)
            self._service.lose(self._nodes, "its train message was answered, or given up, before the exchanges ended")
        self._thread.join(_JOIN_SECONDS)
        if self._error is not None:
            raise self._error
        if self._done is None:
            raise FedbnError("the round's exchanges did not end")
        # Clients that dropped out were already reported; ignore their final reply.
        lost = self._nodes - self._done
        return [reply for reply in replies if reply.metadata.src_node_id not in lost], len(self._done)

    # --- what an engine that observes replies calls ---

    def replied(self, reply: Message) -> None:
        """A client that has answered the train message takes part in no more exchanges."""
        reason = "it trained without the exchanges; serve the client with fedbn_flwr.client_app"
        if reply.has_error():
            reason = reply.error.reason or f"error code {reply.error.code}"
        self._service.lose([reply.metadata.src_node_id], reason)

    def given_up(self) -> frozenset[int]:
        return self._nodes if self._error is not None else frozenset(self._service.lost)

    # --- the loop's carrier, in the thread ---

    def ask(self, nodes: Sequence[int], step: int, agreement: Agreement | None) -> dict[int, Contribution | str]:
        if agreement is not None:
            self._send(nodes, agreement, last=False)
        received = self._service.collect(nodes, self._timeout)
        answers = {node: _answer(content) for node, content in received.items()}
        self._contributions = [answer for answer in answers.values() if isinstance(answer, Contribution)]
        return answers

    def _run(self, exchanges: Exchanges) -> None:
        try:
            with self._service:
                done = exchanges(self)
                self._send(done.nodes, done.agreement, last=True)
                self._done = frozenset(done.nodes)
        except BaseException as error:
            self._error = error

    def _send(self, nodes: Sequence[int], agreement: Agreement, *, last: bool) -> None:
        up = [contribution.tensors for contribution in self._contributions]
        self._engine.count_exchange(up, [agreement.tensors] * len(nodes))
        self._service.answer(nodes, to_bytes(agreement), last=last)


def _answer(content: bytes | Lost) -> Contribution | str:
    if isinstance(content, Lost):
        return content.reason
    try:
        return answer_from_bytes(content)
    except MessageError as error:
        return f"its message cannot be read: {error}"


def _message_limit(model: ArrayRecord) -> int:
    """Bytes of a client's largest message: mean and variance of the widest batch norm in float64, and a header."""
    widest = max(math.prod(model[key].shape) for key, role in roles(model).items() if role is Role.STATISTICS)
    return 2 * 8 * widest + HEADER_LIMIT
