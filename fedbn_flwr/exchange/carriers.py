"""How the exchanges of a round travel: as Flower's messages, or by a service that an extension has.

By messages, one exchange is a `query.cohort` to each client. An engine that has the clients' parked rounds in its
processes passes on all exchanges but the first and the last itself: the first message contains the model, and the last
one is the train message.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, Self, runtime_checkable

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from fedbn_flwr.errors import MessageError, SettingsError
from fedbn_flwr.extensions import parts
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.arrays import configs_in, pack
from fedbn_flwr.messages.gate import gate, reason_of, sent_model

from .codec import Agreement, Contribution, contribution_from_records, numbers_of
from .round import Answers, Carrier, ExchangesDone

ADDRESS = "FEDBN_EXCHANGE_ADDRESS"  # the variable by which the environment of a ServerApp names an exchange service
# An engine's exchange of parked rounds (nodes, agreement, seconds); None: the engine cannot.
PassOn = Callable[[Sequence[int], Agreement, float], Answers | None]
Exchanges = Callable[[Carrier], ExchangesDone]  # all exchanges of a round


class RoundCarrier(Carrier, Protocol):
    """A carrier for one round."""

    def run(self, exchanges: Exchanges) -> list[Message]:
        """The round's train messages; the exchanges have been run, or run while the clients handle these messages."""

    def finish(self, replies: Iterable[Message]) -> tuple[list[Message], int]:
        """The replies of the clients that took part in all exchanges, and the number of these clients."""


@runtime_checkable
class Service(Protocol):
    """A part of the kind "carriers"."""

    @classmethod
    def from_environment(cls) -> Self | None:
        """The service whose settings the environment of the ServerApp has; None if it has none."""

    def prepare(self) -> None:
        """Raise SettingsError before the first round if it cannot carry exchanges."""

    def carrier(self, grid: Grid, messages: Sequence[Message], timeout: float) -> RoundCarrier: ...


def service_of(direct: Service | bool) -> Service | None:
    """The service for exchanges: `direct` itself, with True the one of the environment, if any; None: messages."""
    if isinstance(direct, Service):
        return direct
    if not isinstance(direct, bool):
        raise SettingsError(
            f"direct is {direct!r}; expected true or false (the environment variable {ADDRESS} of the ServerApp has "
            "the address), or an exchange service such as fedbn_flwr.extensions.streams.config.ExchangeConfig"
        )
    installed: list[type[Service]] = parts("carriers") if direct else []
    if direct and not installed and (address := os.environ.get(ADDRESS, "").strip()):
        raise SettingsError(
            f"the environment names an exchange service ({ADDRESS}={address!r}), and this installation lacks the "
            "extension 'streams', which opens it; install fedbn-flwr with its extensions, or unset the variable: "
            "exchanges are then sent as messages"
        )
    return next(filter(None, (kind.from_environment() for kind in installed)), None)


def content_like(message: Message, arrays: ArrayRecord, more: Mapping[str, Any]) -> RecordDict:
    """The content of a message with other arrays, and `more` in the config."""
    key, config = next(iter(configs_in(message.content).items()))
    return RecordDict({"arrays": arrays, key: ConfigRecord({**config, **more})})


class ByMessages:
    """A carrier over `grid`; without `pass_on`, all exchanges are messages."""

    def __init__(self, grid: Grid, messages: Sequence[Message], timeout: float, pass_on: PassOn | None) -> None:
        self._grid, self._first, self._timeout, self._pass_on = grid, messages[0], timeout, pass_on
        self._left = 0

    def run(self, exchanges: Exchanges) -> list[Message]:
        done = exchanges(self)
        self._left = len(done.nodes)
        return self._messages(MessageType.TRAIN, done.nodes, done.steps, done.agreement)

    def finish(self, replies: Iterable[Message]) -> tuple[list[Message], int]:
        return list(replies), self._left

    def ask(self, nodes: Sequence[int], step: int, agreement: Agreement | None) -> Answers:
        if agreement is not None and self._pass_on is not None:
            answers = self._pass_on(nodes, agreement, self._timeout)
            if answers is not None:
                return answers
        questions = self._messages(protocol.COHORT_QUERY, nodes, step, agreement)
        replies = gate(self._grid.send_and_receive(questions, timeout=self._timeout))
        return {reply.metadata.src_node_id: _answer(reply) for reply in replies}

    def _messages(self, kind: str, nodes: Sequence[int], step: int, agreement: Agreement | None) -> list[Message]:
        arrays, numbers = sent_model(self._first.content), {}
        if agreement is not None:
            arrays, numbers = pack(agreement.tensors), numbers_of(agreement)
        content = content_like(self._first, arrays, {protocol.COHORT_STEP: step, **numbers})
        return [Message(content, node, kind) for node in nodes]


def _answer(reply: Message) -> Contribution | str:
    if reply.has_error():
        return reason_of(reply)
    try:
        return contribution_from_records(reply.content)
    except MessageError as error:
        return str(error)
