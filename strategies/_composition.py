"""What strategies guarantee to those around them, which decides what composes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fedbn_flwr.errors import SettingsError

from ._foreign import Foreign
from ._rule import BaseStrategy, Rule

# By name; a rule breaks some of them, restores some, and a wrapper needs some. A wrapper may need others than these.
GUARANTEES: Mapping[str, str] = {
    "inside": "it may be inside another rule",
    "mean": "the mean of the replies is enough for it, together with the number of clients",
    "known": "this is known of it, and it does not need one reply per client either",
    "statistics": "the statistics of its model are means of the clients' statistics",
    "weights": "it reports the weights of its mean",
}


def broken(rule: Rule) -> Mapping[str, str]:
    """The guarantees that a rule breaks by itself, each with the reason."""
    if type(rule).weights in (Rule.weights, BaseStrategy.weights, Foreign.weights):
        return rule.breaks
    # Whatever it declares: a mean is weighted already.
    return {"mean": "has weights() of its own, which need the single replies", **rule.breaks}


def guaranteed(rule: Rule, needs: Iterable[str]) -> frozenset[str]:
    """Those of the needs that the rule guarantees, along with those inside it."""
    found = needs = frozenset(needs)
    for each in reversed(rule.chain):
        found = found - broken(each).keys() | (needs & each.restores)
    return found


def check_composition(outer: Rule, needs: Mapping[str, str]) -> None:
    """Raise SettingsError if those inside `outer` do not guarantee what it needs; `needs` has the error's rest."""
    needs = {"inside": "{outer} cannot wrap it; expected {inside}({outer}(...), ...)", **needs}
    inner = outer.chain[1:]
    missing = needs.keys() - guaranteed(inner[0], needs)
    for need in (each for each in needs if each in missing):
        inside = next(rule for rule in reversed(inner) if need in broken(rule))
        rest = needs[need].format(inside=inside, outer=outer)
        raise SettingsError(f"{inside} {broken(inside)[need]}, and {rest}")
