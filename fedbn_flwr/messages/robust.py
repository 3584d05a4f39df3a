"""Aggregation that withstands faulty and malicious clients: bounds on the influence of one client, and robust means.

The median and the trimmed mean are coordinatewise (Yin et al. 2018, https://arxiv.org/abs/1803.01498). Krum (Blanchard
et al. 2017, "Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent") measures distances between
models. It is used as the paper's Multi-Krum: with n clients, f of them malicious, the score of a client is the sum of
its squared distances to its n - f - 2 nearest neighbours, and the new model is the mean of the n - f lowest scores.

A robust mean counts each client once, since a client can report any number of examples. Clients without examples do not
count. Distances and norms are those of weights, gamma and beta: statistics and counters have other scales.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from logging import INFO
from typing import Any, Literal

import numpy as np
from flwr.common import log
from numpy.typing import NDArray

from fedbn_flwr.errors import RunFailed, SettingsError
from fedbn_flwr.norms.roles import Role, roles

from .aggregate import Array, Arrays, cast, normalised, weighted_mean
from .arrays import FlatArrays, flat_block

RobustRule = Literal["median", "trimmed", "krum"]
StatisticsRule = Literal["mean", "median", "trimmed"]
Reduce = Callable[[NDArray[np.float64]], NDArray[np.float64]]  # a row per client to one row

_TRAINED = (Role.WEIGHTS, Role.AFFINE)
_NORMS = (Role.STATISTICS, Role.COUNTER)
_PIECE = 32768  # elements of each client at a time
_SUITS: dict[str | None, StatisticsRule] = {None: "mean", "median": "median", "trimmed": "trimmed", "krum": "median"}


@dataclass(frozen=True)
class Robust:
    """The options of FedAvg that bound the influence of one client, under the same names."""

    robust: RobustRule | None = None
    robust_statistics: StatisticsRule | None = None
    malicious: int | float = 0.2
    max_share: float = 1.0
    clip_norm: float | None = None
    clip_factor: float | None = None
    plausible: float | None = None

    def __post_init__(self) -> None:
        if self.robust not in (None, "median", "trimmed", "krum"):
            raise SettingsError(f"robust is {self.robust!r}; expected 'median', 'trimmed' or 'krum'")
        if self.robust_statistics not in (None, "mean", "median", "trimmed"):
            raise SettingsError(
                f"robust_statistics is {self.robust_statistics!r}; expected 'mean', 'median' or 'trimmed'"
            )
        malicious = self.malicious
        whole = isinstance(malicious, int) and not isinstance(malicious, bool) and malicious >= 1
        if not whole and not (isinstance(malicious, float) and 0 < malicious < 0.5):
            raise SettingsError(
                f"malicious is {malicious!r}; expected a number of clients (1, 2, ...), or a share of them above 0 "
                "and below 0.5"
            )
        if malicious != type(self).malicious and not self._rules & {"trimmed", "krum"}:
            raise SettingsError(
                f"malicious is {malicious!r}, which has no effect without robust: trimmed, robust: krum or "
                "robust_statistics: trimmed"
            )
        if not _is_number(self.max_share) or not 0 < self.max_share <= 1:
            raise SettingsError(f"max_share is {self.max_share!r}; expected a share above 0 and at most 1")
        for name in ("clip_norm", "clip_factor"):
            if (value := getattr(self, name)) is not None and not (_is_number(value) and value > 0):
                raise SettingsError(f"{name} is {value!r}; expected a number above zero")
        if self.plausible is not None and not (_is_number(self.plausible) and self.plausible > 1):
            raise SettingsError(f"plausible is {self.plausible!r}; expected a factor above 1, for instance 10")

    @property
    def statistics(self) -> StatisticsRule:
        """The rule for statistics and for FedTAN's exchanges; by default the one that suits that for weights."""
        return self.robust_statistics or _SUITS[self.robust]

    @property
    def _rules(self) -> set[str | None]:
        return {self.robust, self.statistics}

    def notes(self) -> dict[str, Any]:
        """The options that are on, for the summary."""
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        changed = {name: value for name, value in found.items() if value != getattr(type(self), name)}
        if self._rules & {"trimmed", "krum"}:
            changed["malicious"] = self.malicious
        return changed | ({"robust_statistics": self.statistics} if self.statistics != "mean" else {})

    def refuse(self, options: Sequence[str], reason: str) -> None:
        """Raise SettingsError if one of these options is on."""
        for name in options:
            if (value := getattr(self, name)) != getattr(type(self), name):
                raise SettingsError(f"{name} is {value!r}, but {reason}")

    # --- the number of clients ---

    def assumed(self, clients: int) -> int:
        """The number of malicious clients among this many; a share is rounded up."""
        return self.malicious if isinstance(self.malicious, int) else math.ceil(self.malicious * clients - 1e-9)

    def too_few(self, clients: int) -> str | None:
        """Why this number of clients does not suffice, or None."""
        assumed = self.assumed(clients)
        needed = max(
            {"median": 3, "trimmed": 2 * assumed + 1, "krum": 2 * assumed + 3}.get(str(r), 1) for r in self._rules
        )
        if clients >= needed:
            return None
        option = f"robust: {self.robust}" if self.robust else f"robust_statistics: {self.statistics}"
        bad = f" with malicious: {self.malicious}" if self._rules & {"trimmed", "krum"} else ""
        return f"{option}{bad} needs {needed} clients in a round of {clients}"

    def least(self) -> int:
        """The smallest number of clients that suffices."""
        return next(clients for clients in itertools.count(1) if self.too_few(clients) is None)

    def check_clients(self, clients: int) -> None:
        """Raise SettingsError if the rounds of a run have too few clients."""
        if (reason := self.too_few(clients)) is not None:
            raise SettingsError(f"{reason}; use more clients, or a robust rule that needs fewer")

    # --- the aggregation ---

    def weights(self, weights: Sequence[float]) -> list[float]:
        """The weights of the mean: equal ones for a robust rule, otherwise none above `max_share` of their sum."""
        if self.robust is not None:
            return [float(weight > 0) for weight in weights]
        return capped(weights, self.max_share)

    def combine(self, replies: Sequence[Arrays], weights: Sequence[float], sent: Arrays, what: str) -> Arrays:
        """The new model from the clients' arrays; `sent` is the model that they began with."""
        of = roles(sent)
        trained = [key for key in replies[0] if of[key] in _TRAINED and sent[key].dtype.kind == "f"]
        replies = self.clipped(replies, sent, trained, what)
        if self.robust == "krum":
            used = [reply for reply, weight in zip(replies, weights, strict=True) if weight > 0]
            self._require(len(used), what)
            chosen = krum(used, sent, trained, self.assumed(len(used)))
            model = weighted_mean([used[i] for i in chosen], [1.0] * len(chosen))
        else:
            model = self._average(self.robust or "mean", replies, weights, what)
        if self.statistics == (self.robust or "mean"):
            return model
        norms = [key for key in replies[0] if of[key] in _NORMS]
        parts = [{key: reply[key] for key in norms} for reply in replies]
        return {**model, **self._average(self.statistics, parts, weights, what)}

    def average(self, replies: Sequence[Arrays], weights: Sequence[float], what: str) -> Arrays:
        """The average of the clients' statistics, or of the tensors of an exchange."""
        return self._average(self.statistics, replies, capped(weights, self.max_share), what)

    def outliers(self, replies: Sequence[Arrays]) -> dict[int, str]:
        return self.implausible(replies, sorted(replies[0]))

    def of_exchange(self, kind: str, tensors: Sequence[Arrays], weights: Sequence[float], what: str) -> Arrays:
        """The average of the contributions to an exchange of FedTAN."""
        if kind != "moments":
            return self.average(tensors, weights, what)
        means = self.average([{"mean": each["mean"]} for each in tensors], weights, what)
        # A client's variance around the agreed mean, as in the exchange of "variance".
        around = [each["var"] + (each["mean"].astype(np.float64) - means["mean"]) ** 2 for each in tensors]
        variances = self.average([{"var": each} for each in around], weights, what)
        return {**means, "var": cast(variances["var"], tensors[0]["var"].dtype)}

    def _average(self, rule: str, replies: Sequence[Arrays], weights: Sequence[float], what: str) -> Arrays:
        if rule == "mean":
            return weighted_mean(replies, weights)
        used = [reply for reply, weight in zip(replies, weights, strict=True) if weight > 0]
        self._require(len(used), what)
        return median(used) if rule == "median" else trimmed_mean(used, self.assumed(len(used)))

    def _require(self, clients: int, what: str) -> None:
        if (reason := self.too_few(clients)) is not None:
            raise RunFailed(f"{what}: {reason} that sent a usable reply")

    def clipped(self, replies: Sequence[Arrays], sent: Arrays, trained: Sequence[str], what: str) -> Sequence[Arrays]:
        """The replies, where an update of `trained` with a norm above the bound is shortened to it."""
        if self.clip_norm is None and self.clip_factor is None:
            return replies
        norms = [_update_norm(reply, sent, trained) for reply in replies]
        bound = math.inf if self.clip_norm is None else self.clip_norm
        if self.clip_factor is not None:
            bound = min(bound, self.clip_factor * float(np.median(norms)))
        if longer := sum(norm > bound for norm in norms):
            log(INFO, "%s: clipped %d of %d updates to the norm %.4g, the largest was %.4g", what, longer, len(norms),
                bound, max(norms))  # fmt: skip
        return [
            _shortened(reply, sent, trained, bound / norm) if norm > bound else reply
            for reply, norm in zip(replies, norms, strict=True)
        ]

    def implausible(self, replies: Sequence[Arrays], keys: Sequence[str]) -> dict[int, str]:
        """The reasons why replies are too far from the cohort's median, by their positions.

        Per array: the distance of a client from the coordinatewise median must be at most `plausible` times the norm
        of the median, or times the median of the clients' distances if that is larger. With fewer than three clients
        there is no majority to compare with.
        """
        found: dict[int, str] = {}
        if self.plausible is None or len(replies) < 3:
            return found
        for key in keys:
            rows = np.stack([reply[key].reshape(-1) for reply in replies]).astype(np.float64)
            middle = np.median(rows, axis=0)
            with np.errstate(over="ignore"):
                distances = np.linalg.norm(rows - middle, axis=1)
                scale = max(float(np.linalg.norm(middle)), float(np.median(distances)))
            for i in np.flatnonzero(distances > self.plausible * scale) if scale > 0 else ():
                place = int(np.abs(rows[i] - middle).argmax())
                reason = f"{key!r} has the value {rows[i, place]:.4g} where the clients' median is {middle[place]:.4g}"
                found.setdefault(int(i), f"{reason}, further than plausible: {self.plausible:g} allows")
        return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def capped(weights: Sequence[float], share: float) -> list[float]:
    """The weights, where none is above `share` of their sum; the others keep their ratios.

    If fewer clients than 1 / `share` have a weight above zero, these weights become equal.
    """
    shares = normalised(weights)
    largest = sorted(shares, reverse=True)
    if largest[0] <= share:
        return list(weights)
    for count in range(1, len(shares)):  # the number of weights at the bound
        rest = math.fsum(largest[count:])
        scale = (1 - count * share) / rest if rest > 0 else 0.0
        if scale <= 0:
            break
        if largest[count] * scale <= share:
            return [min(each * scale, share) if each <= largest[count] else share for each in shares]
    return [float(each > 0) for each in shares]


def median(replies: Sequence[Arrays]) -> Arrays:
    """The coordinatewise median, in the dtype of the input."""
    return _coordinatewise(replies, lambda rows: np.median(rows, axis=0))


def trimmed_mean(replies: Sequence[Arrays], trim: int) -> Arrays:
    """The coordinatewise mean without the `trim` smallest and the `trim` largest values, in the dtype of the input."""

    def reduce(rows: NDArray[np.float64]) -> NDArray[np.float64]:
        kept = np.sort(rows, axis=0)[trim : len(rows) - trim]
        return np.asarray(kept[0] + (kept - kept[0]).mean(axis=0))  # the mean of equal values is exactly this value

    return _coordinatewise(replies, reduce)


def _coordinatewise(replies: Sequence[Arrays], reduce: Reduce) -> Arrays:
    first = replies[0]
    if isinstance(first, FlatArrays):
        flat = [reply.flat for reply in replies if isinstance(reply, FlatArrays) and reply.layout is first.layout]
        if len(flat) == len(replies):
            return FlatArrays(first.layout, _reduced(flat, reduce))
    return {
        key: _reduced([reply[key].reshape(-1) for reply in replies], reduce).reshape(first[key].shape) for key in first
    }


def _reduced(rows: Sequence[Array], reduce: Reduce) -> Array:
    result = np.empty(rows[0].size, rows[0].dtype)
    for begin in range(0, result.size, _PIECE):
        piece = slice(begin, begin + _PIECE)
        result[piece] = cast(reduce(np.stack([row[piece] for row in rows]).astype(np.float64)), result.dtype)
    return result


def krum(replies: Sequence[Arrays], sent: Arrays, keys: Sequence[str], malicious: int) -> list[int]:
    """The positions of the n - f replies with the lowest scores, in order; the distances are those of `keys`."""
    count = len(replies)
    products = np.zeros((count, count))  # of updates, whose differences are those of the models
    with np.errstate(over="ignore", invalid="ignore"):
        for key in keys:
            start = sent[key].reshape(-1).astype(np.float64)
            rows = [reply[key].reshape(-1) for reply in replies]
            for begin in range(0, start.size, _PIECE):
                piece = slice(begin, begin + _PIECE)
                updates = np.stack([row[piece] for row in rows]) - start[piece]
                products += updates @ updates.T
        squares = np.diag(products)
        distances = squares[:, None] + squares[None, :] - 2 * products
    # Products of enormous updates overflow: their distances are infinite.
    distances = np.where(np.isnan(distances), np.inf, np.maximum(distances, 0))
    np.fill_diagonal(distances, np.inf)  # no client is its own neighbour
    scores = np.sort(distances, axis=1)[:, : count - malicious - 2].sum(axis=1)
    return sorted(int(i) for i in np.argsort(scores, kind="stable")[: count - malicious])


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
    return flat_block(changed) or changed if isinstance(reply, FlatArrays) else changed
