"""What strategies guarantee to those around them, which decides what composes.

A rule gives these guarantees unless it, or a rule inside it, breaks them; a rule around it may restore them. A wrapper
names those that it needs, and may invent others:

- `inside`: it may be inside another rule. A rule that breaks this hides the replies of single clients from everybody.
- `mean`: the mean of the replies is enough for it, together with the number of clients.
- `known`: it is known to work when the server has the mean of the replies, and not one reply per client.
- `statistics`: the statistics of its model are means of the clients' statistics.
- `pooled`: a rule around it may combine the clients' statistics in another way.
- `weights`: it reports the weights of its mean.
"""

from __future__ import annotations

from collections.abc import Mapping

from fedbn_flwr.errors import SettingsError

from .base import BaseStrategy
from .hooks import Hooks
from .round import Rule


def check_composition(outer: Rule, needs: Mapping[str, str]) -> None:
    """Raise SettingsError unless the rules inside `outer` guarantee what it needs.

    `needs` has the second half of the error for each guarantee.
    """
    needs = {"inside": "{outer} cannot wrap it; expected {inside}({outer}(...), ...)", **needs}
    given, inner = {*needs}, outer.chain[1:]
    for rule in reversed(inner):
        given = given - broken(rule).keys() | (needs.keys() & rule.restores)
    for need in [need for need in needs if need not in given]:
        inside = next(rule for rule in reversed(inner) if need in broken(rule))
        rest = needs[need].format(inside=inside, outer=outer)
        raise SettingsError(f"{inside} {broken(inside)[need]}, and {rest}")


# Hooks that may use the replies of single clients.
_OF_SINGLE_REPLIES = ("question", "problem", "combine", "after_round", "incoming", "accepted")


def broken(rule: Hooks) -> Mapping[str, str]:
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
    if kind.weights not in (Rule.weights, BaseStrategy.weights):
        return {"mean": "has weights() of its own, which need the single replies", **rule.breaks}
    return rule.breaks
