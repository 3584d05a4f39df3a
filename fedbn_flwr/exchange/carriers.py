"""How a round's exchanges travel.

A `Carrier` sends an agreement and collects the clients' contributions, as Flower's messages or through an extension's
service. The loop over the exchanges (`exchanges`) works with any carrier.

As messages, one exchange is a `query.exchange` to each client. The first one contains the model, and the train message
takes the place of the last one. If an engine's processes have the clients' parked rounds, it can carry the exchanges in
between without messages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from flwr.app import Message, MessageType, RecordDict
from flwr.serverapp import Grid

from fedbn_flwr.errors import MessageError
from fedbn_flwr.extensions import parts
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.arrays import config_of, configs_in
from fedbn_flwr.messages.gate import gate
from fedbn_flwr.messages.reply import reason_of, sent_model, with_config

from .codec import Agreement, Contribution, agreement_to_records, contribution_from_records

Answers = Mapping[int, Contribution | str]  # by node; a string says why there is no contribution

# An engine's exchange with parked rounds (nodes, agreement, seconds); returns None if the engine has none.
ContinueParked = Callable[[Sequence[int], Agreement, float], Answers | None]


@dataclass(frozen=True)
class ExchangesDone:
    """The end of a round's exchanges."""

    nodes: Sequence[int]  # the nodes that took part in all exchanges
    steps: int
    agreement: Agreement  # the last agreement, which the nodes have not received yet


class Carrier(Protocol):
    """How the exchanges of one round travel."""

    def ask(self, nodes: Sequence[int], step: int, agreement: Agreement | None) -> Answers:
        """Send nodes the agreement of exchange `step`, and return their next contributions.

        The first exchange has no agreement (None). A node that does not answer in time has no entry.
        """


class Service(Protocol):
    """Runs a round's exchanges while clients handle the train messages, which say where to reach it."""

    messages: Sequence[Message]  # the train messages

    def finish(self, replies: Sequence[Message]) -> Sequence[Message]:
        """The replies of the clients that took part in all exchanges."""


@dataclass(frozen=True)
class Cohort:
    """The clients of a round with exchanges."""

    grid: Grid
    messages: Sequence[Message]  # the train messages, without exchanges
    timeout: float  # seconds for one exchange
    round_timeout: float  # seconds for the train messages
    name: Callable[[int], str] = str  # how the log names a node's client


MakeService = Callable[[Cohort, Callable[[Carrier], ExchangesDone]], Service]


def service() -> MakeService | None:
    """The exchange service from the ServerApp's environment, if there is one; SettingsError if it cannot be used."""
    return next(filter(None, (find() for find in parts("carriers"))), None)


class ByMessages:
    """A carrier of messages; without `continue_parked`, all exchanges are messages."""

    def __init__(self, cohort: Cohort, continue_parked: ContinueParked | None = None) -> None:
        self._cohort, self._continue_parked = cohort, continue_parked
        self._asked = {message.metadata.dst_node_id: message for message in cohort.messages}

    def train_messages(self, done: ExchangesDone) -> list[Message]:
        """The messages with the last agreement."""
        return self._messages(MessageType.TRAIN, done.nodes, done.steps, done.agreement)

    def ask(self, nodes: Sequence[int], step: int, agreement: Agreement | None) -> Answers:
        grid, timeout = self._cohort.grid, self._cohort.timeout
        if agreement is not None and self._continue_parked is not None:
            answers = self._continue_parked(nodes, agreement, timeout)
            if answers is not None:
                return answers
        questions = self._messages(protocol.EXCHANGE_QUERY, nodes, step, agreement)
        replies = gate(grid.send_and_receive(questions, timeout=timeout))
        return {reply.metadata.src_node_id: _answer(reply) for reply in replies}

    def _messages(self, kind: str, nodes: Sequence[int], step: int, agreement: Agreement | None) -> list[Message]:
        agreed = RecordDict() if agreement is None else agreement_to_records(agreement)
        more = {protocol.EXCHANGE_STEP: step, **config_of(agreed)}

        def content(asked: Message) -> RecordDict:
            model, records = sent_model(asked.content), with_config(asked, more).content
            rest = records if kind == MessageType.TRAIN else configs_in(records)
            others = {name: record for name, record in rest.items() if record is not model}
            return RecordDict({"arrays": agreed.get("arrays", model), **others})

        return [Message(content(self._asked[node]), node, kind) for node in nodes if node in self._asked]


def _answer(reply: Message) -> Contribution | str:
    if reply.has_error():
        return reason_of(reply)
    try:
        return contribution_from_records(reply.content)
    except MessageError as error:
        return str(error)
