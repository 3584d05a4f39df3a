"""Rules compose by wrapping, for instance `FixBN(FedProx(...), freeze_round=50)`, as Flower's privacy strategies do.

A strategy that is no rule of this package, Flower's own or one of another project, is the innermost rule as `Foreign`.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, cast

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import Result, Strategy
from flwr.serverapp.strategy.fedopt import FedOpt

from fedbn_flwr import seeding
from fedbn_flwr.errors import SettingsError
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.aggregate import Arrays, fault
from fedbn_flwr.messages.arrays import configs_in, pack, record_of, unpack
from fedbn_flwr.messages.reply import Reply, number_problem, with_arrays, with_content
from fedbn_flwr.messages.votes import common_metrics, fault_problems, overflow
from fedbn_flwr.norms.roles import roles, split_by_role

from ._rule import NOISED, EvaluateFn, Leaf, Round, Rule, restore, state_of


class Wrapper(Rule):
    """A rule around another strategy, which it extends.

    Its instructions and records are added to the messages of the wrapped strategy. Hooks that it does not override are
    those of the wrapped strategy, and so are evaluation and summary. `needs` are the properties that the strategies
    inside must have (`check_composition`), each with the rest of the error.
    """

    inner: type[Strategy] | None = None  # the wrapped class, if the rule creates the wrapped strategy itself

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "traits" in vars(cls):
            raise TypeError(
                f"{cls.__name__} wraps a strategy, whose traits it has; extend them in __init__, after "
                "super().__init__: self.traits = replace(self.traits, ...)"
            )

    def __init__(self, strategy: Strategy, needs: Mapping[str, str] = types.MappingProxyType({})) -> None:
        name, kind = str(self), cast(type, type(strategy))
        if not issubclass(kind, Strategy):
            raise TypeError(
                f"{name} wraps a strategy, for instance {name}(FedAvg(), ...); found "
                f"{kind.__module__}.{kind.__name__}, expected a flwr.serverapp.strategy.Strategy"
            )
        self.strategy = strategy
        self._inside = as_rule(strategy)
        self.chain, self.traits, self.memory = (self, *self._inside.chain), self._inside.traits, self.Memory()
        own = type(self)
        if own.weights is not Rule.weights and own.combine is Rule.combine:  # those inside must use them
            needs = {"weights": "{outer} has others; wrap one of fedbn_flwr.strategies, for instance FedAvg()", **needs}
        check_composition(self, needs)
        if issubclass(kind, Rule) and kind.aggregate_train is not Rule.aggregate_train:
            raise SettingsError(
                f"{kind.__name__} has aggregate_train() of its own, which {name} around it would not call; override "
                "hooks such as combine() or after_round() instead"
            )

    # --- the round ---

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        round = self._begins(server_round, arrays, config, grid)
        keys, records = self._additions(round)
        given = {**round.config, **keys}
        passed = ConfigRecord(given)
        messages = self._inside.configure_train(server_round, arrays, passed, grid)
        # It may change the config of this round and all later ones, as in Flower's tutorial: config["lr"] *= 0.5
        config.update({key: value for key, value in passed.items() if given.get(key) != value})
        # A wrapped FedTAN has completed its exchanges here: only the last messages of its round carry the records.
        if not records:
            return messages
        return [with_content(message, RecordDict({**message.content, **records})) for message in messages]

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        return self._inside.configure_evaluate(server_round, arrays, self._named(config), grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        return self._inside.aggregate_evaluate(server_round, replies)

    def summary(self) -> None:
        self.strategy.summary()

    # --- the run ---

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
        """Run the federation by the `start` of the wrapped strategy, which may be one of the user's."""
        self.begin(num_rounds, initial_arrays)
        train_config, evaluate_config, evaluate_fn = self._of_run(grid, train_config, evaluate_config, evaluate_fn)
        return _calling(self.strategy, self).start(
            grid=grid,
            initial_arrays=initial_arrays,
            num_rounds=num_rounds,
            timeout=timeout,
            train_config=train_config,
            evaluate_config=evaluate_config,
            evaluate_fn=evaluate_fn,
        )


_ROUND = ("configure_train", "aggregate_train", "configure_evaluate", "aggregate_evaluate", "summary")


def _calling(strategy: Strategy, rule: Rule) -> Strategy:
    """A strategy with the attributes and the `start` of `strategy`, where `self.configure_train` etc. are `rule`'s."""
    methods = {name: staticmethod(getattr(rule, name)) for name in _ROUND}
    methods["begin"] = staticmethod(lambda *_: None)  # `rule` has begun
    methods["_of_run"] = staticmethod(lambda grid, *of_run: of_run)
    calling: Strategy = object.__new__(type(type(rule).__name__, (type(strategy),), methods))
    calling.__dict__ = strategy.__dict__
    return calling


def check_composition(outer: Rule, needs: Mapping[str, str]) -> None:
    """Raise SettingsError if a rule inside `outer` lacks something that `outer` needs; `needs` has the error's rest.

    The names of such properties; a rule may add others:

    - `inside`: it may be inside another rule.
    - `mean`: the mean of the replies is enough for it, together with the number of clients.
    - `known`: this is known of it, and it does not need one reply per client either.
    - `statistics`: the statistics of its model are means of the clients' statistics.
    - `weights`: it reports the weights of its mean.
    """
    lacking: dict[str, tuple[Rule, str]] = {}
    for rule in reversed(outer._inside.chain):
        lacks = dict(rule.lacks)
        if type(rule).weights not in (Rule.weights, Leaf.weights, Foreign.weights):  # a mean is weighted already
            lacks.setdefault("mean", "has weights() of its own, which need the single replies")
        lacking = {need: (rule, why) for need, why in lacks.items()} | {
            need: found for need, found in lacking.items() if rule.lacks.get(need) != ""
        }
    always = {"inside": "{outer} cannot be around it; expected {inside}({outer}(...), ...)"}
    for need, reason in {**always, **needs}.items():
        inside, why = lacking.get(need, (outer, ""))
        if why:
            raise SettingsError(f"{inside} {why}, and " + reason.format(inside=inside, outer=outer))


# --- strategies that are not rules of this package ---------------------------

# Strategies whose result depends on the mean of the replies only.
_MEANS = (flower.FedAvg, flower.FedAdam, flower.FedYogi, flower.FedAdagrad, flower.FedAvgM)
_ROBUST = (flower.FedMedian, flower.FedTrimmedAvg, flower.Krum, flower.MultiKrum, flower.Bulyan)
_LACK = (
    ((FedOpt, flower.FedAvgM, flower.QFedAvg), "statistics", "changes statistics by steps of its optimiser"),
    ((flower.QFedAvg,), "mean", "weights the clients by the loss of each"),
    (_ROBUST, "mean", "compares the clients' models"),
    (NOISED, "mean", "clips the changes of the clients and adds noise"),
)

_NOT_SAVED = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, type, functools.partial, Strategy)


class Foreign(Leaf):
    """A strategy that is not a `Rule`: it chooses the clients and combines their replies.

    With a `seed`, this and the round decide where it chooses clients at random. Its attributes are its state. Functions
    and classes are not saved, since a new instance receives them as arguments. A strategy that it wraps is saved in the
    same way. The state of Python's and NumPy's global random generators, which it may use, is not saved.

    Strategies derived from Flower's FedAvg expect one record of arrays and one of metrics in a reply, with the same
    names and keys in all replies; so they receive such replies.
    """

    def __init__(self, strategy: Strategy, seed: int | None = None) -> None:
        super().__init__()
        self.strategy, self.seed = strategy, seed
        key = self._of_some("weighted_by_key")  # of a strategy derived from Flower's FedAvg
        self.weighs, self.weighted_by_key = key is not None, key or protocol.NUM_EXAMPLES
        self._metrics: MetricRecord | None = None
        self._first: bytes | None = None  # the state at the first `begin`
        self.lacks = {"weights": "does not report the weights of its mean"}
        if type(strategy).aggregate_train not in [mean.aggregate_train for mean in _MEANS]:
            self.lacks["known"] = "is not known to compute with nothing but the mean of the replies"
        for each in self.strategies():
            within = "" if each is strategy else f"contains {type(each).__name__}, which "
            self.lacks |= {need: within + why for kinds, need, why in _LACK if isinstance(each, kinds)}
            if isinstance(each, Rule) and (each.traits.kept or each.traits.records):
                self.lacks["inside"] = f"{within}keeps arrays on the clients or adds records"

    def __str__(self) -> str:
        return type(self.strategy).__name__

    def strategies(self) -> list[Strategy]:
        """The strategy and those inside it."""
        found = [self.strategy]
        for each in found:
            found += [value for value in vars(each).values() if isinstance(value, Strategy) and value not in found]
        return found

    def _of_some(self, attribute: str) -> Any:
        """An attribute of the strategy, or of the outermost one inside it that has it."""
        return next((getattr(each, attribute) for each in self.strategies() if hasattr(each, attribute)), None)

    def begin(self, num_rounds: int, arrays: ArrayRecord) -> None:
        """Also reset what an earlier run with this object left in it, such as moments of a server optimiser."""
        super().begin(num_rounds, arrays)
        with suppress(ValueError):  # it cannot be saved
            if self._first is None:
                self._first = state_of(self)
            else:  # by copies, so not in a first run: a list among them may be the caller's
                restore(self, self._first)

    def notes(self) -> Mapping[str, Any]:
        return {} if self.seed is None else {"strategy_of_flower": str(self)}

    # --- the round ---

    def _drawing(self, purpose: str, server_round: int) -> AbstractContextManager[None]:
        if self.seed is None:
            return nullcontext()
        return seeding.streams(seeding.seed_for(self.seed, f"choose-{purpose}", server_round))

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        self._round = Round(server_round, arrays, config, grid)
        self.left_out = []
        seen = record_of(split_by_role(arrays, roles(arrays), self.hidden)[1]) if self.hidden else arrays
        with self._drawing("train", server_round):
            messages = list(self.strategy.configure_train(server_round, seen, config, grid))
        self.asked = [message.metadata.dst_node_id for message in messages]

        def whole(sent: ArrayRecord) -> ArrayRecord:
            return arrays if sent is seen else record_of({**arrays, **sent})

        return [with_arrays(message, whole) for message in messages] if self.hidden else messages

    def unusable(self, reply: Reply, sent: Arrays) -> str | None:
        of_form = fault(reply.arrays, sent) if self.hidden else None  # `MeanStatistics` needs all arrays
        if not self.weighs:
            return of_form
        keys = filter(None, (self.weighted_by_key, self._of_some("train_loss_key")))  # QFedAvg weights by the loss too
        problems = (number_problem(reply.metrics, key) for key in keys)
        return next(filter(None, problems), None) or of_form or overflow(reply.arrays, sent)

    def compare(self, found: Mapping[int, Reply], sent: Arrays) -> dict[int, str]:
        if not self.weighs:
            return {}
        weights = {node: reply.metrics[self.weighted_by_key] for node, reply in found.items()}
        # Krum may choose a reply without examples, and would divide by their sum.
        empty = [node for node, weight in weights.items() if not weight] if any(weights.values()) else []
        problems = dict.fromkeys(empty, f"its {self.weighted_by_key} is 0")
        problems |= fault_problems(found, sent)
        return problems | super().compare({node: each for node, each in found.items() if node not in problems}, sent)

    def weights(self, round: Round, replies: Sequence[Reply]) -> list[float]:
        if not self.weighs and any(number_problem(reply.metrics, self.weighted_by_key) for reply in replies):
            return [1.0] * len(replies)
        weights = super().weights(round, replies)
        # Another strategy may not weight by examples.
        return weights if self.weighs or any(weights) else [1.0] * len(replies)

    def combine(self, round: Round, replies: Sequence[Reply], weights: Sequence[float]) -> Arrays:
        metrics = common_metrics([reply.metrics for reply in replies])
        messages = []
        for reply, numbers in zip(replies, metrics, strict=True):
            of, sent = roles(reply.arrays), reply.arrays
            # QFedAvg takes arrays by their place.
            keys = (key for key in {**round.arrays, **sent} if key in sent and of[key] not in self.hidden)
            arrays = pack({key: sent[key] for key in keys})
            content = RecordDict(
                {**configs_in(reply.message.content), self.arrayrecord_key: arrays, "metrics": numbers}
            )
            messages.append(with_content(reply.message, content))
        model, self._metrics = self.strategy.aggregate_train(round.number, [*messages, *self._errors()])
        return unpack(round.arrays if model is None else model)

    def metrics(self, replies: Sequence[Reply]) -> MetricRecord | None:
        return self._metrics

    # --- evaluation ---

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        with self._drawing("evaluate", server_round):
            return list(self.strategy.configure_evaluate(server_round, arrays, config, grid))

    def evaluated(self, server_round: int, replies: Sequence[Reply], key: str) -> MetricRecord | None:
        messages = [reply.message for reply in replies]
        if self.weighs:
            metrics = [MetricRecord({**reply.metrics, self.weighted_by_key: reply.metrics[key]}) for reply in replies]
            messages = [
                with_content(each, RecordDict({**configs_in(each.content), "metrics": numbers}))
                for each, numbers in zip(messages, common_metrics(metrics), strict=True)
            ]
        return self.strategy.aggregate_evaluate(server_round, [*messages, *self._errors()])

    def _errors(self) -> Sequence[Message]:
        """The refused replies, for the strategy: Flower's only log them, and are given none.

        One around them (for privacy) aggregates nothing if there is an error.
        """
        return [] if hasattr(self.strategy, "weighted_by_key") else self.refused

    def summary(self) -> None:
        self.strategy.summary()

    def _kept(self) -> Any:
        """The attributes of the strategy and of those inside it."""
        return [
            {name: value for name, value in vars(each).items() if not isinstance(value, _NOT_SAVED)}
            for each in self.strategies()
        ]

    def _keep(self, values: Any) -> None:
        for strategy, attributes in zip(self.strategies(), values, strict=True):
            vars(strategy).update(attributes)


def as_rule(strategy: Strategy, seed: int | None = None) -> Rule:
    """The strategy itself if it is a rule; otherwise a rule that forwards every call to it."""
    return strategy if isinstance(strategy, Rule) else Foreign(strategy, seed)
