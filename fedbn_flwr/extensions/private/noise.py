"""The arithmetic of differential privacy: a client's change as vectors, clipping, Gaussian noise, epsilon and delta.

A change has two parts with a clipping norm each. `weights` is the difference of all weights, gamma and beta. In
`statistics` the change of a running mean is in units of the standard deviation before it, and that of a running
variance is the change of its logarithm: so all channels have the same scale, and the variance after any change is
positive. Counters and other integers have no part in a change.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedbn_flwr.messages.aggregate import Array, Arrays
from fedbn_flwr.norms.roles import Role

MEAN, VARIANCE = "running_mean", "running_var"
_LEAST_VARIANCE = 1e-10  # a smaller one counts as this: batch norm adds 1e-5
_MOST = 20.0  # the largest change of the logarithm of a variance that is applied, so that no value becomes infinite


@dataclass(frozen=True)
class Change:
    """A change of a model; vectors in float64."""

    weights: Array
    statistics: Array


@dataclass(frozen=True)
class Parts:
    """The keys of a model that a change covers."""

    weights: tuple[str, ...]
    statistics: tuple[str, ...]

    def change(self, before: Arrays, after: Arrays) -> Change:
        weights = [after[key].astype(np.float64) - before[key].astype(np.float64) for key in self.weights]
        statistics = [_statistics_change(key, before, after) for key in self.statistics]
        return Change(_joined(weights), _joined(statistics))

    def apply(self, change: Change, before: Arrays) -> dict[str, Array]:
        """The arrays of these keys after a change."""
        after, start = {}, 0
        for key in self.weights:
            old = before[key]
            step = change.weights[start : start + old.size].reshape(old.shape)
            after[key] = _finite(old.astype(np.float64) + step, old.dtype)
            start += old.size
        start = 0
        for key in self.statistics:
            old = before[key]
            step = change.statistics[start : start + old.size].reshape(old.shape)
            after[key] = _finite(_changed_statistics(key, before, step), old.dtype)
            start += old.size
        return after


def parts_of(
    arrays: Arrays, of: Mapping[str, Role], roles: Collection[Role] = (Role.WEIGHTS, Role.AFFINE, Role.STATISTICS)
) -> Parts:
    """The keys of `arrays` that a change of these roles covers: those with floating-point numbers."""
    numbers = [key for key, value in arrays.items() if value.dtype.kind == "f" and of[key] in roles]
    statistics = [key for key in numbers if of[key] is Role.STATISTICS]
    return Parts(tuple(key for key in numbers if of[key] is not Role.STATISTICS), tuple(statistics))


def _joined(arrays: Sequence[Array]) -> Array:
    return np.concatenate([np.empty(0), *(array.reshape(-1) for array in arrays)])


def _variance(values: Array) -> Array:
    return np.maximum(values.astype(np.float64), _LEAST_VARIANCE)


def _deviation(key: str, before: Arrays) -> Array | float:
    """The standard deviation that belongs to a running mean."""
    variance = before.get(key.removesuffix(MEAN) + VARIANCE)
    return 1.0 if variance is None else np.sqrt(_variance(variance))


def _statistics_change(key: str, before: Arrays, after: Arrays) -> Array:
    if key.endswith(VARIANCE):
        return np.asarray(np.log(_variance(after[key])) - np.log(_variance(before[key])))
    return np.asarray((after[key].astype(np.float64) - before[key].astype(np.float64)) / _deviation(key, before))


def _changed_statistics(key: str, before: Arrays, step: Array) -> Array:
    if key.endswith(VARIANCE):
        changed = _variance(before[key]) * np.exp(np.clip(step, -_MOST, _MOST))
        return np.asarray(np.maximum(changed, _LEAST_VARIANCE))
    return np.asarray(before[key].astype(np.float64) + step * _deviation(key, before))


def _finite(values: Array, dtype: np.dtype[Any]) -> Array:
    """The values in this dtype; noise may exceed its range."""
    largest = np.finfo(dtype).max
    return np.asarray(np.clip(values, -float(largest), float(largest)).astype(dtype))


def clipped(vector: Array, limit: float) -> Array:
    """The vector, scaled so that its L2 norm is at most `limit`; zeros if its norm is not finite."""
    with np.errstate(over="ignore", invalid="ignore"):
        norm = float(np.linalg.norm(vector))
    if not math.isfinite(norm):
        return np.zeros_like(vector)
    return vector * (limit / norm) if norm > limit else vector


def gaussian(size: int, deviation: float, seed: int | None) -> Array:
    """Independent normal numbers with mean zero, from a generator with this seed or, if None, from the system's.

    The system's random numbers cannot be predicted from those seen before, unlike those of NumPy's generators.
    """
    if seed is not None:
        return np.random.default_rng(seed).normal(0.0, deviation, size)
    pairs = (size + 1) // 2
    bits = np.frombuffer(os.urandom(16 * pairs), np.uint64).reshape(2, pairs)
    uniform = ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53  # within (0, 1)
    radius, angle = np.sqrt(-2.0 * np.log(uniform[0])), 2.0 * np.pi * uniform[1]  # Box and Muller 1958
    both = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:size]
    return np.asarray(deviation * both)


# --- epsilon and delta -------------------------------------------------------


def delta_of(mu: float, epsilon: float) -> float:
    """The smallest delta of Gaussian mechanisms together, where mu^2 is the sum of 1 / (noise / sensitivity)^2.

    Exact: equation 6 of Balle and Wang 2018 (https://arxiv.org/abs/1805.06530); and adaptive Gaussian mechanisms
    compose to one (Dong, Roth and Su 2022, https://arxiv.org/abs/1905.02383, corollary 3.3).
    """
    from scipy.special import log_ndtr

    if mu == 0:
        return 0.0
    first = float(log_ndtr(mu / 2 - epsilon / mu))
    second = epsilon + float(log_ndtr(-mu / 2 - epsilon / mu))
    return math.exp(first) * -math.expm1(min(second - first, 0.0))


def epsilon_of(mu: float, delta: float) -> float:
    """The smallest epsilon with `delta_of(mu, epsilon) <= delta`, rounded up by at most 1e-9 of itself."""
    if math.isinf(mu):
        return math.inf
    low, high = 0.0, mu * mu / 2 + mu * math.sqrt(2 * math.log(1 / delta))  # the bound of concentrated privacy
    if delta_of(mu, low) <= delta:
        return 0.0
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if delta_of(mu, middle) <= delta else (middle, high)
    return high


def in_words(report: Mapping[str, Any]) -> str:
    """The report of Private in a sentence."""
    bound = "no bound" if report["epsilon"] is None else f"epsilon {report['epsilon']:.4g}"
    line = f"privacy: {bound} at delta {report['delta']:g} against {report['against']}"
    if not report["private"]:
        line += f"; NOT PRIVATE: {report['not_private_because']}"
    if report.get("not_accounted"):
        line += f"; not accounted for: {', '.join(report['not_accounted'])}"
    return line
