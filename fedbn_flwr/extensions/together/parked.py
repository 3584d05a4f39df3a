"""A pool that trains clients together also in rounds with exchanges (FedTAN).

The clients' rounds train in one thread, which is parked between two exchanges with all of them. Messages and exchanges
have the same content as for clients that are parked one by one, so server and strategy need not know. If these clients
cannot train together, or their training fails, each is parked by itself, up to the exchange where they were.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from flwr.app import Error, Message, MessageType
from flwr.common.constant import ErrorCode

from fedbn_flwr.client.layerwise import Session
from fedbn_flwr.engines.base import ContinuesParked, OnReply
from fedbn_flwr.engines.pool import Nodes
from fedbn_flwr.exchange.codec import Agreement, Contribution, agreement_from_records, contribution_to_records
from fedbn_flwr.extensions import declared
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.arrays import config_of
from fedbn_flwr.messages.reply import other_arrays, with_config

from .groups import Row, train_exchanging
from .nested import TogetherPool
from .waiting import Waiting

if TYPE_CHECKING:
    from fedbn_flwr.exchange.carriers import Answers

# Answers messages; the function trains the loaded rounds of all.
Nested = Callable[[Sequence[Message], Callable[[Sequence[Waiting]], object]], Sequence[Message]]
Contributions = Mapping[int, Contribution]  # by node
ExchangeNodes = Callable[[Contributions], Agreement]


class Cohort:
    """Clients of a round with exchanges, whose rounds are parked in one thread."""

    def __init__(self, nodes: Nodes, queries: Sequence[Message], answers: Nested) -> None:
        self.nodes, self.queries = nodes, {query.metadata.dst_node_id: query for query in queries}
        self._answers = answers
        self._agreed: list[Agreement] = []
        self._last: Mapping[int, Message] = {}  # the train messages that end the round, by node
        self._session: Session[Contributions, Mapping[int, Message]] | None = Session(self._work)
        self._trained = False
        self._errors: dict[int, Message] = {}  # of clients that could not be parked by themselves, by node

    def begin(self) -> Contributions | None:
        """The contributions to the first exchange; None if the clients cannot train together."""
        assert self._session
        return self._session.advance()

    def continue_parked(self, nodes: Sequence[int], agreement: Agreement) -> Answers:
        self._agreed.append(agreement)
        if self._session is not None:
            if (contributions := self._session.advance(agreement)) is not None:
                return {node: contributions[node] for node in nodes}
            self._part(nodes, self._agreed[:-1])
        failed = {node: str(self._errors[node].error.reason) for node in nodes if node in self._errors}
        return {**self.nodes.continue_parked([node for node in nodes if node not in failed], agreement), **failed}

    def finish(self, messages: Sequence[Message]) -> Mapping[int, Message]:
        """The replies to the round's train messages, by node; clients that are not among them answer by themselves."""
        if self._session is None or not messages:
            return self._errors
        self._last = {message.metadata.dst_node_id: message for message in messages}
        session = self._session
        session.advance(agreement_from_records(messages[0].content))
        if not self._trained:
            self._part([*self._last], self._agreed)
            return self._errors
        self._session = None
        replies = session.result.result()
        return {node: replies[node] for node in self._last}

    def abandon(self) -> None:
        if self._session is not None:
            self._session.abandon()

    def _part(self, nodes: Collection[int], agreed: Sequence[Agreement]) -> None:
        """Park each client by itself after these agreements."""
        self._session = None
        for node in nodes:
            if (reply := self.nodes.answer(self.queries[node])).has_error():
                self._errors[node] = reply
        for agreement in agreed:
            self.nodes.continue_parked([*nodes], agreement)

    def _work(self, exchange: ExchangeNodes) -> Mapping[int, Message]:
        """The session: the replies of all clients, by node; in their training `exchange` waits for agreements."""
        messages = [_train_message(query) for query in self.queries.values()]
        replies = self._answers(messages, functools.partial(self._train, exchange))
        return {reply.metadata.src_node_id: reply for reply in replies}

    def _train(self, exchange: ExchangeNodes, waiting: Sequence[Waiting]) -> None:
        rows = [each for each in waiting if isinstance(each, Row)]
        if len(rows) < len(self.queries):
            return  # some cannot train together, or have failed
        node_of = dict(zip(rows, self.queries, strict=True))

        def ask(contributions: Mapping[Row, Contribution]) -> Agreement:
            agreement = exchange({node_of[row]: contribution for row, contribution in contributions.items()})
            for row, node in node_of.items():
                if node in self._last:
                    row.training.rules[0].local.records.update(other_arrays(self._last[node].content))
            return agreement

        train_exchanging(rows, ask)
        self._trained = True
        for row, node in node_of.items():
            if node not in self._last:
                row.trained = None  # it was left out, so its round must fail, and leave its state as it is


class CohortPool(TogetherPool):
    """Serves the nodes in this process, `most` of them at a time."""

    def __init__(self, nodes: Nodes, on_reply: OnReply, most: int) -> None:
        super().__init__(nodes, on_reply, most)
        self._cohorts: list[Cohort] = []

    def put(self, messages: Sequence[Message]) -> None:
        step = config_of(messages[0].content).get(protocol.EXCHANGE_STEP) if messages else None
        if step == 0:
            self._begin(messages)
        elif not step or not self._cohorts:
            super().put(messages)
        elif messages[0].metadata.message_type == MessageType.TRAIN:
            self._finish(messages)
        else:
            nodes = [message.metadata.dst_node_id for message in messages]
            answers = self.continue_parked(nodes, agreement_from_records(messages[0].content), 0)
            for message in messages:
                self.on_reply(_answer(message, answers[message.metadata.dst_node_id]))

    def _begin(self, messages: Sequence[Message]) -> None:
        self.close()
        for start in range(0, len(messages), self.most):
            some = messages[start : start + self.most]
            cohort = Cohort(self.nodes, some, self._answers)
            contributions = None if _has_mods(self.nodes, some[0]) else cohort.begin()
            if contributions is None:
                super().put(some)
            else:
                self._cohorts.append(cohort)
                for message in some:
                    self.on_reply(_answer(message, contributions[message.metadata.dst_node_id]))

    def _finish(self, messages: Sequence[Message]) -> None:
        replies = dict[int, Message]()
        for cohort in self._cohorts:
            replies.update(cohort.finish([each for each in messages if each.metadata.dst_node_id in cohort.queries]))
        self.close()
        super().put([message for message in messages if message.metadata.dst_node_id not in replies])
        for message in messages:
            if (reply := replies.get(message.metadata.dst_node_id)) is not None:
                self.on_reply(_reply(message, reply))

    def continue_parked(self, nodes: Sequence[int], agreement: Agreement, timeout: float) -> Answers:
        answers = dict[int, Contribution | str]()
        for cohort in self._cohorts:
            answers.update(cohort.continue_parked([node for node in nodes if node in cohort.queries], agreement))
        answers.update(super().continue_parked([node for node in nodes if node not in answers], agreement, timeout))
        return answers

    def close(self) -> None:
        for cohort in self._cohorts:
            cohort.abandon()
        self._cohorts.clear()


def _has_mods(nodes: Nodes, message: Message) -> bool:
    """Whether a mod must see each exchange, or the train message at the end of the round."""
    config = config_of(message.content)
    return not (isinstance(nodes.client_app, ContinuesParked) and declared("client_mods").keys().isdisjoint(config))


def _train_message(query: Message) -> Message:
    """A message to train the round that begins with `query`, which has the model."""
    content = with_config(query, {}, without=[protocol.EXCHANGE_STEP]).content
    return Message(content, query.metadata.dst_node_id, MessageType.TRAIN)


def _answer(message: Message, answer: Contribution | str) -> Message:
    if isinstance(answer, str):
        return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, answer), reply_to=message)
    return Message(contribution_to_records(answer), reply_to=message)


def _reply(message: Message, reply: Message) -> Message:
    """The content of a reply as one to this message."""
    return Message(reply.error if reply.has_error() else reply.content, reply_to=message)
