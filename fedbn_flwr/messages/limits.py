"""What arrays must satisfy before anything is computed with them: their form, their size, and how far apart they are.

There is one limit of size: the squares of differences of such values, and sums of them, are finite in their dtype. It
holds for models, records and contributions to exchanges, and in float64 for metrics.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from fedbn_flwr.errors import few

from .arrays import Arrays, DType, Values, variance_keys

MOST_EXAMPLES = 2**31
MOST_TIMES = 1000  # the median of the other clients, beyond which a huge value is absurd
# Above it, training fails: the gradient of a squared error of two layers has products of three weights.
_HUGE = float(np.finfo(np.float32).max) ** (1 / 3)  # 7e12


def largest(dtype: DType, *, is_variance: bool = False) -> float:
    """The largest value that is accepted: 6.5e18 in float32, 90 in float16, and its square in a variance."""
    most = float(np.finfo(dtype).max) / 8
    return most if is_variance else math.sqrt(most)


def size_problem(arrays: Arrays, variances: Collection[str] | None = None) -> str | None:
    """Why the values of arrays are not finite or too large, or None.

    `variances` are the keys with the square of the limit, by default the running variances.
    """
    floats = {key: value for key, value in arrays.items() if value.dtype.kind in "fc"}
    if norm(floats) < min(map(largest, {value.dtype for value in floats.values()}), default=0):
        return None  # nearly always
    variances = variance_keys(arrays) if variances is None else variances
    for key, value in floats.items():
        size, most = largest_of(value), largest(value.dtype, is_variance=key in variances)
        if not size <= most:  # true for NaN
            if count := int(value.size - np.isfinite(value).sum()):
                return f"{key!r} has {count} of {value.size} values that are not finite"
            return f"{key!r} has values of up to {size:.2g}; expected at most {most:.2g} in {value.dtype}"
    return None


def negative_variance(arrays: Arrays, variances: Collection[str] | None = None) -> str | None:
    """The problem of the first variance with a negative value, or None; `variances` as above."""
    for key in variance_keys(arrays) if variances is None else variances:
        if arrays[key].min(initial=0) < 0:
            return f"{key!r} has negative values ({arrays[key].min():g})"
    return None


def values_problem(arrays: Arrays, variances: Collection[str] | None = None) -> str | None:
    """The reason why the values of a client's `arrays` must not be used, or None; `variances` as above."""
    variances = variance_keys(arrays) if variances is None else variances
    problem = size_problem(arrays, variances)
    return f"{problem} (the client diverged?)" if problem else negative_variance(arrays, variances)


def arrays_problem(arrays: Arrays, like: Arrays, expected: Iterable[str] | None = None) -> str | None:
    """The reason why a client's `arrays` must not be aggregated, or None.

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
    return values_problem(arrays)


def initial_problem(arrays: Arrays) -> str | None:
    """The reason why a run must not begin with these arrays, or None."""
    if not arrays:
        return "it has no arrays; send ArrayRecord(model.state_dict())"
    for key, value in arrays.items():
        if value.dtype.kind not in "fiub":
            return f"{key!r} is {value.dtype}; expected real numbers (send real and imaginary parts as two arrays)"
    if problem := size_problem(arrays):
        return f"{problem}. If it is a mask, register it with persistent=False"
    if negative := negative_variance(arrays):
        return f"{negative}. If it is not a variance, rename it and its running_mean"
    return None


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
        if norm(arrays) <= _HUGE:
            continue  # nearly always
        squares = variance_keys(arrays) if squares is None else squares
        for key, value in arrays.items():
            limit = _HUGE**2 if key in squares else _HUGE
            if largest_of(value) <= limit:
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


def large_value(model: Arrays) -> str | None:
    """The largest value of a model, in words, if training would fail: above a million, or 1e12 in a variance."""
    sizes, squares = {key: largest_of(value) for key, value in model.items()}, variance_keys(model)
    large = [key for key, size in sizes.items() if size > (1e12 if key in squares else 1e6)]
    most = max(large, key=sizes.__getitem__, default=None)
    return None if most is None else f"values of up to {sizes[most]:.2g} ({most!r})"


def norm(arrays: Arrays) -> float:
    """The norm of all values of floats; infinite or NaN if one is, or if their squares are too large.

    It is at least as large as each value, and takes a third of the time of all arrays' minimum and maximum.
    """
    return math.sqrt(sum(float(np.vdot(value, value).real) for value in arrays.values() if value.dtype.kind in "fc"))


def largest_of(value: Values) -> float:
    """The largest absolute value of floats; NaN if one is NaN."""
    if value.dtype.kind not in "fc" or not value.size:
        return 0.0
    value = np.abs(value) if value.dtype.kind == "c" else value
    return max(-float(value.min()), float(value.max()))


def _largest_change(value: Values, sent: Values | None) -> float:
    return float(np.abs(value.astype(np.float64) - (0.0 if sent is None else sent)).max(initial=0.0))
