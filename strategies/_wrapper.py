"""Rules compose by wrapping, for instance `FixBN(FedProx(...), freeze_round=50)`, as Flower's privacy strategies do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from fedbn_flwr.errors import SettingsError
from fedbn_flwr.messages.aggregate import Arrays
from fedbn_flwr.messages.arrays import pack
from fedbn_flwr.messages.gate import Reply
from fedbn_flwr.messages.screening import with_records

from ._compose import check_composition
from ._foreign import as_rule as as_rule
from ._records import inside, nested
from ._rule import Leaf, Round, Rule


class Wrapper(Rule):
    """A rule around another strategy, which it extends.

    Its instructions and records are added to the messages of the wrapped strategy. Hooks that it does not override are
    those of the wrapped strategy, and so are evaluation and summary.
    """

    inner: type[Strategy] | None = None  # the wrapped class, if the rule creates the wrapped strategy itself

    def __init__(self, strategy: Strategy) -> None:
        name, given, wrapped = self.name, type(strategy).__name__, cast(object, strategy)
        if not isinstance(wrapped, Strategy):
            old = hasattr(wrapped, "initialize_parameters") and not isinstance(wrapped, type)
            raise TypeError(
                f"{name} wraps a strategy, for instance {name}(FedAvg(), ...); found {given}"
                + (" of Flower's old API; expected one of flwr.serverapp.strategy" if old else "")
            )
        self.strategy = strategy
        self.rule = as_rule(strategy)
        self.traits = self.rule.traits
        self.memory = self.Memory()
        check_composition(self)
        if isinstance(strategy, Rule) and type(strategy).aggregate_train is not Rule.aggregate_train:
            raise SettingsError(
                f"{given} has aggregate_train() of its own, which {name} around it would not call; override hooks such "
                "as combine() or after_round() instead"
            )

    def chain(self) -> Iterator[Rule]:
        yield self
        yield from self.rule.chain()

    @property
    def leaf(self) -> Leaf:
        return self.rule.leaf

    @property
    def weighted_by_key(self) -> str:
        return self.leaf.weighted_by_key

    # --- the hooks, those of the wrapped rule ---

    def check(self, num_rounds: int) -> None:
        self.rule.check(num_rounds)

    def begin(self, num_rounds: int, arrays: ArrayRecord) -> None:
        super().begin(num_rounds, arrays)
        self.rule.begin(num_rounds, arrays)

    def unusable(self, round: Round, reply: Reply) -> str | None:
        return self.rule.unusable(round, reply)

    def weights(self, round: Round, replies: Sequence[Reply]) -> list[float]:
        return self.rule.weights(round, replies)

    def combine(self, round: Round, replies: Sequence[Reply], weights: Sequence[float]) -> Arrays:
        """The new model of the wrapped strategy."""
        return self.rule.combine(round, replies, weights)

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

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        return self.rule.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        return self.rule.aggregate_evaluate(server_round, replies)

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
