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

import numpy as np
import torch

from fedbn_flwr.messages.aggregate import Array, Arrays
from fedbn_flwr.norms.roles import MEAN, VARIANCE, Role

_LEAST_VARIANCE = 1e-10  # the smallest variance that counts: batch norm adds 1e-5
_MOST = 20.0  # the largest change of the logarithm of a variance that is applied, so that no value becomes infinite

Change = Mapping[str, Array]  # a change of a model: a vector in float64 for each part
KeysByPart = Mapping[str, Sequence[str]]  # the keys of a model that each part of a change covers


def parts_of(
    arrays: Arrays, role_of: Mapping[str, Role], roles: Collection[Role] = (Role.WEIGHTS, Role.AFFINE, Role.STATISTICS)
) -> KeysByPart:
    """The keys of floating-point arrays with these roles, which a change covers."""
    numbers = [key for key, value in arrays.items() if value.dtype.kind == "f" and role_of[key] in roles]
    statistics = [key for key in numbers if role_of[key] is Role.STATISTICS]
    return {"weights": [key for key in numbers if role_of[key] is not Role.STATISTICS], "statistics": statistics}


def change_of(parts: KeysByPart, before: Arrays, after: Arrays) -> dict[str, Array]:
    def change(part: str, key: str) -> Array:
        if _is_logarithm(part, key):
            return np.asarray(np.log(_variance(after[key])) - np.log(_variance(before[key])))
        return np.asarray((after[key].astype(np.float64) - before[key].astype(np.float64)) / _unit(part, key, before))

    return {
        part: np.concatenate([np.empty(0), *(change(part, key).reshape(-1) for key in keys)])
        for part, keys in parts.items()
    }


def applied(parts: KeysByPart, change: Change, before: Arrays) -> dict[str, Array]:
    """The arrays with the parts' keys, after a change."""
    after = {}
    for part, keys in parts.items():
        pieces = np.split(change[part], np.cumsum([before[key].size for key in keys])[:-1])
        for key, piece in zip(keys, pieces, strict=bool(keys)):
            old, step = before[key], piece.reshape(before[key].shape)
            if _is_logarithm(part, key):
                new = np.maximum(_variance(old) * np.exp(np.clip(step, -_MOST, _MOST)), _LEAST_VARIANCE)
            else:
                new = old.astype(np.float64) + step * _unit(part, key, before)
            largest = float(np.finfo(old.dtype).max)  # noise may exceed the range of the dtype
            after[key] = np.asarray(np.clip(new, -largest, largest).astype(old.dtype))
    return after


def _is_logarithm(part: str, key: str) -> bool:
    return part == "statistics" and key.endswith(VARIANCE)


def _unit(part: str, key: str, before: Arrays) -> Array | float:
    """The standard deviation that belongs to a running mean."""
    variance = before.get(key.removesuffix(MEAN) + VARIANCE) if part == "statistics" else None
    return 1.0 if variance is None else np.sqrt(_variance(variance))


def _variance(values: Array) -> Array:
    return np.maximum(values.astype(np.float64), _LEAST_VARIANCE)


def clipped(vector: Array, limit: float) -> Array:
    """The vector, scaled so that its L2 norm is at most `limit`; zeros if its norm is not finite."""
    with np.errstate(over="ignore", invalid="ignore"):
        norm = float(np.linalg.norm(vector))
    if not math.isfinite(norm):
        return np.zeros_like(vector)
    return vector * (limit / norm) if norm > limit else vector


def gaussian(size: int, deviation: float, seed: int | None) -> Array:
    """Independent normal numbers with mean zero, from a generator with this seed or, if it is None, from the system.

    Unlike NumPy's, the system's random numbers cannot be predicted from earlier ones.
    """
    if seed is not None:
        return np.random.default_rng(seed).normal(0.0, deviation, size)
    bits = np.frombuffer(os.urandom(8 * size), np.uint64) >> np.uint64(12)
    uniform = (bits.astype(np.float64) + 0.5) * 2.0**-52  # exact, and within (0, 1)
    return np.asarray(deviation * torch.special.ndtri(torch.from_numpy(uniform)).numpy())


# --- epsilon and delta -------------------------------------------------------


def _log_ndtr(value: float) -> float:
    """The logarithm of the standard normal distribution function."""
    return float(torch.special.log_ndtr(torch.tensor(value, dtype=torch.float64)))


def delta_of(mu: float, epsilon: float) -> float:
    """The smallest delta of Gaussian mechanisms together, where mu^2 is the sum of 1 / (noise / sensitivity)^2.

    Exact: equation 6 of Balle and Wang 2018 (https://arxiv.org/abs/1805.06530); and adaptive Gaussian mechanisms
    compose to one (Dong, Roth and Su 2022, https://arxiv.org/abs/1905.02383, corollary 3.3).
    """
    if mu == 0:
        return 0.0
    first = _log_ndtr(mu / 2 - epsilon / mu)
    second = epsilon + _log_ndtr(-mu / 2 - epsilon / mu)
    return math.exp(first) * -math.expm1(min(second - first, 0.0))


def epsilon_of(mu: float, delta: float) -> float:
    """The smallest epsilon with `delta_of(mu, epsilon) <= delta`, rounded up by a relative 1e-9 at most."""
    if math.isinf(mu):
        return math.inf
    low, high = 0.0, mu * mu / 2 + mu * math.sqrt(2 * math.log(1 / delta))  # the bound of concentrated privacy
    if delta_of(mu, low) <= delta:
        return 0.0
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if delta_of(mu, middle) <= delta else (middle, high)
    return high
