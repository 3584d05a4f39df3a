"""The interface of bounds on the influence of one client, which `FedAvg(bounds=...)` and FedTAN's exchanges apply."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from fedbn_flwr.errors import SettingsError
from fedbn_flwr.extensions import declared, part

from .aggregate import Arrays


@runtime_checkable
class Bounds(Protocol):
    """What a round asks of bounds; `fedbn_flwr.extensions.bounds` has an implementation."""

    def notes(self) -> Mapping[str, Any]:
        """The bounds that are set, for the summary."""

    def of_updates(self) -> Mapping[str, Any]:
        """Those of them that bound nothing but the clients' updates of the model."""

    def outliers(self, cohort: Sequence[Arrays]) -> Mapping[int, str]:
        """The positions of the clients to leave out, with the reasons; `cohort` has the statistics of each."""

    def weights(self, weights: Sequence[float]) -> list[float]:
        """The weights of the mean."""

    def updated(self, replies: Sequence[Arrays], sent: Arrays, what: str) -> Sequence[Arrays]:
        """The clients' models to average; `sent` is the model that they began with, `what` the round in the log."""


def as_bounds(given: Bounds | Mapping[str, Any] | None) -> Bounds | None:
    """The bounds that an argument means; a mapping, as in an experiment file, has the arguments of the extension's."""
    if given is None or isinstance(given, Bounds):
        return given
    if not isinstance(given, Mapping):
        raise SettingsError(f"bounds is {given!r}; expected settings, for instance {{max_share: 0.2}}, or an object")
    if "Bounds" not in declared("bounds"):
        raise SettingsError("bounds needs the folder fedbn_flwr/extensions/bounds, which is not installed")
    bounds: Bounds = part("bounds", "from_settings")(given)
    return bounds
