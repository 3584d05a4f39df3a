"""A rule as the strategy that Flower runs: the way of a round, in the order in which things happen."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from fedbn_flwr.declared import checked
from fedbn_flwr.errors import RoundSkipped, RunFailed, few, log_once
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.aggregate import Arrays
from fedbn_flwr.messages.arrays import pack, record_of, unpack
from fedbn_flwr.messages.gate import gate
from fedbn_flwr.messages.limits import values_problems
from fedbn_flwr.messages.quote import shown
from fedbn_flwr.messages.reply import Reply, with_content

from .base import Base
from .hooks import Hooks, evaluation_round
from .poll import Poll, arrays_by_node
from .traits import Round

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]


class Rule(Hooks):
    """A strategy written as hooks. The outermost rule of a chain runs the round; Flower calls only this one."""

    _round: Round | None = None  # the current round of training

    @property
    def base(self) -> Base:
        """The innermost rule of the chain."""
        return cast(Base, self.chain[-1])

    @checked
    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
    ) -> Result:
        """Run the federation, with configs that name the run, by which clients tell it from others."""
        self.base.reply_timeout = timeout
        self.begin(num_rounds, initial_arrays)
        given = {**(train_config or {})}
        name = protocol.run_keys(given) if protocol.RUN in given else _drawn_name()
        train, evaluate = ConfigRecord({**given, **name}), ConfigRecord({**(evaluate_config or {}), **name})

        def evaluate_model(number: int, arrays: ArrayRecord) -> MetricRecord | None:
            assert evaluate_fn is not None
            return evaluate_fn(number, self.global_model(evaluation_round(self, number, arrays, train, grid)))

        return super().start(grid, initial_arrays, num_rounds, timeout, train, evaluate, evaluate_fn and evaluate_model)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The messages of a round, from the model that it begins with."""
        if server_round == 1 and protocol.RUN not in config:
            # A strategy around this one has started the run, as Flower's for privacy do.
            self.begin(0, arrays)
            self._name = _drawn_name()
        round, base = Round(server_round, arrays, self._named(config), grid), self.base
        for rule in self.chain:
            round = replace(round, config=ConfigRecord({**round.config, **rule.config(round)}))
        self._round = round
        messages: Sequence[Message] = base.train_messages(round)
        base.training = base.poll_of(messages, arrays)
        for rule in reversed(self.chain):
            messages = rule.outgoing(round, messages)
        messages = base.with_exchanges(round, messages)
        records = {name: pack(own) for rule in self.chain for name, own in rule.records(round).items() if own}
        if not records:
            return messages
        return [with_content(message, RecordDict({**message.content, **records})) for message in messages]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The new model and the metrics, from the replies."""
        round, base, traits, poll = self._round, self.base, self.traits, self.base.training
        if round is None or not poll.asked:
            return None, None
        received: Sequence[Message] = gate(replies)
        try:
            for rule in self.chain:
                received = rule.incoming(round, received)
        except RoundSkipped:
            base.training = Poll()  # no reply is used
            return round.arrays, MetricRecord({"skipped": 1})
        poll.read(received, base.arrayrecord_key, traits.records)
        # Each reply by itself, then all of them compared with one another.
        sent, what = unpack(round.arrays), f"round {round.number}"
        poll.check(lambda reply: base.form_problem(round, reply, sent))
        poll.leave_out(values_problems(arrays_by_node(poll.usable), sent, compared=traits.may_be_outlier))
        for rule in self.chain:
            poll.check(partial(rule.problem, round))
        if traits.may_be_outlier:
            poll.leave_out(base.compare(poll.usable, sent, traits.records))
        usable = base.clip_updates(round, poll.close(what))
        for rule in reversed(self.chain):
            usable = rule.accepted(round, usable)
        weights = base.bound_weights(what, self._weights(round, usable))
        model = self._model(round, self.combine(round, usable, weights), usable[0].arrays)
        for rule in reversed(self.chain):
            rule.after_round(round, usable, weights)
        return model, base.metrics(usable)

    def _weights(self, round: Round, replies: Sequence[Reply]) -> list[float]:
        """The weights of the replies; RunFailed names the rule whose hook returns something else."""
        given: Any = self.weights(round, replies)
        are_numbers = isinstance(given, Sequence | np.ndarray) and all(
            isinstance(w, int | float | np.number) for w in given
        )
        weights = [float(weight) for weight in given] if are_numbers else []
        author = next(rule for rule in self.chain if type(rule).weights is not Hooks.weights)
        is_right = len(weights) == len(replies) and all(0 <= weight < math.inf for weight in weights)
        if not is_right or (sum(weights) == 0 and type(author).weights is not Base.weights):
            raise RunFailed(
                f"{author}.weights returned {shown(given)} for {len(replies)} replies; expected a number for each, "
                "zero or more, and one above zero"
            )
        return weights

    def _model(self, round: Round, combined: object, reply: Arrays) -> ArrayRecord:
        """The new model; arrays that clients do not send back do not change. RunFailed if it cannot be used."""
        names = "(".join(map(str, self.chain)) + ")" * (len(self.chain) - 1)
        if not isinstance(combined, Mapping):
            raise RunFailed(f"{names}.combine returned {shown(combined)}; expected the new model, a dict of arrays")
        if problem := self.base.model_problem(combined, unpack(round.arrays)):
            raise RunFailed(f"round {round.number}: {names} made a model that cannot be used: {problem}")
        model = pack(combined)
        if list(model) == list(round.arrays):
            return model
        if missing := [key for key in reply if key not in model]:
            log_once(f"{names}.combine doesn't return {few(missing, 3)}: what was sent stays")
        return record_of({**round.arrays, **model})


def _drawn_name() -> Mapping[str, str]:
    return {protocol.RUN: "run", protocol.TOKEN: secrets.token_hex(16)}
