"""A round's exchanges as Flower's messages: one `query.cohort` to each client per exchange.

An engine that has the clients' parked rounds in its processes passes on all exchanges but the first and the last
itself: the first message contains the model, and the last one is the train message.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.arrays import pack

from .codec import Agreement, CodecError, Contribution, contribution_from_records
from .round import Answers, ExchangesDone

# An engine's exchange of parked rounds (nodes, agreement, seconds); None: the engine cannot.
PassOn = Callable[[Sequence[int], Agreement, float], Answers | None]


@dataclass(frozen=True)
class RoundMessages:
    """The common content of a round's messages."""

    model: ArrayRecord
    config: Mapping[str, Any]
    config_key: str  # name of the ConfigRecord

    def content(self, arrays: ArrayRecord, more: Mapping[str, Any]) -> RecordDict:
        """The content of a message; `more` is added to the config."""
        return RecordDict({"arrays": arrays, self.config_key: ConfigRecord({**self.config, **more})})


class MessageRound:
    """A `Carrier` over `grid`; one exchange may take `timeout` seconds. Without `pass_on`, all are messages."""

    def __init__(self, grid: Grid, about: RoundMessages, timeout: float, pass_on: PassOn | None) -> None:
        self._grid = grid
        self._pass_on = pass_on
        self._about = about
        self._timeout = timeout

    def ask(self, nodes: Sequence[int], step: int, agreement: Agreement | None) -> Answers:
        if agreement is not None and self._pass_on is not None:
            answers = self._pass_on(nodes, agreement, self._timeout)
            if answers is not None:
                return answers
        questions = self._messages(protocol.COHORT_QUERY, nodes, step, agreement)
        replies = self._grid.send_and_receive(questions, timeout=self._timeout)
        return {reply.metadata.src_node_id: _answer(reply) for reply in replies}

    def last_messages(self, done: ExchangesDone) -> list[Message]:
        """The round's train messages, which contain the last agreement."""
        return self._messages(MessageType.TRAIN, done.nodes, done.steps, done.agreement)

    def _messages(self, kind: str, nodes: Sequence[int], step: int, agreement: Agreement | None) -> list[Message]:
        if agreement is None:
            arrays, images = self._about.model, 0
        else:
            arrays, images = pack(agreement.tensors), agreement.images
        content = self._about.content(arrays, {protocol.COHORT_STEP: step, protocol.COHORT_BATCH: images})
        return [Message(content, node, kind) for node in nodes]


def _answer(reply: Message) -> Contribution | str:
    if reply.has_error():
        reason = reply.error.reason or f"error code {reply.error.code}"
        if "No query function registered" in reason:
            return f"{reason} (its ClientApp does not support exchanges; serve the client with fedbn_flwr.client_app)"
        return reason
    try:
        return contribution_from_records(reply.content)
    except CodecError as error:
        return str(error)
