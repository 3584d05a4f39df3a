"""What a strategy needs of bounds on the influence of one client, such as `fedbn_flwr.extensions.bounds`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from fedbn_flwr.errors import SettingsError
from fedbn_flwr.messages.aggregate import Arrays

from .traits import Traits


@runtime_checkable
class InfluenceBounds(Protocol):
    """Bounds on the influence of one client."""

    def notes(self) -> Mapping[str, object]:
        """The bounds that are set, by name."""

    def of_updates(self) -> Mapping[str, object]:
        """Those that limit a client's update."""

    def outliers(self, cohort: Sequence[Arrays], keys: Sequence[str]) -> Mapping[int, str]:
        """The clients whose values of these arrays are too far from the others', by position, with the reasons."""

    def weights(self, weights: Sequence[float]) -> Sequence[float]:
        """The weights of the mean, none of which is too large."""

    def clip(self, replies: Sequence[Arrays], sent: Arrays, what: str) -> Sequence[Arrays]:
        """The clients' models, in which no array of `sent` has changed too much; `what` names the round in the log."""


def refuse_bounds(name: str, traits: Traits, bounds: InfluenceBounds | None) -> None:
    """Raise SettingsError if the strategy `name` averages something that its bounds do not limit."""
    if bounds is None:
        return
    refused = bounds.of_updates() if traits.records else {}
    reason = f"{name} averages more than the model, which one client could set to any value"
    if not traits.has_global_model:
        refused, reason = bounds.notes(), f"{name} trains no shared model, so there is nothing for bounds to limit"
    for key, value in refused.items():
        raise SettingsError(f"bounds.{key} is {value!r}, but {reason}")
