"""A round's exchanges over streams, while Flower waits for the replies to the round's train messages.

The loop runs in its own thread, with an exchange service that is open for this round only.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence

from flwr.app import ArrayRecord, Message, MessageType

from fedbn_flwr.errors import FedbnError
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.aggregate import Arrays
from fedbn_flwr.norms.roles import Role, roles

from .codec import (
    HEADER_LIMIT,
    Agreement,
    CodecError,
    Contribution,
    answer_from_bytes,
    to_bytes,
)
from .config import ExchangeConfig
from .message_round import RoundMessages
from .round import Carrier, ExchangesDone
from .stream_server import ExchangeService, Lost

CountExchange = Callable[[Sequence[Arrays], Sequence[Arrays]], None]

_ROUND_SECONDS = 6 * 3600.0  # for all exchanges of a round; the round's own timeout is usually shorter
_JOIN_SECONDS = 60  # to close the streams after the last reply has arrived


class DirectRound:
    """Runs `exchanges` over streams to `nodes`, as their `Carrier`, and observes the replies to the train messages.

    Parameters
    ----------
    count
        Counts an exchange in the ledger, from its arrays up and down.
    exchange_seconds
        Seconds that one exchange may take.
    """

    def __init__(
        self,
        settings: ExchangeConfig,
        about: RoundMessages,
        nodes: Sequence[int],
        exchanges: Callable[[Carrier], ExchangesDone],
        *,
        count: CountExchange,
        exchange_seconds: float,
    ) -> None:
        self.nodes = frozenset(nodes)
        self._settings = settings
        self._about = about
        self._exchanges = exchanges
        self._count = count
        self._contributions: list[Contribution] = []  # to the current exchange
        self._seconds = exchange_seconds
        self._done: frozenset[int] | None = None  # the nodes that took part in all exchanges
        self._error: BaseException | None = None
        self._service = ExchangeService(settings, nodes, limit=_message_limit(about.model), seconds=_ROUND_SECONDS)
        self._thread = threading.Thread(target=self._run, daemon=True, name="fedbn-exchanges")
        self._thread.start()

    def messages(self) -> list[Message]:
        """The round's train message to each node."""
        return [
            Message(self._about.content(self._about.model, self._config_for(node)), node, MessageType.TRAIN)
            for node in self._service.tokens
        ]

    def _config_for(self, node: int) -> dict[str, str | bool | float]:
        """The config in a node's train message with which its client connects to the service."""
        config: dict[str, str | bool | float] = {
            protocol.DIRECT: self._service.address,
            protocol.DIRECT_TOKEN: self._service.tokens[node],
            protocol.DIRECT_TIMEOUT: float(self._seconds),
        }
        if not self._settings.encrypted:
            config[protocol.DIRECT_INSECURE] = True
        elif (ca := self._settings.read("ca")) is not None:
            config[protocol.DIRECT_CA] = ca.decode()
        return config

    def finish(self, replies: Sequence[Message]) -> frozenset[int]:
        """The nodes that took part in all exchanges, after the round's replies; raises the error that ended them."""
        for reply in replies:
            self.replied(reply)
        if self._done is None:
            self._thread.join(1)
            self._service.lose(self.nodes, "its train message was answered, or given up, before the exchanges ended")
        self._thread.join(_JOIN_SECONDS)
        if self._error is not None:
            raise self._error
        if self._done is None:
            raise FedbnError("the round's exchanges did not end")
        return self._done

    # --- an engine's observer of replies ---

    def replied(self, reply: Message) -> None:
        """A client that has answered the train message takes part in no more exchanges."""
        reason = "it trained without the exchanges; serve the client with fedbn_flwr.client_app"
        if reply.has_error():
            reason = reply.error.reason or f"error code {reply.error.code}"
        self._service.lose([reply.metadata.src_node_id], reason)

    def given_up(self) -> frozenset[int]:
        return self.nodes if self._error is not None else frozenset(self._service.lost)

    # --- the loop's carrier, in the thread ---

    def ask(self, nodes: Sequence[int], step: int, agreement: Agreement | None) -> dict[int, Contribution | str]:
        if agreement is not None:
            self._send(nodes, agreement, last=False)
        received = self._service.collect(nodes, self._seconds)
        answers = {node: _answer(content) for node, content in received.items()}
        self._contributions = [answer for answer in answers.values() if isinstance(answer, Contribution)]
        return answers

    def _run(self) -> None:
        try:
            with self._service:
                done = self._exchanges(self)
                self._send(done.nodes, done.agreement, last=True)
                self._done = frozenset(done.nodes)
        except BaseException as error:
            self._error = error

    def _send(self, nodes: Sequence[int], agreement: Agreement, *, last: bool) -> None:
        self._count([contribution.tensors for contribution in self._contributions], [agreement.tensors] * len(nodes))
        self._service.answer(nodes, to_bytes(agreement), last=last)


def _answer(content: bytes | Lost) -> Contribution | str:
    if isinstance(content, Lost):
        return content.reason
    try:
        return answer_from_bytes(content)
    except CodecError as error:
        return f"its message cannot be read: {error}"


def _message_limit(model: ArrayRecord) -> int:
    """Bytes of a client's largest message: mean and variance of the widest batch norm in float64, and a header."""
    widest = max(math.prod(model[key].shape) for key, role in roles(model).items() if role is Role.STATISTICS)
    return 2 * 8 * widest + HEADER_LIMIT
