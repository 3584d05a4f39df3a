"""The server's arithmetic on dicts of NumPy arrays, independent of messages, rounds and strategies."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from fedbn_flwr.norms.roles import mean_of

from .arrays import Arrays as Arrays
from .arrays import DType, Values, frozen, variance_keys
from .limits import largest

Array = Values


def total_weight(weights: Sequence[float]) -> float:
    """The sum of the weights; ValueError if a weight is negative or infinite, or if all are zero."""
    if wrong := [weight for weight in weights if not math.isfinite(weight) or weight < 0]:
        raise ValueError(f"a weight is {wrong[0]}; expected a finite number, zero or more")
    total = math.fsum(weights)
    if not total > 0:
        raise ValueError("the weights sum to zero; expected one above zero")
    return total


_PIECE = 1 << 16  # elements summed at a time, so that the sum stays in the processor's cache


def weighted_mean(replies: Iterable[Arrays], weights: Sequence[float]) -> Arrays:
    """The weighted mean of each key, in the dtype of the input.

    Sums are in float64 and in the order of `replies`. So the mean of equal arrays is exactly that array: the mean of
    ten integers 16 is 16. Rounding errors do not grow with the number of clients. Integers are rounded to the nearest;
    booleans are decided by majority. A reply without weight has no part, whatever its values are.
    """
    total = total_weight(weights)
    given = [(reply, weight) for reply, weight in zip(replies, weights, strict=True) if weight]
    heaviest, _ = max(given, key=lambda pair: pair[1])
    means: dict[str, Array] = {}
    for key, start in heaviest.items():
        values = [(reply[key].reshape(-1), weight) for reply, weight in given]
        places = [slice(begin, begin + _PIECE) for begin in range(0, max(start.size, 1), _PIECE)]
        pieces = [_mean(start.reshape(-1)[at], [(value[at], p) for value, p in values], total) for at in places]
        means[key] = frozen(np.concatenate(pieces).reshape(start.shape))
    return means


def _mean(start: Array, values: Sequence[tuple[Array, float]], total: float) -> Array:
    """sum_i p_i w_i; for 64-bit values start + sum_i p_i (w_i - start), since a float64 sum would round equal ones.

    It adds one value after another, so an element's mean does not depend on its position, as it would with BLAS.
    """
    dtype, is_wide, summed = start.dtype, start.dtype.itemsize > 4, np.zeros(start.size)
    for value, weight in values:
        row = value.astype(np.float64)
        if is_wide:
            row -= start
        row *= weight
        summed += row
    summed /= total
    if is_wide and dtype.kind in "iu":  # float64 would round large integers
        odd = start % 2  # halves are rounded to even integers
        return np.asarray(start - odd + np.rint(summed + odd).astype(np.int64).astype(dtype))
    with np.errstate(invalid="ignore"):
        return cast(start + summed if is_wide else summed, dtype)


def pooled_mean(replies: Iterable[Arrays], weights: Sequence[float]) -> Arrays:
    """The weighted mean, but with pooled running variances, which include the variance between the clients' means.

    With p_i the weights divided by their sum, mu = sum_i p_i mu_i and var = sum_i p_i (var_i + (mu_i - mu)^2). If mu_i
    and var_i are mean and biased variance of client i's n_i values, and p_i = n_i / n, these are the moments of all
    values together. A `running_var` of PyTorch is not quite that: it averages the *unbiased* variances of batches. So,
    as in the plain mean, the variance within the clients is too large by the factor B / (B - 1), with B values per
    channel in a batch, and the variance between the batches of one client is missing.

    The result is never below the mean of the variances, and it is finite even if a client's mean is huge.
    """
    given = list(replies)
    mean, total = weighted_mean(given, weights), total_weight(weights)
    between: dict[str, Array] = {}
    for reply, weight in zip(given, weights, strict=True):
        for key, value in squared_distance(reply, mean).items() if weight else ():
            between[key] = between.get(key, 0.0) + value * (weight / total)
    most = {key: largest(mean[key].dtype, is_variance=True) for key in between}
    return {**mean, **{key: cast(np.minimum(mean[key] + between[key], most[key]), mean[key].dtype) for key in between}}


def squared_distance(arrays: Arrays, center: Arrays) -> dict[str, Array]:
    """(mu_i - mu)^2 in float64 by the key of the running variance; mu is zero if `center` lacks it."""
    with np.errstate(over="ignore"):
        return {
            key: np.square(np.subtract(arrays[mean_of(key)], center.get(mean_of(key), 0.0), dtype=np.float64))
            for key in variance_keys(arrays)
        }


def cast(total: Array, dtype: DType) -> Array:
    """`total` converted to `dtype`; integers are rounded to the nearest."""
    if dtype.kind == "b":
        return np.asarray(total >= 0.5)
    if dtype.kind in "iu" and total.dtype.kind == "f":
        return np.asarray(np.rint(total)).astype(dtype)
    return np.asarray(total).astype(dtype)
