"""A pool that trains the clients of a round at once in this process, also in rounds with exchanges (FedTAN).

A client's message is handled up to its training, and there the next client's message is handled in the same way. The
last one trains the loaded rounds of all; then each client continues to its reply, the last one first. So clients differ
from separate ones only in their training: mods and methods that a subclass overrides work, and clients may share the
model, as they do in an experiment. Nested calls take no time; a thread for each client would take about 0.3 ms.

In a round with exchanges these calls are in one thread, which is parked between two exchanges with all clients.
Messages and exchanges have the same content as for clients that are parked one by one, so server and strategy need not
know. If the clients cannot train at once, or their training fails, each is parked by itself, up to the exchange where
they were.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from flwr.app import Error, Message, MessageType
from flwr.common.constant import ErrorCode

from fedbn_flwr.client.layerwise import Session
from fedbn_flwr.client.training import TRAINER, Trained, Training, train
from fedbn_flwr.engines.capabilities import ContinuesParked, OnReply
from fedbn_flwr.engines.pool import Nodes, Pool
from fedbn_flwr.errors import log_once
from fedbn_flwr.exchange.codec import Agreement, Contribution, agreement_from_records, contribution_to_records
from fedbn_flwr.extensions import declared
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.arrays import config_of
from fedbn_flwr.messages.reply import other_arrays, with_config

from .groups import Row, leave_alone, row_of, train_exchanging, train_rows

if TYPE_CHECKING:
    from fedbn_flwr.exchange.carriers import Answers

_MOST = 100  # clients at a time, since their calls are nested
_CALLS = 50  # nested calls for each client, at most

Contributions = Mapping[int, Contribution]  # by node


class _Nested:
    """Answers messages in nested calls: each message is handled where the client before it would train."""

    def __init__(self, nodes: Nodes, messages: Sequence[Message], train_all: Callable[[Sequence[Row]], object]) -> None:
        self._nodes, self._messages, self._train_all = nodes, messages, train_all
        self._rest, self._rows = iter(messages), list[Row]()
        self._replies: list[Message] = []

    def answer(self) -> Sequence[Message]:
        """The replies, in any order. `train_all` trains the rounds of all messages as soon as they are loaded."""
        calls, before = _CALLS * len(self._messages), TRAINER.set(self._train)
        sys.setrecursionlimit(sys.getrecursionlimit() + calls)
        try:
            self._answer_rest()
        finally:
            sys.setrecursionlimit(sys.getrecursionlimit() - calls)  # parked rounds may have raised it too
            TRAINER.reset(before)
        return self._replies

    def _answer_rest(self) -> None:
        for message in self._rest:
            self._replies.append(self._nodes.answer(message))

    def _train(self, training: Training) -> Trained:
        """Train this round, as a `Trainer`: the rounds of the other messages are loaded first."""
        if isinstance(own := row_of(training), str):
            log_once(f"engine.together has no effect, clients train one after another: {own}")
            return train(training)
        self._rows.append(own)
        self._answer_rest()
        if self._rows:  # so this client is the last one
            try:
                self._train_all(self._rows)
            finally:
                self._rows.clear()
        return own.finished()


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
        replies = _Nested(self.nodes, messages, functools.partial(self._train, exchange)).answer()
        return {reply.metadata.src_node_id: reply for reply in replies}

    def _train(self, exchange: Callable[[Contributions], Agreement], rows: Sequence[Row]) -> None:
        if len(rows) < len(self.queries):
            return  # some cannot train at once, or have failed
        node_of = dict(zip(rows, self.queries, strict=True))  # rounds wait in the order of their messages
        try:
            train_exchanging(rows, functools.partial(self._ask, exchange, node_of))
        except Exception as error:
            leave_alone(rows, error)
            return
        self._trained = True
        for each, node in node_of.items():
            if node not in self._last:
                each.forget()  # it was left out, so its round must fail, and leave its state as it is

    def _ask(
        self,
        exchange: Callable[[Contributions], Agreement],
        node_of: Mapping[Row, int],
        contributions: Mapping[Row, Contribution],
    ) -> Agreement:
        agreement = exchange({node_of[each]: contribution for each, contribution in contributions.items()})
        for each, node in node_of.items():
            if node in self._last:  # the train messages bring the last agreement, and records for the rules
                each.training.records.update(other_arrays(self._last[node].content))
        return agreement


class TogetherPool(Pool):
    """Serves the nodes in this process, `most` of them at a time."""

    def __init__(self, nodes: Nodes, on_reply: OnReply, most: int) -> None:
        super().__init__(nodes, on_reply)
        self._most = min(most, _MOST)
        self._cohorts: list[Cohort] = []  # those that wait for an exchange

    def put(self, messages: Sequence[Message]) -> None:
        step = config_of(messages[0].content).get(protocol.EXCHANGE_STEP) if messages else None
        if step == 0:
            self._begin(messages)
        elif not step or not self._cohorts:  # an ordinary round, or clients that are parked one by one
            self._answer(messages)
        elif messages[0].metadata.message_type == MessageType.TRAIN:
            self._finish(messages)
        else:
            agreement = agreement_from_records(messages[0].content)
            nodes = [message.metadata.dst_node_id for message in messages]
            self._reply(messages, self.continue_parked(nodes, agreement, 0))

    def _at_once(self, messages: Sequence[Message]) -> Iterator[Sequence[Message]]:
        for start in range(0, len(messages), self._most):
            yield messages[start : start + self._most]

    def _answer(self, messages: Sequence[Message]) -> None:
        """Answer messages that wait for no exchange."""
        for some in self._at_once(messages):
            for reply in _Nested(self.nodes, some, train_rows).answer():
                self.on_reply(reply)

    def _begin(self, messages: Sequence[Message]) -> None:
        self.close()
        for some in self._at_once(messages):
            cohort = Cohort(self.nodes, some)
            if _has_mods(self.nodes, some[0]) or (contributions := cohort.advance()) is None:
                self._answer(some)
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
        self._answer([message for message in messages if message.metadata.dst_node_id not in replies])
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
