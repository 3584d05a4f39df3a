"""Rules compose by wrapping, for instance `FixBN(FedProx(...), freeze_round=50)`, as Flower's privacy strategies do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import cast

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from fedbn_flwr.errors import SettingsError
from fedbn_flwr.messages.screening import with_records

from ._foreign import as_rule
from ._rule import Round, Rule


class Wrapper(Rule):
    """A rule around another strategy, which it extends.

    Its instructions and records are added to the messages of the wrapped strategy. Hooks that it does not override are
    those of the wrapped strategy, and so are evaluation and summary. `needs` are the properties that the strategies
    inside must have (`check_composition`), each with the rest of the error.
    """

    inner: type[Strategy] | None = None  # the wrapped class, if the rule creates the wrapped strategy itself

    def __init__(self, strategy: Strategy, needs: Mapping[str, str] = MappingProxyType({})) -> None:
        name, given, wrapped = str(self), type(strategy).__name__, cast(object, strategy)
        if not isinstance(wrapped, Strategy):
            old = hasattr(wrapped, "initialize_parameters") and not isinstance(wrapped, type)
            raise TypeError(
                f"{name} wraps a strategy, for instance {name}(FedAvg(), ...); found {given}"
                + (" of Flower's old API; expected one of flwr.serverapp.strategy" if old else "")
            )
        self.strategy = strategy
        self._inside = as_rule(strategy)
        self.chain, self.traits, self.memory = (self, *self._inside.chain), self._inside.traits, self.Memory()
        check_composition(self, needs)
        if isinstance(strategy, Rule) and type(strategy).aggregate_train is not Rule.aggregate_train:
            raise SettingsError(
                f"{given} has aggregate_train() of its own, which {name} around it would not call; override hooks such "
                "as combine() or after_round() instead"
            )

    # --- the round ---

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        self._round = round = Round(server_round, arrays, config, grid)
        keys, records = self._additions(round)
        messages = self._inside.configure_train(server_round, arrays, ConfigRecord({**config, **keys}), grid)
        # A wrapped FedTAN has completed its exchanges here: only the last messages of its round carry the records.
        return with_records(messages, records) if records else messages

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        return self._inside.configure_evaluate(server_round, arrays, config, grid)

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
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run the federation by the `start` of the wrapped strategy, which may be one of the user's."""
        self.begin(num_rounds, initial_arrays)
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
        lacking = {need: (rule, why) for need, why in rule.lacks.items()} | {
            need: found for need, found in lacking.items() if rule.lacks.get(need) != ""
        }
    always = {"inside": "{outer} cannot be around it; expected {inside}({outer}(...), ...)"}
    for need, reason in {**always, **needs}.items():
        inside, why = lacking.get(need, (outer, ""))
        if why:
            raise SettingsError(f"{inside} {why}, and " + reason.format(inside=inside, outer=outer))
