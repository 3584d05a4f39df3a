"""The server's arithmetic on dicts of NumPy arrays, independent of messages, rounds and strategies."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from fedbn_flwr.cores import cores
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


_PIECE = 1 << 15  # elements summed at a time, in the cache; for fewer, threads would wait for Python's global lock
_THREADS = min(8, cores())
_LARGE = 1 << 20  # elements for each thread: starting a thread takes as long as adding about 100,000 elements


def weighted_mean(replies: Iterable[Arrays], weights: Sequence[float]) -> Arrays:
    """The weighted mean of each key, in the dtype of the input.

    Sums are in float64 and in the order of `replies`. So the mean of equal arrays is exactly that array: the mean of
    ten integers 16 is 16. Rounding errors do not grow with the number of clients. Integers are rounded to the nearest;
    booleans are decided by majority. Apart from the replies and the result, it needs little memory.
    """
    total = total_weight(weights)
    given = [reply for reply, _ in zip(replies, weights, strict=True)]
    blocks: dict[object, list[str]] = {}  # keys whose arrays are averaged as one: the small ones of a dtype
    for key, value in given[0].items():
        blocks.setdefault(value.dtype if value.size < _PIECE else key, []).append(key)
    flat = _means([[_joined(reply, keys) for reply in given] for keys in blocks.values()], weights, total)
    means: dict[str, Array] = {}
    for keys, mean in zip(blocks.values(), flat, strict=True):
        means |= zip(keys, np.split(mean, np.cumsum([given[0][key].size for key in keys])[:-1]), strict=True)
    return {key: frozen(means[key].reshape(value.shape)) for key, value in given[0].items()}


def _joined(arrays: Arrays, keys: Sequence[str]) -> Array:
    flat = [arrays[key].reshape(-1) for key in keys]
    return np.concatenate(flat) if len(keys) > 1 else flat[0]


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


def _means(arrays: Sequence[Sequence[Array]], weights: Sequence[float], total: float) -> list[Array]:
    """The mean of the flat arrays of each key; threads share out the pieces of all keys.

    The result does not depend on the number of threads or, unlike results of BLAS, on an element's position. 64-bit
    values are summed as differences from the values with the largest weight, since a float64 sum would round equal
    values.
    """
    largest = max(range(len(weights)), key=weights.__getitem__)
    means = [np.empty(values[0].size, values[0].dtype) for values in arrays]
    pieces = (
        (values, mean, slice(begin, begin + _PIECE))
        for values, mean in zip(arrays, means, strict=True)
        for begin in range(0, mean.size, _PIECE)
    )

    def set_means(pieces: Iterable[tuple[Sequence[Array], Array, slice]]) -> None:
        scratch = np.empty(_PIECE)
        for values, mean, place in pieces:
            start = values[largest][place] if mean.dtype.itemsize > 4 else None
            summed = np.zeros(mean[place].size)
            row = scratch[: summed.size]
            for value, weight in zip(values, weights, strict=True):  # while the sum is in the cache
                if not weight:
                    continue  # zero times a difference that is too large would be NaN
                row[:] = value[place]
                if start is not None:
                    row -= start
                row *= weight
                summed += row
            summed /= total
            whole = summed if start is None else start + summed
            with np.errstate(invalid="ignore"):
                mean[place] = cast(whole, mean.dtype)
            if start is not None and mean.dtype.kind in "iu" and (far := np.abs(whole) >= 2**53).any():
                step = np.rint(np.abs(summed[far])).astype(mean.dtype)  # float64 would round these integers
                mean[place][far] = np.where(summed[far] < 0, start[far] - step, start[far] + step)

    threads = max(1, min(_THREADS, sum(mean.size for mean in means) // _LARGE))
    if threads == 1:
        set_means(pieces)
        return means
    waiting = iter([*pieces])  # an iterator over a list, from which each thread takes its next piece
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(set_means, [waiting] * threads))
    return means


def cast(total: Array, dtype: DType) -> Array:
    """`total` converted to `dtype`; integers are rounded to the nearest."""
    if dtype.kind == "b":
        return np.asarray(total >= 0.5)
    if dtype.kind in "iu" and total.dtype.kind == "f":
        return np.asarray(np.rint(total)).astype(dtype)
    return np.asarray(total).astype(dtype)
