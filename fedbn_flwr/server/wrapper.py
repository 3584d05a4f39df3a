"""Rules compose by wrapping, for instance `FixBN(FedProx(...), freeze_round=50)`, as Flower's privacy strategies do."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Mapping
from typing import cast

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from fedbn_flwr.errors import SettingsError

from .composition import check_composition
from .flower import as_rule
from .round import Rule, evaluation_round

# What a wrapper does not call of the rule inside, and the hooks that take its place.
_INSTEAD = {
    "configure_train": "return config keys from config(), and change messages in outgoing() instead",
    "aggregate_train": "override hooks such as combine() or after_round() instead",
}


class Wrapper(Rule):
    """A strategy around another one, which it extends.

    Its hooks are called along with those of the strategies inside (`hooks`). Evaluation and summary are those of the
    wrapped strategy. `needs` are the guarantees that the strategies inside must give (`check_composition`), each with
    the second half of the error.
    """

    inner: type[Strategy] | None = None  # the wrapped class, if the rule creates the wrapped strategy itself

    def __init__(self, strategy: Strategy, needs: Mapping[str, str] = types.MappingProxyType({})) -> None:
        name, kind = str(self), cast(type, type(strategy))
        if not issubclass(kind, Strategy):
            found = f"{kind.__module__}.{kind.__name__}, expected a flwr.serverapp.strategy.Strategy"
            if issubclass(kind, type):
                given = cast(type, strategy).__name__
                found = f"the class {given}; write {given}()"
            raise TypeError(f"{name} wraps a strategy, for instance {name}(FedAvg(), ...); found {found}")
        self.strategy = strategy
        self._inside = inside = as_rule(strategy)
        self.chain, self.base = (self, *inside.chain), inside.base
        self.traits, self.memory = inside.traits | self.traits, self.Memory()
        own = type(self)
        if own.weights is not Rule.weights and own.combine is Rule.combine:  # those inside must use them
            needs = {"weights": "{outer} has others; wrap one of fedbn_flwr.strategies, for instance FedAvg()", **needs}
        check_composition(self, needs)
        for method, instead in _INSTEAD.items() if issubclass(kind, Rule) else ():
            if getattr(kind, method) is not getattr(Rule, method):
                raise SettingsError(
                    f"{kind.__name__} has {method}() of its own, which {name} around it would not call; {instead}"
                )

    # --- the round ---

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        round = evaluation_round(self, server_round, arrays, config, grid)
        return self._inside.configure_evaluate(server_round, arrays, round.config, grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        return self._inside.aggregate_evaluate(server_round, replies)

    def summary(self) -> None:
        self.strategy.summary()

    # --- the run ---

    def _start(self) -> Callable[..., Result]:
        return _calling(self.strategy, self).start


_ROUND = ("configure_train", "aggregate_train", "configure_evaluate", "aggregate_evaluate", "summary")


def _calling(strategy: Strategy, rule: Rule) -> Strategy:
    """A strategy that has the attributes and the `start` of `strategy`, and the rounds of `rule`.

    A `start` of the user's own, for instance one that logs or saves each round, calls `self.configure_train` and so on.
    Here `self` is an object of a derived class, which has those methods of `rule` and shares the attributes.
    """
    methods = {name: staticmethod(getattr(rule, name)) for name in _ROUND} | {
        "begin": staticmethod(lambda *_: None),  # `rule` has begun
        "_run_arguments": staticmethod(lambda grid, *arguments: arguments),
    }
    calling: Strategy = object.__new__(type(type(rule).__name__, (type(strategy),), methods))
    calling.__dict__ = strategy.__dict__
    return calling
