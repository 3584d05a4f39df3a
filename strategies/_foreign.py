"""Strategies that are not rules of this package: Flower's own, and those of other projects."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import Strategy
from flwr.serverapp.strategy.fedopt import FedOpt

from fedbn_flwr.errors import MessageError, RunFailed
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.aggregate import Arrays, is_finite
from fedbn_flwr.messages.arrays import configs_in, pack, record_of, unpack
from fedbn_flwr.messages.gate import Reply, gate, metrics_of, number_problem, with_content
from fedbn_flwr.messages.screening import common_metrics, evaluation_key, fault_problems, overflow, with_arrays
from fedbn_flwr.norms.roles import roles, split_by_role

from ._records import CannotSave, inside, load, nested, save
from ._rule import Leaf, Round, Rule

# Strategies whose result depends on the mean of the replies only.
_MEANS = (flower.FedAvg, flower.FedAdam, flower.FedYogi, flower.FedAdagrad, flower.FedAvgM)
_ROBUST = (flower.FedMedian, flower.FedTrimmedAvg, flower.Krum, flower.MultiKrum, flower.Bulyan)
_NOISED = tuple(kind for name, kind in vars(flower).items() if name.startswith("DifferentialPrivacy"))
_LACK = (
    ((FedOpt, flower.FedAvgM, flower.QFedAvg), "statistics", "changes statistics by steps of its optimiser"),
    ((flower.QFedAvg,), "mean", "weights the clients by the loss of each"),
    (_ROBUST, "mean", "compares the clients' models"),
    (_NOISED, "mean", "clips the changes of the clients and adds noise"),
)

_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, type, functools.partial)


class Foreign(Leaf):
    """A strategy that is not a `Rule`: it chooses the clients and combines their replies.

    Its attributes are its state. Functions and classes are not saved, since a new instance receives them as arguments.
    A strategy that it wraps is saved in the same way. The state of Python's and NumPy's global random generators, which
    it may use, is not saved.

    Strategies derived from Flower's FedAvg expect one record of arrays and one of metrics in a reply, with the same
    names and keys in all replies; so they receive such replies.
    """

    def __init__(self, strategy: Strategy) -> None:
        super().__init__()
        self.strategy = strategy
        self._weight_key: str | None = self._of_some("weighted_by_key")  # of a strategy derived from Flower's FedAvg
        self.weighted_by_key = self._weight_key or protocol.NUM_EXAMPLES
        self._metrics: MetricRecord | None = None
        self._first: RecordDict | None = None  # the state at the first `begin`
        self.lacks = {"weights": "does not report the weights of its mean"}
        if type(strategy).aggregate_train not in [mean.aggregate_train for mean in _MEANS]:
            self.lacks["known"] = "is not known to compute with nothing but the mean of the replies"
        for each in self.strategies():
            within = "" if each is strategy else f"contains {type(each).__name__}, which "
            self.lacks |= {need: within + why for kinds, need, why in _LACK if isinstance(each, kinds)}

    @property
    def name(self) -> str:
        return type(self.strategy).__name__

    def strategies(self) -> Iterator[Strategy]:
        """The strategy and those inside it."""
        inside: object = self.strategy
        while isinstance(inside, Strategy):
            yield inside
            inside = getattr(inside, "strategy", None)

    def _of_some(self, attribute: str) -> Any:
        """An attribute of the strategy, or of the outermost one inside it that has it."""
        return next((getattr(each, attribute) for each in self.strategies() if hasattr(each, attribute)), None)

    def begin(self, num_rounds: int, arrays: ArrayRecord) -> None:
        """Also reset what an earlier run with this object left in it, such as moments of a server optimiser."""
        super().begin(num_rounds, arrays)
        with suppress(CannotSave):
            if self._first is None:
                self._first = self.state()
            elif self.state() != self._first:
                self.restore(self._first)

    # --- the round ---

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        self.round = Round(server_round, self.num_rounds, arrays, config, grid)
        self.left_out = []
        seen = record_of(split_by_role(arrays, roles(arrays), self.hidden)[1]) if self.hidden else arrays
        messages = list(self.strategy.configure_train(server_round, seen, config, grid))
        self.asked = len(messages)
        if not self.hidden:
            return messages
        whole = {id(seen): arrays}  # the messages of a round share their arrays

        def merged(sent: ArrayRecord) -> ArrayRecord:
            if id(sent) not in whole:
                whole[id(sent)] = record_of({**arrays, **sent})
            return whole[id(sent)]

        return [with_arrays(message, merged) for message in messages]

    def unusable(self, round: Round, reply: Reply) -> str | None:
        if self._weight_key is None:
            return None
        loss_key = self._of_some("train_loss_key")  # QFedAvg weights by the loss too
        problems = (number_problem(reply.metrics, key) for key in (self._weight_key, loss_key) if key)
        return next(filter(None, problems), None) or overflow(reply.arrays, unpack(round.arrays))

    def compare(self, round: Round, found: Mapping[int, Reply]) -> Mapping[int, str]:
        if self._weight_key is None:
            return {}
        weights = {node: reply.number(self._weight_key) for node, reply in found.items()}
        # Krum may choose a reply without examples, and would divide by their sum.
        empty = [node for node, weight in weights.items() if not weight] if any(weights.values()) else []
        problems = dict.fromkeys(empty, f"its {self._weight_key} is 0")
        return problems | fault_problems({node: reply.arrays for node, reply in found.items()}, unpack(round.arrays))

    def weights(self, round: Round, replies: Sequence[Reply]) -> list[float]:
        weights = super().weights(round, replies)
        # Another strategy may not weight by examples.
        return weights if self._weight_key or sum(weights) > 0 else [1.0] * len(replies)

    def combine(self, round: Round, replies: Sequence[Reply], weights: Sequence[float]) -> Arrays:
        metrics = common_metrics([reply.metrics for reply in replies])
        messages = []
        for reply, numbers in zip(replies, metrics, strict=True):
            of, sent = roles(reply.arrays), reply.arrays
            # QFedAvg takes arrays by their place.
            keys = (key for key in {**round.arrays, **sent} if key in sent and of[key] not in self.hidden)
            arrays = pack({key: sent[key] for key in keys})
            configs = configs_in(reply.message.content)
            content = RecordDict({**configs, self.arrayrecord_key: arrays, "metrics": numbers})
            messages.append(with_content(reply.message, content))
        model, self._metrics = self.strategy.aggregate_train(round.number, [*messages, *self._errors()])
        values = unpack(round.arrays if model is None else model)
        if key := next((key for key, value in values.items() if not is_finite(value)), None):
            reason = f"{type(self.strategy).__name__} made a model whose {key!r} is not finite"
            raise RunFailed(f"round {round.number}: {reason}; bound the replies, or use another strategy")
        return values

    def metrics(self, replies: Sequence[Reply]) -> MetricRecord | None:
        return self._metrics

    # --- evaluation ---

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        return self.strategy.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        messages = gate(replies)
        key = self._weight_key and evaluation_key(messages, self._weight_key)

        def read(message: Message) -> Message:
            if key and (problem := number_problem(metrics_of(message.content), key)):
                raise MessageError(problem)
            return message

        usable = self.screen(f"round {server_round}, evaluation", messages, 0, read)
        if key:
            records = [metrics_of(each.content) for each in usable]
            common = common_metrics([MetricRecord({**record, self.weighted_by_key: record[key]}) for record in records])
            contents = [
                RecordDict({**configs_in(each.content), "metrics": m}) for each, m in zip(usable, common, strict=True)
            ]
            usable = [with_content(each, content) for each, content in zip(usable, contents, strict=True)]
        return self.strategy.aggregate_evaluate(server_round, [*usable, *self._errors()])

    def _errors(self) -> list[Message]:
        """The refused replies, for the strategy: Flower's only log them, and are given none.

        One around them (for privacy) aggregates nothing if there is an error.
        """
        return [] if hasattr(self.strategy, "weighted_by_key") else self.refused

    def summary(self) -> None:
        self.strategy.summary()

    # --- the state ---

    def state(self) -> RecordDict:
        values = {name: value for name, value in vars(self.strategy).items() if not isinstance(value, _FUNCTIONS)}
        strategies = {name: values.pop(name) for name, value in list(values.items()) if isinstance(value, Strategy)}
        records = save(values, type(self.strategy).__name__)
        for name, strategy in strategies.items():
            records.update(nested(name, as_rule(strategy).state()))
        return records

    def restore(self, records: RecordDict) -> None:
        for name, value in list(vars(self.strategy).items()):
            if isinstance(value, Strategy):
                as_rule(value).restore(inside(name, records))
        vars(self.strategy).update(load(records))


def as_rule(strategy: Strategy) -> Rule:
    """The strategy itself if it is a rule; otherwise a rule that forwards every call to it."""
    return strategy if isinstance(strategy, Rule) else Foreign(strategy)
