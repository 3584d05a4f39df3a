"""The strategies that Private must not contain."""

from __future__ import annotations

from flwr.serverapp.strategy import QFedAvg, Strategy

from fedbn_flwr.errors import SettingsError
from fedbn_flwr.norms.roles import Role
from fedbn_flwr.strategies import (
    FLOWER,
    FixBN,
    Rule,
    Traits,
    Wrapper,
    is_ours,
    server_optimiser,
    strategies_in,
    use_of_single_replies,
)

_ROBUST = tuple(of.strategy for of in FLOWER.values() if of.robust)


def check_inside(strategy: Strategy, traits: Traits, statistics: str, mode: str) -> None:
    """Refuse a strategy inside Private that would use or release something without noise."""
    if traits.masked:
        raise SettingsError(
            f"with {type(strategy).__name__} the server cannot clip or check the change of a client, as Private does; "
            "use one of the two"
        )
    for inside in strategies_in(strategy):
        name = type(inside).__name__
        if name.startswith("DifferentialPrivacy"):
            raise SettingsError(f"{name} inside Private would clip and add noise twice; leave one of them out")
        if isinstance(inside, QFedAvg):
            raise SettingsError(f"{name} weights the clients by the loss of each, which Private does not account for")
        # FixBN's criterion works with the private mean.
        extends = isinstance(inside, Wrapper) and is_ours(type(inside))  # the traits are those of the rule inside it
        if isinstance(inside, Rule) and not extends and (why := use_of_single_replies(inside)):
            raise SettingsError(f"{name} {why}, which Private does not account for")
        if isinstance(inside, FixBN) and Role.STATISTICS in inside.freeze and statistics == "freeze":
            raise SettingsError("statistics is 'freeze', and FixBN freezes them too; leave one of them out")
        if isinstance(inside, FixBN) and inside.freeze_round == "auto" and statistics != "noise":
            raise SettingsError(
                f"freeze_round of FixBN is 'auto', but with statistics {statistics!r} the server has none to "
                "measure; expected a round or a fraction of the rounds"
            )
        if isinstance(inside, _ROBUST) or (isinstance(inside, Rule) and inside.bounds is not None):
            raise SettingsError(
                f"{name} compares the clients' models, and Private shows it only their private mean; leave out "
                "its bounds on the influence of one client, which the clip of Private bounds already"
            )
    if traits.traffic is not None or traits.replaces_norm:
        raise SettingsError(f"{type(strategy).__name__} also sends what Private does not account for: {traits.traffic}")
    if not traits.has_global_model:
        raise SettingsError(f"{type(strategy).__name__} sends no model, so there is nothing to make private")
    if traits.returned and mode != "central":
        raise SettingsError(
            f"mode is {mode!r}, but the clients of {type(strategy).__name__} would send arrays that they "
            "did not receive, whose change they do not know; expected global_norm 'initial'"
        )
    if statistics == "noise" and (optimiser := server_optimiser(strategy)) is not None:
        raise SettingsError(
            f"{optimiser} would change statistics by steps of its optimiser; wrap it: "
            f"Private(MeanStatistics({optimiser}(...)), ...)"
        )
