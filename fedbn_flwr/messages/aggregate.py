"""The server's arithmetic on dicts of NumPy arrays, independent of messages, rounds and strategies."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from fedbn_flwr.cores import cores
from fedbn_flwr.errors import few
from fedbn_flwr.norms.roles import mean_of

from .arrays import Arrays as Arrays
from .arrays import DType, Values, frozen, variance_keys

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
_LARGEST = 1e280  # the largest float64 that is used: times MOST_EXAMPLES it is finite
_LARGE = 1 << 20  # elements for each thread: starting a thread takes as long as adding about 100,000 elements


def weighted_mean(replies: Iterable[Arrays], weights: Sequence[float]) -> Arrays:
    """The weighted mean of each key, in the dtype of the input.

    Sums are in float64 and in the order of `replies`. So the mean of equal arrays is exactly that array: the mean of
    ten integers 16 is 16. Rounding errors do not grow with the number of clients. Integers are rounded to the nearest;
    booleans are decided by majority. Apart from the replies and the result, it needs little memory.
    """
    total = total_weight(weights)
    given = [reply for reply, _ in zip(replies, weights, strict=True)]
    means = _means([[reply[key].reshape(-1) for reply in given] for key in given[0]], weights, total)
    return {key: frozen(mean.reshape(given[0][key].shape)) for key, mean in zip(given[0], means, strict=True)}


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
    most = {key: min(float(np.finfo(mean[key].dtype).max), _LARGEST) for key in between}
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


def arrays_problem(arrays: Arrays, like: Arrays, expected: Iterable[str] | None = None) -> str | None:
    """The reason why `arrays` must not be aggregated, or None.

    `like` are the arrays that the server sent; `expected` are the keys that the client must send back (by default all).
    NaN, infinity and negative variances are problems, since one such reply makes the global model unusable.
    """
    wanted = set(like if expected is None else expected)
    if missing := sorted(wanted - set(arrays)):
        return f"the reply lacks {few(map(repr, missing), 3)}"
    if extra := sorted(set(arrays) - wanted):
        return f"the reply has {few(map(repr, extra), 3)}, which the server did not request"
    for key, value in arrays.items():
        if value.shape != like[key].shape:
            return f"{key!r} has shape {value.shape}; the server sent shape {like[key].shape}"
        if value.dtype != like[key].dtype:
            return f"{key!r} is {value.dtype}; the server sent {like[key].dtype}"
        if not is_finite(value):
            if not (count := int(value.size - np.isfinite(value).sum())):
                return f"{key!r} has values above {_LARGEST:g}, so its weighted sum may not be finite"
            return f"{key!r} has {count} of {value.size} values that are not finite (the client diverged?)"
    return negative_variance(arrays)


def values_problem(arrays: Arrays) -> str | None:
    """The reason why the values of `arrays` must not be aggregated, or None."""
    return arrays_problem(arrays, arrays) if arrays else None


def is_finite(value: Array) -> bool:
    """Whether a weighted sum of such values is finite."""
    if value.dtype.kind not in "fc":
        return True
    return bool((np.isfinite(value) if value.dtype.itemsize <= 4 else np.abs(value) <= _LARGEST).all())


def negative_variance(arrays: Arrays) -> str | None:
    """The problem of the first running variance with a negative value, or None."""
    for key in variance_keys(arrays):
        if (arrays[key] < 0).any():
            return f"{key!r} has negative values ({arrays[key].min():g})"
    return None


MOST_TIMES = 1000  # the median of the other clients, beyond which a huge value is absurd
# Above it, training fails: the gradient of a squared error of two layers has products of three weights.
_HUGE = float(np.finfo(np.float32).max) ** (1 / 3)  # 7e12


def absurd(replies: Sequence[Arrays], sent: Arrays, squares: Collection[str] | None = None) -> dict[int, str]:
    """Why replies have values that training does not reach, by position.

    A reply is absurd if both are true for one of its arrays:

    - It has a value above 7e12, or above the square of 7e12 in `squares` (by default the running variances).
    - Its largest change, from `sent` or from zero, is more than 1,000 times the median change of the other replies,
      which is itself below that limit: otherwise the whole run has diverged.

    The change alone is not enough. An honest client may train an array that the others have frozen, or its data may
    have other units. In a run that diverged on some clients, their changes were 2.5 million times as large. The value
    says more: features of up to 1e12 have variances of up to 1e24, the largest weight of a run that diverged was 1.9e9,
    and a client above 7e12 is about to send NaN. If all clients had such values, their changes would be alike.

    With fewer than three replies there is no majority to compare with, so none is absurd.
    """
    problems: dict[int, str] = {}
    for i, arrays in enumerate(replies) if len(replies) > 2 else ():
        if largest_of(arrays) <= _HUGE:
            continue  # the common case
        squares = variance_keys(arrays) if squares is None else squares
        for key, value in arrays.items():
            limit = _HUGE**2 if key in squares else _HUGE
            if largest_of({key: value}) <= limit:
                continue
            changes = [_largest_change(reply[key], sent.get(key)) for reply in replies]
            middle = float(np.median([*changes[:i], *changes[i + 1 :]]))
            if middle <= limit and changes[i] > MOST_TIMES * middle:
                problems[i] = (
                    f"{key!r} changed by up to {changes[i]:.2g}, and by {middle:.2g} in the median of the other "
                    f"clients; expected at most {MOST_TIMES:,} times the median for values this large"
                )
                break
    return problems


def largest_of(arrays: Arrays) -> float:
    """The largest absolute value of the floats."""
    floats = [value for value in arrays.values() if value.dtype.kind == "f" and value.size]
    return max((max(-float(value.min()), float(value.max())) for value in floats), default=0.0)


def large_value(model: Arrays) -> str | None:
    """The largest value of a model, in words, if training would fail: above a million, or 1e12 in a variance."""
    sizes = {key: largest_of({key: value}) for key, value in model.items()}
    squares = variance_keys(model)
    large = [key for key, size in sizes.items() if size > (1e12 if key in squares else 1e6)]
    most = max(large, key=sizes.__getitem__, default=None)
    return None if most is None else f"values of up to {sizes[most]:.2g} ({most!r})"


def _largest_change(value: Array, sent: Array | None) -> float:
    return float(np.abs(value.astype(np.float64) - (0.0 if sent is None else sent)).max(initial=0.0))


def initial_problem(arrays: Arrays) -> str | None:
    """The reason why a run must not begin with these arrays, or None."""
    if not arrays:
        return "it has no arrays; send ArrayRecord(model.state_dict())"
    for key, value in arrays.items():
        if value.dtype.kind not in "fiub":
            return f"{key!r} is {value.dtype}; expected real numbers (send real and imaginary parts as two arrays)"
        if not is_finite(value):
            what = "not finite" if not np.isfinite(value).all() else f"above {_LARGEST:g}"
            return f"{key!r} has values that are {what}; if it is a mask, register it with persistent=False"
    if negative := negative_variance(arrays):
        return f"{negative}. If it is not a variance, rename it and its running_mean"
    return None
