"""Strategies without this library's hooks: Flower's, or another project's."""

from __future__ import annotations

import functools
import types
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import Strategy

from fedbn_flwr import seeding
from fedbn_flwr.errors import RunFailed, SettingsError
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.aggregate import Arrays
from fedbn_flwr.messages.arrays import configs_in, pack, record_of, unpack
from fedbn_flwr.messages.gate import form_problems
from fedbn_flwr.messages.limits import form_problem
from fedbn_flwr.messages.reply import Reply, common_metrics, mean_of_metrics, number_problem, with_arrays, with_content
from fedbn_flwr.norms.roles import Role, of_roles, roles
from fedbn_flwr.trees import Tree

from .base import Base
from .round import Rule
from .traits import Round, mean_is_enough

# Flower's strategies for differential privacy, which wrap others.
_NOISED = tuple(kind for name, kind in vars(flower).items() if name.startswith("DifferentialPrivacy"))
_STEPS = (flower.FedAdam, flower.FedYogi, flower.FedAdagrad, flower.FedAvgM)
# Strategies whose result depends on the mean of the replies only.
_MEANS = (flower.FedAvg, *_STEPS)
_ROBUST = (flower.FedMedian, flower.FedTrimmedAvg, flower.Krum, flower.MultiKrum, flower.Bulyan)
_BREAKS = (
    ((*_STEPS, flower.QFedAvg), "statistics", "changes statistics by steps of its optimiser"),
    ((flower.QFedAvg,), "mean", "weights the clients by the loss of each"),
    (_ROBUST, "mean", "compares the clients' models"),
    (_ROBUST, "pooled", "compares the clients' models"),
    (_NOISED, "mean", "clips the changes of the clients and adds noise"),
)

_NOT_SAVED = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, type, functools.partial, Strategy)


class Foreign(Rule, Base):
    """A strategy that is not a `Rule`: it chooses the clients and combines their replies.

    With a `seed`, its random choices of clients depend on the seed and the round alone. Its state consists of its
    attributes and the attributes of the strategies inside it. Functions and classes are not saved, since a new instance
    receives them as arguments. The state of Python's and NumPy's global random generators isn't saved either.

    Strategies derived from Flower's FedAvg expect one record of arrays and one of metrics in a reply, with the same
    names and keys in all replies; so they receive such replies.
    """

    def __init__(self, strategy: Strategy, seed: int | None = None) -> None:
        super().__init__()
        self.strategy, self.seed = strategy, seed
        key = self.find_attribute("weighted_by_key")  # of a strategy derived from Flower's FedAvg
        self.needs_weights, self.weighted_by_key = key is not None, key or protocol.NUM_EXAMPLES
        self._metrics: MetricRecord | None = None
        self._has_trained = False
        self._changed: dict[str, Any] = {}  # by the strategy in the config: Flower's tutorial has lr *= 0.5
        self.breaks = {"weights": "does not report the weights of its mean"}
        if type(strategy).aggregate_train not in [mean.aggregate_train for mean in _MEANS]:
            self.breaks["known"] = "is not known to compute with nothing but the mean of the replies"
        for inner in self.strategies():
            within = "" if inner is strategy else f"contains {type(inner).__name__}, which "
            self.breaks |= {need: within + why for kinds, need, why in _BREAKS if isinstance(inner, kinds)}
            if isinstance(inner, Rule) and (inner.traits.local or inner.traits.records):
                self.breaks["inside"] = f"{within}keeps arrays on the clients or adds records"

    def __str__(self) -> str:
        return type(self.strategy).__name__

    def strategies(self) -> list[Strategy]:
        """The strategy and those inside it."""
        strategies = [self.strategy]
        for strategy in strategies:
            strategies += [
                value for value in vars(strategy).values() if isinstance(value, Strategy) and value not in strategies
            ]
        return strategies

    def find_attribute(self, attribute: str) -> Any:
        """An attribute of the strategy, or of the outermost one inside it that has it."""
        return next((getattr(inner, attribute) for inner in self.strategies() if hasattr(inner, attribute)), None)

    def begin(self, num_rounds: int, arrays: ArrayRecord) -> None:
        """Also begin a rule inside the strategy. Its state is its attributes, so it can train in one run only."""
        if self._has_trained:
            raise SettingsError(
                f"{self} has trained before, and still has that run's state; make a new one for each run"
            )
        super().begin(num_rounds, arrays)
        if inner := next((inner for inner in self.strategies() if isinstance(inner, Rule)), None):
            inner.begin(num_rounds, arrays)

    def notes(self) -> Tree:
        return {} if self.seed is None else {"strategy_of_flower": str(self)}

    # --- the round ---

    def _drawing(self, purpose: str, server_round: int) -> AbstractContextManager[None]:
        seed = None if self.seed is None else seeding.seed_for(self.seed, f"choose-{purpose}", server_round)
        return nullcontext() if seed is None else seeding.streams(seed)

    def train_messages(self, round: Round) -> list[Message]:
        self._has_trained, arrays, shown = True, round.arrays, round.arrays
        config = ConfigRecord({**round.config, **self._changed})
        before = {**config}
        if self.hidden:
            shown = record_of(of_roles(arrays, frozenset(Role) - self.hidden))
        with self._drawing("train", round.number):
            messages = list(self.strategy.configure_train(round.number, shown, config, round.grid))
        self._changed |= {key: value for key, value in config.items() if before.get(key) != value}
        for node, count in Counter(message.metadata.dst_node_id for message in messages).items():
            if count > 1:
                raise RunFailed(
                    f"round {round.number}: {self} sends {count} messages to node {node}; expected one to each node"
                )

        def whole(sent: ArrayRecord) -> ArrayRecord:
            return arrays if sent is shown else record_of({**arrays, **sent})

        return [with_arrays(message, whole) for message in messages] if self.hidden else messages

    def form_problem(self, round: Round, reply: Reply, sent: Arrays) -> str | None:
        form = form_problem(reply.arrays, sent) if self.hidden else None  # `MeanStatistics` needs all arrays
        if not self.needs_weights:
            return form
        keys = filter(None, (self.weighted_by_key, self.find_attribute("train_loss_key")))  # QFedAvg's weights
        problems = (number_problem(reply.metrics, key) for key in keys)
        return next(filter(None, problems), None) or form

    def compare(self, replies: Mapping[int, Reply], sent: Arrays, records: Iterable[str]) -> dict[int, str]:
        if not self.needs_weights:
            return {}
        weights = {node: reply.metrics[self.weighted_by_key] for node, reply in replies.items()}
        # Krum may choose a reply without examples, and would divide by their sum.
        empty = [node for node, weight in weights.items() if not weight] if any(weights.values()) else []
        problems = dict.fromkeys(empty, f"its {self.weighted_by_key} is 0")
        problems |= form_problems({node: reply.arrays for node, reply in replies.items()}, sent)
        left = {node: reply for node, reply in replies.items() if node not in problems}
        return problems | super().compare(left, sent, records)

    @mean_is_enough  # where it is not, `breaks` says why
    def combine(self, round: Round, replies: Sequence[Reply], weights: Sequence[float]) -> Arrays:
        metrics = common_metrics([reply.metrics for reply in replies])
        messages = []
        for reply, numbers in zip(replies, metrics, strict=True):
            role_of, sent = roles(reply.arrays), reply.arrays
            # QFedAvg takes arrays by their place.
            keys = (key for key in {**round.arrays, **sent} if key in sent and role_of[key] not in self.hidden)
            arrays = pack({key: sent[key] for key in keys})
            content = RecordDict(
                {**configs_in(reply.message.content), self.arrayrecord_key: arrays, "metrics": numbers}
            )
            messages.append(with_content(reply.message, content))
        model, self._metrics = self.strategy.aggregate_train(
            round.number, [*messages, *self._errors(self.training.refused)]
        )
        return unpack(round.arrays if model is None else model)

    def metrics(self, replies: Sequence[Reply]) -> MetricRecord | None:
        return self._with_means(self._metrics, replies, self.weighted_by_key)

    # --- evaluation ---

    def evaluate_messages(self, round: Round) -> list[Message]:
        with self._drawing("evaluate", round.number):
            return list(self.strategy.configure_evaluate(round.number, round.arrays, round.config, round.grid))

    def mean_evaluation(self, server_round: int, replies: Sequence[Reply], key: str) -> MetricRecord | None:
        messages = [reply.message for reply in replies]
        if self.needs_weights:
            metrics = [MetricRecord({**reply.metrics, self.weighted_by_key: reply.metrics[key]}) for reply in replies]
            messages = [
                with_content(message, RecordDict({**configs_in(message.content), "metrics": numbers}))
                for message, numbers in zip(messages, common_metrics(metrics), strict=True)
            ]
        theirs = self.strategy.aggregate_evaluate(server_round, [*messages, *self._errors(self.evaluation.refused)])
        return self._with_means(theirs, replies, key)

    def _with_means(self, theirs: MetricRecord | None, replies: Sequence[Reply], key: str) -> MetricRecord | None:
        """The strategy's metrics, and the means of those that some of the clients do not report."""
        if theirs is None or not self.needs_weights:
            return theirs
        common = {*chain.from_iterable(common_metrics([reply.metrics for reply in replies]))}
        means = mean_of_metrics([RecordDict({"metrics": MetricRecord({**reply.metrics})}) for reply in replies], key)
        return MetricRecord({**{name: mean for name, mean in means.items() if name not in common}, **theirs})

    def _errors(self, refused: Sequence[Message]) -> Sequence[Message]:
        """The refused replies, as the strategy sees them.

        Those derived from Flower's FedAvg would only log them, so they get none. With one of Flower's for privacy
        around them, an error would prevent the aggregation.
        """
        return [] if hasattr(self.strategy, "weighted_by_key") else refused

    def summary(self) -> None:
        self.strategy.summary()

    def _state(self) -> object:
        """The attributes of the strategy and of those inside it (of rules, the memory), and what they have changed."""
        return [
            {name: value for name, value in attributes.items() if not isinstance(value, _NOT_SAVED)}
            for attributes in (*map(_attributes, self.strategies()), self._changed)
        ]

    def _load_state(self, values: Any) -> None:
        for attributes, saved in zip((*map(_attributes, self.strategies()), self._changed), values, strict=True):
            attributes.update(saved)


def _attributes(strategy: Strategy) -> dict[str, Any]:
    return vars(strategy.memory if isinstance(strategy, Rule) else strategy)


def as_rule(strategy: Strategy, seed: int | None = None) -> Rule:
    """The strategy itself if it is a rule; otherwise a rule that forwards every call to it."""
    return strategy if isinstance(strategy, Rule) else Foreign(strategy, seed)
