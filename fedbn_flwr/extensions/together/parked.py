"""A pool that trains the clients of a round at once in this process, also in rounds with exchanges (FedTAN).

A client's message is handled up to its training, and there the next client's message is handled in the same way. The
last one trains the loaded rounds of all; then each client continues to its reply, the last one first. So clients differ
from separate ones only in their training: mods and methods that a subclass overrides work, and clients may share the
model, as they do in an experiment. Nested calls take no time; a thread for each client would take about 0.3 ms.

In a round with exchanges these calls are in one thread, which is parked between two exchanges with all clients.
Messages have the same content as for clients that are parked one by one, so server and strategy need not know. If the
clients cannot train at once, or their training fails, each answers the round's messages again by itself.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence

from flwr.app import Error, Message, MessageType, RecordDict

from fedbn_flwr.client.layerwise import Session
from fedbn_flwr.client.training import TRAINER, Trained, Training, train
from fedbn_flwr.engines.capabilities import OnReply
from fedbn_flwr.engines.pool import Nodes, Pool
from fedbn_flwr.errors import log_once
from fedbn_flwr.exchange.codec import Agreement, Contribution, agreement_from_records, contribution_to_records
from fedbn_flwr.extensions import declared
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.arrays import config_of
from fedbn_flwr.messages.reply import other_arrays, with_config

from .groups import Row, leave_alone, row_of, train_exchanging, train_rows

_MOST = 100  # clients at a time, since their calls are nested
_CALLS = 50  # nested calls for each client, at most

# By node.
Messages = Mapping[int, Message]
Contents = Mapping[int, RecordDict | Error]


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
        try:
            own = row_of(training)
        except NotImplementedError as error:
            log_once(f"engine.together has no effect, clients train one after another: {error}")
            return train(training)
        self._rows.append(own)
        self._answer_rest()
        if self._rows:  # so this client is the last one
            try:
                self._train_all(self._rows)
            finally:
                self._rows.clear()
        return own.finished()


class Cohort(Session[Contents, Messages]):
    """A round with exchanges of several clients, whose work is parked in one thread. The result is their replies."""

    def __init__(self, nodes: Nodes, queries: Sequence[Message]) -> None:
        super().__init__(self._answer)
        self.nodes, self.queries = nodes, _by_node(queries)
        self._asked: list[Messages] = [self.queries]  # the round's messages so far
        self._last: Messages = {}  # the train messages, which end the round
        self._trained = False

    def proceed(self, messages: Messages) -> Contents:
        """The contents of the replies to the next messages."""
        self._asked.append(messages)
        message = next(iter(messages.values()))
        if message.metadata.message_type == MessageType.TRAIN:
            self._last = messages
        if (contributions := self.advance(agreement_from_records(message.content))) is not None:
            return contributions
        replies = self.result.result() if self._trained else {node: self._alone(node) for node in messages}
        return {node: reply.error if (reply := replies[node]).has_error() else reply.content for node in messages}

    def _alone(self, node: int) -> Message:
        """The reply of a client that answers all messages of the round by itself, up to its first error."""
        for messages in self._asked:
            if (reply := self.nodes.answer(messages[node])).has_error():
                break
        return reply

    def _answer(self, exchange: Callable[[Contents], Agreement]) -> Messages:
        """Answer all clients; in their training `exchange` waits for agreements."""
        messages = [_train_message(query) for query in self.queries.values()]
        replies = _Nested(self.nodes, messages, functools.partial(self._train, exchange)).answer()
        return {reply.metadata.src_node_id: reply for reply in replies}

    def _train(self, exchange: Callable[[Contents], Agreement], rows: Sequence[Row]) -> None:
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
        exchange: Callable[[Contents], Agreement],
        node_of: Mapping[Row, int],
        contributions: Mapping[Row, Contribution],
    ) -> Agreement:
        agreement = exchange({node_of[each]: contribution_to_records(sent) for each, sent in contributions.items()})
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
        elif step:
            self._proceed(messages)
        else:
            self._answer(messages)

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
                self._reply(cohort.queries, contributions)

    def _proceed(self, messages: Sequence[Message]) -> None:
        """Continue rounds up to their next exchange, or their end."""
        asked, cohorts = _by_node(messages), self._cohorts
        self._cohorts = []
        for cohort in cohorts:
            if some := {node: asked.pop(node) for node in cohort.queries if node in asked}:
                self._reply(some, cohort.proceed(some))
                self._cohorts += [] if cohort.result.done() else [cohort]
            else:  # all of its clients were left out
                cohort.abandon()
        self._answer([*asked.values()])  # of clients that are parked one by one

    def _reply(self, messages: Messages, contents: Contents) -> None:
        for node, message in messages.items():
            self.on_reply(Message(contents[node], reply_to=message))

    def close(self) -> None:
        while self._cohorts:
            self._cohorts.pop().abandon()


def _by_node(messages: Sequence[Message]) -> dict[int, Message]:
    return {message.metadata.dst_node_id: message for message in messages}


def _has_mods(nodes: Nodes, message: Message) -> bool:
    """Whether a mod must see each exchange, or the train message at the end of the round."""
    config = config_of(message.content)
    return getattr(nodes.client_app, "query_mods", True) or not declared("client_mods").keys().isdisjoint(config)


def _train_message(query: Message) -> Message:
    """A message to train the round that begins with `query`, which has the model."""
    content = with_config(query, {}, without=[protocol.EXCHANGE_STEP]).content
    return Message(content, query.metadata.dst_node_id, MessageType.TRAIN)
