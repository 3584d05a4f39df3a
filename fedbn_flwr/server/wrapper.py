"""Rules compose by wrapping, for instance `FixBN(FedProx(...), freeze_round=50)`, as Flower's privacy strategies do.

Every rule guarantees the following unless it, or a rule it wraps, breaks it; a rule around it can restore it. A wrapper
lists what it needs and can define guarantees of its own:

- `inside`: it can be inside another rule. A rule that breaks this hides the replies of single clients from everybody.
- `mean`: the mean of the replies is enough for it, together with the number of clients.
- `known`: it is known to work when the server has the mean of the replies, and not one reply per client.
- `statistics`: the statistics of its model are means of the clients' statistics.
- `pooled`: a rule around it may combine the clients' statistics in another way.
- `weights`: it reports the weights of its mean.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping
from typing import cast

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedbn_flwr.errors import SettingsError
from fedbn_flwr.norms.roles import NORM_STATE

from .base import Base
from .flower import as_rule
from .hooks import Hooks, evaluation_round
from .round import Rule
from .traits import refuse_bounds

# What a wrapper does not call of the rule that it wraps, and what takes its place.
_INSTEAD = {
    "configure_train": "return config keys from config(), and change messages in outgoing() instead",
    "aggregate_train": "override hooks such as combine() or after_round() instead",
    "start": "override hooks such as begin() or after_round() instead, or start it without the wrapper",
}


class Wrapper(Rule):
    """A strategy around another one, which it extends.

    Its hooks run along with the hooks of the strategies inside. The wrapped strategy evaluates and summarises. `needs`
    are the guarantees that the strategies inside must give, each with the second half of the error.
    """

    wraps: type[Strategy] | None = None  # the wrapped class, if the rule creates the wrapped strategy itself

    def __init__(self, strategy: Strategy, needs: Mapping[str, str] = types.MappingProxyType({})) -> None:
        name, kind = str(self), cast(type, type(strategy))
        if not issubclass(kind, Strategy):
            raise TypeError(
                f"{name} wraps an object of a flwr.serverapp.strategy.Strategy, for instance {name}(FedAvg(), ...); "
                f"found {strategy!r}, a {kind.__module__}.{kind.__name__}"
            )
        self.strategy = strategy
        inside = as_rule(strategy)
        self.chain = (self, *inside.chain)
        self.traits, self.memory = inside.traits | self.traits, self.Memory()
        if "statistics" in self.restores:
            self.base.hidden = NORM_STATE
        if "inside" in self.breaks:
            self.base.has_single_replies = False
        own = type(self)
        if own.weights is not Hooks.weights and own.combine is Hooks.combine:  # those inside must use them
            needs = {"weights": "{outer} has others; wrap one of fedbn_flwr.strategies, for instance FedAvg()", **needs}
        check_composition(self, needs)
        refuse_bounds(name, self.traits, self.base.bounds)
        for method, instead in _INSTEAD.items():
            default = getattr(Rule if issubclass(kind, Rule) else Strategy, method)
            if getattr(kind, method) is not default and (issubclass(kind, Rule) or method == "start"):
                raise SettingsError(
                    f"{kind.__name__} has {method}() of its own, which {name} around it would not call; {instead}"
                )

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        round = evaluation_round(self, server_round, arrays, config, grid)
        return self.chain[1].configure_evaluate(server_round, arrays, round.config, grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        return self.chain[1].aggregate_evaluate(server_round, replies)

    def summary(self) -> None:
        self.strategy.summary()


# --- what composes ---


def check_composition(outer: Hooks, needs: Mapping[str, str]) -> None:
    """Raise SettingsError unless the rules inside `outer` guarantee what it needs.

    `needs` has the second half of the error for each guarantee.
    """
    needs = {"inside": "{outer} cannot wrap it; expected {inside}({outer}(...), ...)", **needs}
    given, inner = {*needs}, outer.chain[1:]
    for rule in reversed(inner):
        given = given - broken_guarantees(rule).keys() | (needs.keys() & rule.restores)
    for need in [need for need in needs if need not in given]:
        inside = next(rule for rule in reversed(inner) if need in broken_guarantees(rule))
        rest = needs[need].format(inside=inside, outer=outer)
        raise SettingsError(f"{inside} {broken_guarantees(inside)[need]}, and {rest}")


# Hooks that may use the replies of single clients.
_OF_SINGLE_REPLIES = ("problem", "combine", "after_round", "incoming", "accepted")


def broken_guarantees(rule: Hooks) -> Mapping[str, str]:
    """The guarantees that a rule breaks by itself, each with the reason.

    These are the ones in `breaks`, and "mean" if a hook that may use single replies is neither the default nor marked
    with `mean_is_enough`. Other weights always break it: a mean is weighted already.
    """
    kind = type(rule)
    for name in _OF_SINGLE_REPLIES:
        hook = getattr(kind, name)
        if hook is not getattr(Hooks, name) and not hasattr(hook, "mean_is_enough"):
            return {
                "mean": f"has {name}() of its own, which may use the replies of single clients "
                "(if their mean is enough for it, mark it with @mean_is_enough)",
                **rule.breaks,
            }
    if kind.weights not in (Hooks.weights, Base.weights):
        return {"mean": "has weights() of its own, which need the single replies", **rule.breaks}
    return rule.breaks
