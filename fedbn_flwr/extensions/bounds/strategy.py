"""Bounds on the weight, the update and the statistics of one client.

A client can report any number of examples, and send any update and any statistics. The norm of an update covers
weights, gamma and beta, but not statistics and counters, which have other scales.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Annotated

import numpy as np
from annotated_types import Gt, Le, Lt

from fedbn_flwr.declared import checked
from fedbn_flwr.errors import LOG, SettingsError, did_you_mean
from fedbn_flwr.messages.aggregate import Arrays, cast, total_weight
from fedbn_flwr.norms.roles import Role, roles

_TRAINED = (Role.WEIGHTS, Role.AFFINE)
_Share = Annotated[float, Gt(0), Le(1), "a share above 0 and at most 1"]
_Norm = Annotated[float, Gt(0), Lt(math.inf), "a number above zero"]
_Factor = Annotated[float, Gt(1), Lt(math.inf), "a factor above 1, for instance 10"]


@dataclass(frozen=True)
class Bounds:
    """Bounds on the influence of one client.

    Parameters
    ----------
    max_share : float or None (default: None)
        The largest share of one client in the weights of the mean.
    clip_norm : float or None (default: None)
        The largest L2 norm of a client's update of weights, gamma and beta; a longer update is shortened to it.
    clip_factor : float or None (default: None)
        The same bound as a multiple of the median norm of the round's updates.
    plausible : float or None (default: None)
        Leaves out clients whose statistics are too far from the clients' median: further than this factor times the
        norm of the median or the median distance, whichever is larger. It applies to FedTAN's exchanges too.
    """

    max_share: _Share | None = None
    clip_norm: _Norm | None = None
    clip_factor: _Norm | None = None
    plausible: _Factor | None = None

    def notes(self) -> Mapping[str, object]:
        """The bounds that are set, for the summary."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def of_updates(self) -> Mapping[str, object]:
        return {name: value for name, value in self.notes().items() if name.startswith("clip_")}

    def outliers(self, cohort: Mapping[int, Arrays], keys: Sequence[str]) -> dict[int, str]:
        """Why clients are too far from the clients' median, by node.

        In each array, a client's distance from the coordinatewise median may be up to `plausible` times the norm of
        the median or the median of the distances, whichever is larger. With fewer than three clients there is no
        majority to compare with.
        """
        found: dict[int, str] = {}
        if self.plausible is None or len(cohort) < 3:
            return found
        for key in keys:
            rows = np.stack([arrays[key].reshape(-1) for arrays in cohort.values()]).astype(np.float64)
            middle = np.median(rows, axis=0)
            with np.errstate(over="ignore"):
                distances = np.linalg.norm(rows - middle, axis=1)
                scale = max(float(np.linalg.norm(middle)), float(np.median(distances)))
            for node, row, distance in zip(cohort, rows, distances, strict=True):
                if distance > self.plausible * scale:
                    place = int(np.abs(row - middle).argmax())
                    reason = f"{key!r} has the value {row[place]:.4g} where the clients' median is {middle[place]:.4g}"
                    found.setdefault(node, f"{reason}, further than plausible: {self.plausible:g} allows")
        return found

    def weights(self, weights: Sequence[float]) -> list[float]:
        return list(weights) if self.max_share is None else capped(weights, self.max_share)

    def clip(self, replies: Sequence[Arrays], sent: Arrays, what: str) -> Sequence[Arrays]:
        """The clients' models, where updates of the arrays in `sent` are shortened to the bound on their norm."""
        if not self.of_updates():
            return replies
        role_of = roles(sent)
        trained = [k for k in sent if k in replies[0] and role_of[k] in _TRAINED and sent[k].dtype.kind == "f"]
        norms = [_update_norm(reply, sent, trained) for reply in replies]
        by_median = math.inf if self.clip_factor is None else self.clip_factor * float(np.median(norms))
        bound = min(by_median, math.inf if self.clip_norm is None else self.clip_norm)
        if longer := sum(norm > bound for norm in norms):
            LOG.info("%s: clipped %d of %d updates to the norm %.4g, the largest was %.4g", what, longer, len(norms),
                bound, max(norms))  # fmt: skip
        return [
            _shortened(reply, sent, trained, bound / norm) if norm > bound else reply
            for reply, norm in zip(replies, norms, strict=True)
        ]


Bounds.__init__ = checked(Bounds.__init__)  # type: ignore[method-assign]


def from_settings(settings: object) -> Bounds:
    """The bounds in the section `bounds` of an experiment file."""
    if not isinstance(settings, Mapping):
        raise SettingsError(f"bounds is {settings!r}; expected settings, for instance {{max_share: 0.2}}, or an object")
    known = [field.name for field in fields(Bounds)]
    if unknown := [str(key) for key in settings if key not in known]:
        raise SettingsError(f"bounds.{unknown[0]} is not a bound; {did_you_mean(unknown[0], known)}")
    try:
        return Bounds(**settings)
    except SettingsError as error:
        raise SettingsError(f"bounds.{error}") from None


def capped(weights: Sequence[float], share: float) -> list[float]:
    """The weights, with none above `share` of their sum: larger weights are reduced, and the others stay as they are.

    If too few clients (fewer than 1 / `share`) have a weight above zero, each of these weights becomes their median.
    """
    total_weight(weights)  # raises ValueError for invalid weights
    largest = sorted(weights, reverse=True)
    for count in range(len(largest)):  # the number of weights at the bound
        rest, room = math.fsum(largest[count:]), 1 - count * share
        if min(rest, room) <= 0:
            break
        if largest[count] <= (bound := share * rest / room):
            return [min(weight, bound) for weight in weights]
    middle = float(np.median([weight for weight in weights if weight]))
    return [middle if weight else 0.0 for weight in weights]


def _update_norm(reply: Arrays, sent: Arrays, keys: Sequence[str]) -> float:
    with np.errstate(over="ignore"):
        squares = (float(np.sum((reply[key].astype(np.float64) - sent[key]) ** 2)) for key in keys)
        return math.sqrt(sum(squares))


def _shortened(reply: Arrays, sent: Arrays, keys: Sequence[str], scale: float) -> Arrays:
    changed = dict(reply)
    for key in keys:
        start = sent[key].astype(np.float64)
        # With a norm that overflows, the scale is zero.
        changed[key] = cast(start + scale * (reply[key] - start) if scale else start, reply[key].dtype)
    return changed
