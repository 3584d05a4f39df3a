"""What arrays must satisfy before anything is computed with them: their form, their size, and how far apart they are.

There is one limit of size: the squares of differences of such values, and sums of them, are finite in their dtype. It
holds for models, records and contributions to exchanges, and in float64 for metrics.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping

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
    if _is_small(arrays):
        return None  # nearly always
    variances = variance_keys(arrays) if variances is None else variances
    for key, value in arrays.items():
        if value.dtype.kind not in "fc":
            continue
        size, most = largest_of(value), largest(value.dtype, is_variance=key in variances)
        if not size <= most:  # true for NaN
            if count := int(value.size - np.isfinite(value).sum()):
                return f"{key!r} has {count} of {value.size} values that are not finite"
            return f"{key!r} has values of up to {size:.2g}; expected at most {most:.2g} in {value.dtype}"
    return None


def _is_small(arrays: Arrays) -> bool:
    """Whether no float is near a limit. It takes a third of the time of all arrays' minimum and maximum."""
    floats = [value for value in arrays.values() if value.dtype.kind in "fc"]
    norm = math.sqrt(sum(float(np.vdot(value, value).real) for value in floats))  # infinite or NaN if a value is
    return all(norm <= min(_HUGE, largest(dtype)) for dtype in {value.dtype for value in floats})


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


def form_problem(arrays: Arrays, like: Arrays, expected: Iterable[str] | None = None) -> str | None:
    """Why a client's `arrays` have another form than `like`, the arrays that the server sent, or None.

    `expected` are the keys that the client must send back (by default all).
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
    return None


def arrays_problem(arrays: Arrays, like: Arrays, expected: Iterable[str] | None = None) -> str | None:
    """Why a client's `arrays` must not be aggregated, or None; see `form_problem` for the arguments."""
    return form_problem(arrays, like, expected) or values_problem(arrays)


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


def values_problems(
    cohort: Mapping[int, Arrays], sent: Arrays, variances: Collection[str] | None = None, *, compared: bool = True
) -> dict[int, str]:
    """Why the values of clients must not be used, by client: the problems of `values_problem`, and absurd values.

    NaN, infinity and negative variances are problems, since one such reply makes the global model unusable. Absurd
    values are those that training does not reach. If they are `compared`, a reply is absurd if both are true for one of
    its arrays:

    - It has a value above 7e12, or above the square of 7e12 in `variances` (by default the running variances).
    - Its largest change, from `sent` or from zero, is more than 1,000 times the median change of the other replies,
      which is itself below that limit: otherwise the whole run has diverged.

    The change alone is not enough. An honest client may train an array that the others have frozen, or its data may
    have other units. In a run that diverged on some clients, their changes were 2.5 million times as large. The value
    says more: features of up to 1e12 have variances of up to 1e24, the largest weight of a run that diverged was 1.9e9,
    and a client above 7e12 is about to send NaN. If all clients had such values, their changes would be alike.

    With fewer than three replies there is no majority to compare with, so none is absurd.
    """
    large = {node for node, arrays in cohort.items() if not _is_small(arrays)}  # nearly always empty
    checks = {node: values_problem if node in large else negative_variance for node in cohort}
    problems = {node: why for node, check in checks.items() if (why := check(cohort[node], variances))}
    left = {node: arrays for node, arrays in cohort.items() if node not in problems}
    found = {node: _absurd(node, left, sent, variances) for node in left if node in large and compared}
    return problems | {node: why for node, why in found.items() if why}


def _absurd(node: int, cohort: Mapping[int, Arrays], sent: Arrays, variances: Collection[str] | None) -> str | None:
    squares = variance_keys(cohort[node]) if variances is None else variances
    for key, value in cohort[node].items():
        limit = _HUGE**2 if key in squares else _HUGE
        if largest_of(value) <= limit:
            continue
        start = sent[key] if key in sent and sent[key].shape == value.shape else 0.0
        alike = {other: own[key] for other, own in cohort.items() if key in own and own[key].shape == value.shape}
        changes = {other: float(np.abs(own.astype(np.float64) - start).max()) for other, own in alike.items()}
        change, middle = changes.pop(node), float(np.median([*changes.values()])) if len(alike) > 2 else math.inf
        if middle <= limit and change > MOST_TIMES * middle:
            return (
                f"{key!r} changed by up to {change:.2g}, and by {middle:.2g} in the median of the other clients; "
                f"expected at most {MOST_TIMES:,} times the median for values this large"
            )
    return None


def large_value(model: Arrays) -> str | None:
    """The largest value of a model, in words, if training would fail: above a million, or 1e12 in a variance."""
    sizes, squares = {key: largest_of(value) for key, value in model.items()}, variance_keys(model)
    large = [key for key, size in sizes.items() if size > (1e12 if key in squares else 1e6)]
    most = max(large, key=sizes.__getitem__, default=None)
    return None if most is None else f"values of up to {sizes[most]:.2g} ({most!r})"


def largest_of(value: Values) -> float:
    """The largest absolute value of floats; NaN if one is NaN."""
    if value.dtype.kind not in "fc" or not value.size:
        return 0.0
    value = np.abs(value) if value.dtype.kind == "c" else value
    return max(-float(value.min()), float(value.max()))
