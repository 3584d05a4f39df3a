"""What a strategy inside Private must not do, by the traits of it and of those inside it."""

from __future__ import annotations

from typing import Any

from flwr.serverapp.strategy import QFedAvg, Strategy

from fedbn_flwr.errors import SettingsError
from fedbn_flwr.norms.roles import Role
from fedbn_flwr.strategies import (
    FLOWER,
    Rule,
    Wrapper,
    as_rule,
    is_ours,
    server_optimiser,
    strategies_in,
    use_of_single_replies,
)

_ROBUST = tuple(of.strategy for of in FLOWER.values() if of.robust)

# The error for each need of a strategy that Private does not fulfil, in the order of the checks. `{name}` is
# the strategy, and `{value}` describes its need.
REFUSED = {
    "open replies": "with {name} the server cannot clip or check the change of a client, as Private does; use one of "
    "the two",
    "own noise": "{name} inside Private would clip and add noise twice; leave one of them out",
    "single replies": "{name} {value}, which Private does not account for",
    "frozen statistics": "statistics is 'freeze', and {name} freezes them too; leave one of them out",
    "statistics": "freeze_round of {name} is 'auto', but with statistics {statistics!r} the server has none to "
    "measure; expected a round or a fraction of the rounds",
    "different models": "{name} compares the clients' models, and Private shows it only their private mean; leave out "
    "its bounds on the influence of one client, which the clip of Private bounds already",
    "other traffic": "{name} also sends what Private does not account for: {value}",
    "no model": "{name} sends no model, so there is nothing to make private",
    "returned roles": "mode is {mode!r}, but the clients of {name} would send arrays that they did not receive, whose "
    "change they do not know; expected global_norm 'initial'",
    "steps of statistics": "{value} would change statistics by steps of its optimiser; wrap it: "
    "Private(MeanStatistics({value}(...)), ...)",
}


def check_inside(strategy: Strategy, statistics: str, mode: str) -> None:
    """Refuse a strategy inside Private that would use or release something without noise."""
    traits = as_rule(strategy).traits
    first: dict[str, Any] = {"open replies": traits.masked}
    last: dict[str, Any] = {
        "other traffic": traits.traffic or traits.replaces_norm,
        "no model": not traits.has_global_model,
        "returned roles": traits.returned and mode != "central",
        "steps of statistics": statistics == "noise" and server_optimiser(strategy),
    }
    each = [(inside, _needs(inside, statistics)) for inside in strategies_in(strategy)]
    for inside, found in [(strategy, first), *each, (strategy, last)]:
        if need := next((need for need in REFUSED if found.get(need)), None):
            about = {"name": type(inside).__name__, "value": found[need], "statistics": statistics, "mode": mode}
            raise SettingsError(REFUSED[need].format(**about))


def _needs(inside: Strategy, statistics: str) -> dict[str, Any]:
    """The needs of one strategy, besides those that its traits have from the strategies inside it."""
    if not isinstance(inside, Rule):
        return {
            "own noise": type(inside).__name__.startswith("DifferentialPrivacy"),
            "single replies": isinstance(inside, QFedAvg) and "weights the clients by the loss of each",
            "different models": isinstance(inside, _ROBUST),
        }
    ours = isinstance(inside, Wrapper) and is_ours(type(inside))  # such as FixBN, whose criterion works with the mean
    return {
        "single replies": not ours and use_of_single_replies(inside),
        "frozen statistics": statistics == "freeze" and Role.STATISTICS in getattr(inside, "freeze", ()),
        "statistics": statistics != "noise" and getattr(inside, "freeze_round", None) == "auto",
        "different models": inside.bounds is not None,
    }
