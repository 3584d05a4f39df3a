"""What may be inside what: one comparison of what a rule needs with what the rules inside it lack.

Names of such properties:

- `inside`: it may be inside another rule.
- `mean`: the mean of the replies is enough for it, together with the number of clients.
- `known`: this is known of it, and it does not need one reply per client either.
- `statistics`: the statistics of its model are means of the clients' statistics.
- `weights`: it reports the weights of its mean.

A rule may add others.
"""

from __future__ import annotations

from fedbn_flwr.errors import SettingsError

from ._rule import Rule


def check_composition(outer: Rule) -> None:
    """Raise SettingsError if a rule inside `outer` lacks something that `outer` needs."""
    name = type(outer).__name__
    lacking: dict[str, tuple[str, str]] = {}
    for rule in reversed(list(outer.chain())[1:]):
        lacking = {need: found for need, found in lacking.items() if need not in rule.restores}
        lacking = {need: (rule.name, why) for need, why in rule.lacks.items()} | lacking
    needs = {"inside": "{outer} cannot be around it; expected {inside}({outer}(...), ...)", **outer.needs}
    for need, reason in needs.items():
        if need in lacking:
            inside, why = lacking[need]
            raise SettingsError(f"{inside} {why}, and " + reason.format(inside=inside, outer=name))
