"""A pool that trains clients together also in rounds with exchanges (FedTAN).

The clients' rounds train in one thread, which is parked between two exchanges with all of them. Messages and exchanges
have the same content as for clients that are parked one by one, so server and strategy need not know. If these clients
cannot train together, or their training fails, each is parked by itself, up to the exchange where they were.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from flwr.app import Error, Message, MessageType
from flwr.common.constant import ErrorCode

from fedbn_flwr.client.layerwise import Session
from fedbn_flwr.engines.capabilities import ContinuesParked, OnReply
from fedbn_flwr.engines.pool import Nodes
from fedbn_flwr.exchange.codec import Agreement, Contribution, agreement_from_records, contribution_to_records
from fedbn_flwr.extensions import declared
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.arrays import config_of
from fedbn_flwr.messages.reply import other_arrays, with_config

from .nested import TogetherPool, answer_together, train_exchanging
from .waiting import Waiting, leave_alone

if TYPE_CHECKING:
    from fedbn_flwr.exchange.carriers import Answers

Contributions = Mapping[int, Contribution]  # by node


class Cohort(Session[Contributions, Mapping[int, Message]]):
    """A round with exchanges of several clients, whose work is parked in one thread. The result is their replies."""

    def __init__(self, nodes: Nodes, queries: Sequence[Message]) -> None:
        super().__init__(self._answer)
        self.nodes, self.queries = nodes, {query.metadata.dst_node_id: query for query in queries}
        self.agreements: list[Agreement] = []  # of the exchanges that have ended
        self._last: Mapping[int, Message] = {}  # the train messages that end the round, by node
        self._trained = False

    def finish(self, messages: Mapping[int, Message]) -> Mapping[int, Message] | None:
        """The replies to the round's train messages, by node; None if the clients cannot train together."""
        self._last = messages
        self.advance(agreement_from_records(next(iter(messages.values())).content))
        return {node: self.result.result()[node] for node in messages} if self._trained else None

    def _answer(self, exchange: Callable[[Contributions], Agreement]) -> Mapping[int, Message]:
        """Answer all clients; in their training `exchange` waits for agreements."""
        messages = [_train_message(query) for query in self.queries.values()]
        replies = answer_together(self.nodes, messages, functools.partial(self._train, exchange))
        return {reply.metadata.src_node_id: reply for reply in replies}

    def _train(self, exchange: Callable[[Contributions], Agreement], waiting: Sequence[Waiting]) -> None:
        if len(waiting) < len(self.queries) or len({type(each) for each in waiting}) > 1:
            return  # some cannot train together, or have failed
        node_of = dict(zip(waiting, self.queries, strict=True))  # rounds wait in the order of their messages
        try:
            train_exchanging(waiting, functools.partial(self._ask, exchange, node_of))
        except Exception as error:
            leave_alone(waiting, error)
            return
        self._trained = True
        for each, node in node_of.items():
            if node not in self._last:
                each.forget()  # it was left out, so its round must fail, and leave its state as it is

    def _ask(
        self,
        exchange: Callable[[Contributions], Agreement],
        node_of: Mapping[Waiting, int],
        contributions: Mapping[Waiting, Contribution],
    ) -> Agreement:
        agreement = exchange({node_of[each]: contribution for each, contribution in contributions.items()})
        for each, node in node_of.items():
            if node in self._last:  # the train messages bring the last agreement, and records for the rules
                each.training.records.update(other_arrays(self._last[node].content))
        return agreement


class CohortPool(TogetherPool):
    """A TogetherPool whose clients train together in rounds with exchanges too, a `Cohort` at a time."""

    def __init__(self, nodes: Nodes, on_reply: OnReply, most: int) -> None:
        super().__init__(nodes, on_reply, most)
        self._cohorts: list[Cohort] = []  # those that wait for an exchange

    def put(self, messages: Sequence[Message]) -> None:
        step = config_of(messages[0].content).get(protocol.EXCHANGE_STEP) if messages else None
        if step == 0:
            self._begin(messages)
        elif not step or not self._cohorts:  # an ordinary round, or clients that are parked one by one
            super().put(messages)
        elif messages[0].metadata.message_type == MessageType.TRAIN:
            self._finish(messages)
        else:
            agreement = agreement_from_records(messages[0].content)
            nodes = [message.metadata.dst_node_id for message in messages]
            self._reply(messages, self.continue_parked(nodes, agreement, 0))

    def _begin(self, messages: Sequence[Message]) -> None:
        self.close()
        for some in self.at_once(messages):
            cohort = Cohort(self.nodes, some)
            if _has_mods(self.nodes, some[0]) or (contributions := cohort.advance()) is None:
                super().put(some)
            else:
                self._cohorts.append(cohort)
                self._reply(some, contributions)

    def continue_parked(self, nodes: Sequence[int], agreement: Agreement, timeout: float) -> Answers:
        answers = dict[int, Contribution | str]()
        for cohort in [*self._cohorts]:
            asked = [node for node in nodes if node in cohort.queries]
            if (contributions := cohort.advance(agreement)) is not None:
                cohort.agreements.append(agreement)
                answers.update((node, contributions[node]) for node in asked)
            else:
                self._cohorts.remove(cohort)
                failed = self._park_each(cohort, asked)
                answers.update((node, str(reply.error.reason)) for node, reply in failed.items())
        others = [node for node in nodes if node not in answers]
        return {**answers, **super().continue_parked(others, agreement, timeout)}

    def _finish(self, messages: Sequence[Message]) -> None:
        replies = dict[int, Message]()
        while self._cohorts:
            cohort = self._cohorts.pop()
            asked = {node: each for each in messages if (node := each.metadata.dst_node_id) in cohort.queries}
            if asked:
                replies |= cohort.finish(asked) or self._park_each(cohort, asked)
            else:
                cohort.abandon()
        super().put([message for message in messages if message.metadata.dst_node_id not in replies])
        for message in messages:
            if (reply := replies.get(message.metadata.dst_node_id)) is not None:
                content = reply.error if reply.has_error() else reply.content
                self.on_reply(Message(content, reply_to=message))

    def _park_each(self, cohort: Cohort, nodes: Iterable[int]) -> Mapping[int, Message]:
        """Park each client by itself at the exchange where the cohort was, and return the errors of those that fail."""
        replies = {node: self.nodes.answer(cohort.queries[node]) for node in nodes}
        for agreement in cohort.agreements:
            self.nodes.continue_parked([*nodes], agreement)
        return {node: reply for node, reply in replies.items() if reply.has_error()}

    def _reply(self, messages: Sequence[Message], answers: Answers) -> None:
        for message in messages:
            answer = answers[message.metadata.dst_node_id]
            content = (
                Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, answer)
                if isinstance(answer, str)
                else contribution_to_records(answer)
            )
            self.on_reply(Message(content, reply_to=message))

    def close(self) -> None:
        while self._cohorts:
            self._cohorts.pop().abandon()


def _has_mods(nodes: Nodes, message: Message) -> bool:
    """Whether a mod must see each exchange, or the train message at the end of the round."""
    config = config_of(message.content)
    return not (isinstance(nodes.client_app, ContinuesParked) and declared("client_mods").keys().isdisjoint(config))


def _train_message(query: Message) -> Message:
    """A message to train the round that begins with `query`, which has the model."""
    content = with_config(query, {}, without=[protocol.EXCHANGE_STEP]).content
    return Message(content, query.metadata.dst_node_id, MessageType.TRAIN)
