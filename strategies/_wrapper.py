"""Rules compose by wrapping, for instance `FixBN(FedProx(...), freeze_round=50)`, as Flower's privacy strategies do."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from logging import WARNING
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from fedbn_flwr.errors import MessageError, RunFailed, SettingsError
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.aggregate import Arrays, is_finite
from fedbn_flwr.messages.arrays import pack, record_of, unpack
from fedbn_flwr.messages.gate import (
    Reply,
    gate,
    metrics_of,
    number_problem,
    only_arrays,
    read_reply,
    refuse,
    refused,
)
from fedbn_flwr.messages.screening import (
    alike,
    check_some_left,
    evaluation_key,
    fault_problems,
    overflow,
    reason_of,
    refuse_records,
    with_arrays,
    with_metric,
    with_records,
)
from fedbn_flwr.norms.roles import Role

from ._records import CannotSave, inside, load, nested, save
from ._rule import Round, Rule

_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, type, functools.partial)


def as_rule(strategy: Strategy) -> Rule:
    """The strategy itself if it is a rule; otherwise a rule that forwards every call to it."""
    return strategy if isinstance(strategy, Rule) else Foreign(strategy)


class _Around(Rule):
    """Evaluation and the summary are those of `strategy`, the one inside."""

    strategy: Strategy

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        return self.strategy.configure_evaluate(server_round, arrays, config, grid)

    def summary(self) -> None:
        self.strategy.summary()


def strategies_in(strategy: Strategy) -> Iterator[Strategy]:
    """The strategy and those inside it."""
    inside: object = strategy
    while isinstance(inside, Strategy):
        if not isinstance(inside, Foreign):
            yield inside
        inside = getattr(inside, "strategy", None)


class Wrapper(_Around):
    """A rule around another strategy, which it extends.

    Its instructions and records are added to the messages of the wrapped strategy. A reply in which it finds a problem
    reaches the wrapped strategy as an error. Its `combine` returns the new model of the wrapped strategy.
    """

    inner: type[Strategy] | None = None  # the wrapped class, if the rule creates the wrapped strategy itself
    freeze: frozenset[Role] = frozenset()  # the roles that clients are asked to freeze, from some round on

    def __init__(self, strategy: Strategy) -> None:
        given: object = strategy
        if not isinstance(given, Strategy):
            is_old = hasattr(given, "initialize_parameters") and not isinstance(given, type)
            raise TypeError(
                f"{type(self).__name__} wraps a strategy, for instance {type(self).__name__}(FedAvg(), ...); "
                f"found {type(given).__name__}"
                + (" of Flower's old API; expected one of flwr.serverapp.strategy" if is_old else "")
            )
        self.strategy = strategy
        self.rule = as_rule(strategy)
        if self.rule.traits.masked or self.rule.traits.private:
            inside, outside = type(strategy).__name__, type(self).__name__
            raise SettingsError(f"{outside} cannot be around {inside}; expected {inside}({outside}(...), ...)")
        self.traits = self.rule.traits
        self.shares = self.rule.shares
        self.bounds = self.rule.bounds
        self.weighted_by_key = self.rule.weighted_by_key
        self.memory = self.Memory()
        self.round: Round | None = None
        self._failed: list[Message] = []  # replies of this round that the wrapped strategy receives as errors
        self._metrics: MetricRecord | None = None

    @property
    def innermost(self) -> Strategy:
        """The strategy that chooses the clients."""
        return list(strategies_in(self.strategy))[-1]

    @property
    def known_partitions(self) -> Mapping[int, int]:
        """The partitions that nodes have reported to a strategy of ours, by node id."""
        known: Mapping[int, int] = getattr(self.innermost.__dict__.get("memory"), "partitions", {})
        return known

    # --- the hooks, delegated to the wrapped rule ---

    def check(self, num_rounds: int) -> None:
        self.rule.check(num_rounds)

    def begin(self, num_rounds: int, arrays: ArrayRecord) -> None:
        super().begin(num_rounds, arrays)
        self.rule.begin(num_rounds, arrays)

    def combine(self, round: Round, replies: Sequence[Reply], weights: Sequence[float]) -> Arrays:
        """The new model of the wrapped strategy."""
        messages = [*(reply.message for reply in replies), *self._failed]
        arrays, self._metrics = self.rule.aggregate_train(round.number, messages)
        if arrays is None:
            check_some_left(f"round {round.number}", messages)
        return unpack(round.arrays if arrays is None else arrays)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        metrics = self.rule.aggregate_evaluate(server_round, replies)
        self.used = self.rule.used
        return metrics

    def switched(self, server_round: int) -> bool:
        return self.rule.switched(server_round)

    def global_model(self, round: Round) -> ArrayRecord:
        return self.rule.global_model(round)

    def notes(self) -> Mapping[str, Any]:
        return self.rule.notes()

    # --- the round ---

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        self.round = round = Round(server_round, self.num_rounds, arrays, config, grid)
        extended = ConfigRecord({**config, **self.instructions(round)})
        messages = self.rule.configure_train(server_round, arrays, extended, grid)
        # A wrapped FedTAN has completed its exchanges here: only the last messages of its round carry the records.
        records = {name: pack(values) for name, values in self.records(round).items() if values}
        return with_records(messages, records) if records else messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        round, messages = self.round, gate(replies)
        if round is None or not messages:
            return self.rule.aggregate_train(server_round, messages)
        names = list(self.records(round))
        found: list[Reply] = []
        self._failed = []
        for message in refuse_records(messages, names, unpack(round.arrays)):
            if not message.has_content():
                self._failed.append(message)
                continue
            try:
                reply = read_reply(message, records=names)
                problem = self.problem(round, reply)
            except MessageError as error:
                problem = str(error)
            if problem is None:
                found.append(reply)
            else:
                self._failed.append(refused(message, problem))
        # Flower's strategies add in the order of the replies. Sort by partition: node ids are random in every run.
        found.sort(key=lambda reply: (-1 if reply.partition is None else reply.partition, reply.node))
        weights = self.weights(round, found)
        model = pack(self.combine(round, found, weights))
        self.shares, self.used = self.rule.shares, self.rule.used
        found, weights = self.used_of(found, weights)
        if self.shares is not None:
            weights = list(self.shares.values())
        self.after_round(round, found, weights)
        return model, self._metrics

    def used_of(self, replies: Sequence[Reply], weights: Sequence[float]) -> tuple[list[Reply], list[float]]:
        """The replies that the wrapped strategy used, which may have refused others, and their weights."""
        by_node = {reply.node: (reply, weight) for reply, weight in zip(replies, weights, strict=True)}
        used = [by_node[node] for node in self.rule.used]
        return [reply for reply, _ in used], [weight for _, weight in used]

    # --- the run ---

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run the federation by the `start` of the wrapped strategy, which may be one of the user's."""
        return _calling(self.strategy, self).start(
            grid=self.prepare(grid, initial_arrays, num_rounds),
            initial_arrays=initial_arrays,
            num_rounds=num_rounds,
            timeout=timeout,
            train_config=train_config,
            evaluate_config=evaluate_config,
            evaluate_fn=evaluate_fn,
        )

    def state(self) -> RecordDict:
        return RecordDict({**super().state(), **nested("base", self.rule.state())})

    def restore(self, records: RecordDict) -> None:
        super().restore(records)
        self.rule.restore(inside("base", records))


_ROUND = ("configure_train", "aggregate_train", "configure_evaluate", "aggregate_evaluate", "summary")


def _calling(strategy: Strategy, rule: Rule) -> Strategy:
    """A strategy with the attributes and the `start` of `strategy`, where `self.configure_train` etc. are `rule`'s."""
    methods = {name: staticmethod(getattr(rule, name)) for name in _ROUND}
    methods["prepare"] = staticmethod(lambda grid, *_: grid)  # `rule` is prepared
    calling: Strategy = object.__new__(type(type(rule).__name__, (type(strategy),), methods))
    calling.__dict__ = strategy.__dict__
    return calling


class Foreign(_Around):
    """A strategy that is not a `Rule`: calls are forwarded to it, and its attributes are its state.

    Functions and classes are not saved, since a new instance receives them as arguments. A strategy that it wraps is
    saved in the same way. The state of Python's and NumPy's global random generators, which it may use, is not saved.
    """

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy
        self._weight_key: str | None = self._of_some("weighted_by_key")  # of a strategy derived from Flower's FedAvg
        self.weighted_by_key = self._weight_key or protocol.NUM_EXAMPLES
        self.memory = self.Memory()
        self._sent: Arrays = {}  # the arrays of the round's messages
        self._asked = 0  # the number of these messages
        self._first: RecordDict | None = None  # the state at the first `begin`

    def begin(self, num_rounds: int, arrays: ArrayRecord) -> None:
        """Also reset what an earlier run with this object left in it, such as moments of a server optimiser."""
        super().begin(num_rounds, arrays)
        with suppress(CannotSave):
            if self._first is None:
                self._first = self.state()
            elif self.state() != self._first:
                self.restore(self._first)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        self._sent = unpack(arrays)
        messages = list(self.strategy.configure_train(server_round, arrays, config, grid))
        self._asked = len(messages)
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        replies = list(replies)
        messages = self._screened(f"round {server_round}", replies, trained=True)
        if self._asked and not replies:
            raise RunFailed(f"round {server_round}: 0 of {self._asked} clients answered in time")
        contents = [message.content for message in messages if message.has_content()]
        if contents and self._weight_key and not any(metrics_of(content)[self._weight_key] for content in contents):
            raise RunFailed(f"round {server_round}: the weights of all clients ({self._weight_key}) are zero")
        self.used = [message.metadata.src_node_id for message in messages if message.has_content()]
        arrays, metrics = self.strategy.aggregate_train(server_round, messages)
        values = {} if arrays is None else unpack(arrays)
        if key := next((key for key, value in values.items() if not is_finite(value)), None):
            reason = f"{type(self.strategy).__name__} made a model whose {key!r} is not finite"
            raise RunFailed(f"round {server_round}: {reason}; bound the replies, or use another strategy")
        return arrays, metrics

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        messages = self._screened(f"round {server_round}, evaluation", replies, trained=False)
        self.used = [message.metadata.src_node_id for message in messages if message.has_content()]
        return self.strategy.aggregate_evaluate(server_round, messages)

    def _of_some(self, attribute: str) -> Any:
        """An attribute of the strategy, or of the outermost one inside it that has it."""
        inside: object = self.strategy
        while inside is not None and not hasattr(inside, attribute):
            inside = getattr(inside, "strategy", None)
        return getattr(inside, attribute, None)

    def _screened(self, what: str, replies: Iterable[Message], *, trained: bool) -> list[Message]:
        """The replies, where those that would end or spoil the strategy's aggregation are errors.

        Strategies derived from Flower's FedAvg expect one record of arrays and one of metrics, which have the same
        names and keys in all replies. Of other strategies the replies only pass the gate.
        """
        messages, key = gate(replies), self._weight_key
        if key is None:
            return messages
        messages = list({message.metadata.src_node_id: message for message in messages}.values())  # one for each node
        if not trained and (other := evaluation_key(messages, key)) != key:
            messages = with_metric(messages, key, other)
        loss_key = self._of_some("train_loss_key") if trained else None  # QFedAvg weights by the loss too
        problems: dict[int, str] = {}
        arrays: dict[int, Arrays] = {}
        weights: dict[int, Any] = {}
        for message in filter(Message.has_content, messages):
            node, content = message.metadata.src_node_id, message.content
            try:
                for needed in filter(None, (key, loss_key)):
                    if problem := number_problem(metrics_of(content), needed):
                        raise MessageError(problem)
                if trained:
                    arrays[node], weights[node] = unpack(only_arrays(content)), metrics_of(content)[key]
            except MessageError as error:
                problems[node] = str(error)
        if any(weights.values()):  # Krum may choose a reply without examples, and would divide by their sum
            problems |= {node: f"its {key} is 0" for node, weight in weights.items() if not weight}
        too_large = {node: problem for node, each in arrays.items() if (problem := overflow(each, self._sent))}
        problems |= too_large | fault_problems(arrays, self._sent)
        messages = alike(refuse(messages, problems))
        if trained:  # QFedAvg takes arrays by their place
            check_some_left(what, messages)
            messages = [with_arrays(each, self._in_order) if each.has_content() else each for each in messages]
        for message in messages:
            if message.has_error():
                log(WARNING, "%s: left out node %d: %s", what, message.metadata.src_node_id, reason_of(message))
        # These strategies only log errors. One around them (for privacy) aggregates nothing if there is an error.
        return list(filter(Message.has_content, messages)) if hasattr(self.strategy, "weighted_by_key") else messages

    def _in_order(self, arrays: ArrayRecord) -> ArrayRecord:
        """The arrays in the order of those that were sent."""
        if set(arrays) != set(self._sent) or list(arrays) == list(self._sent):
            return arrays
        return record_of({key: arrays[key] for key in self._sent})

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
