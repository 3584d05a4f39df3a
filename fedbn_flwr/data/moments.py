"""Mean and deviation of each feature or channel: the sums of a part of the data, and the moments of several parts.

The sums are exact, so the moments of a union do not depend on how its rows are split: a federation whose sites agree on
them trains the same model, bit for bit, as a simulation with all data in one place, unless a site must not tell the
sums of a column (`disclosed`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction

import numpy as np
import torch
from numpy.typing import NDArray

from fedbn_flwr.batch import Value
from fedbn_flwr.errors import DataError

from . import Moments
from .examples import MASK, main_input

PARTS = 3  # float64 numbers of an exact sum: 159 bits
ROWS = (
    1 + 2 * PARTS
)  # of an array of sums: the number of values, the parts of their sum, the parts of their squares' sum
_AT_ONCE = 1_024  # examples

Sums = NDArray[np.float64]  # [ROWS, C]


def sums_of(inputs: Value) -> Sums:
    """Those of the columns of [N, C], or of the channels of [N, C, ...], in float32; none of tokens.

    Bytes count from 0 to 1. Missing values (NaN) do not count, nor do padded ones.
    """
    mask = inputs.get(MASK) if isinstance(inputs, Mapping) else None  # [N, last side]
    whole = main_input(inputs)
    if whole.dtype not in (torch.float32, torch.uint8):
        return np.empty((ROWS, 0))
    found = []
    of_all = None if mask is None else mask.view(len(mask), *[1] * (whole.ndim - 2), -1).expand(whole.shape)
    for number, column in enumerate(whole.unbind(1)):
        values = column if of_all is None else column[of_all[:, number]]
        if values.dtype == torch.uint8:  # perhaps more than the memory holds
            counts = sum(some.flatten().bincount(minlength=256) for some in values.split(_AT_ONCE)).tolist()
            total, square = (
                Fraction(sum(value**power * number for value, number in enumerate(counts)), 255**power)
                for power in (1, 2)
            )
        else:
            values = values[~values.isnan()].cpu().double()
            total, square = _sum(values.numpy()), _sum(values.square().numpy())  # squares of 24 bits are exact
        found.append([float(values.numel()), *_parts(total), *_parts(square)])
    return np.array(found).T


def _sum(values: NDArray[np.float64]) -> Fraction:
    """The exact sum, by slices of the values' bits whose sums have no rounding errors (Rump, Ogita and Oishi 2008)."""
    total = Fraction(0)
    while most := float(np.abs(values).max(initial=0)):
        # Above N times the largest value, so that all slices are multiples of one power of two.
        large = math.ldexp(1, math.frexp(most)[1] + (len(values) + 2).bit_length())
        upper = (values + large) - large
        total += Fraction(float(upper.sum()))
        values = values - upper
    return total


def _parts(value: Fraction) -> list[float]:
    parts: list[float] = []
    for _ in range(PARTS):
        parts.append(float(value))
        value -= Fraction(parts[-1])
    return parts


def moments_from(sites: Sequence[Sums], names: Sequence[str] = (), *, told: bool = False) -> Moments:
    """Mean and standard deviation of each column over all sites; a column of equal values has the deviation 1.

    So has a column of which no site told its sums, with the mean 0, where sites keep some of them.
    """
    found = [moments_of(column) for column in np.stack(sites, axis=-1).swapaxes(0, 1)]
    if not told and (empty := [place for place, (count, *_) in enumerate(found) if not count]):
        name = repr(names[empty[0]]) if names else empty[0]
        raise DataError(f"column {name} of the inputs has no value in any row; leave it out of data.inputs")
    return tuple(mean for _, mean, _ in found), tuple(deviation or 1.0 for *_, deviation in found)


def moments_of(column: NDArray[np.float64]) -> tuple[int, float, float]:
    """The number of values of a column, [ROWS] or [ROWS, sites], their mean and their standard deviation; or zeros."""
    count, total, square = totals(column)
    if not count:
        return 0, 0.0, 0.0
    mean, variance = total / count, square / count - (total / count) ** 2
    # That of equal values is not zero where their sum, such as one of 1/255, takes more bits than are sent.
    return count, float(mean), math.sqrt(variance) if variance > mean**2 / 2**96 else 0.0


def totals(column: NDArray[np.float64]) -> tuple[int, Fraction, Fraction]:
    """The number of values of a column, [ROWS] or [ROWS, sites], their sum, and the sum of their squares."""
    total, square = (
        sum(map(Fraction, parts.ravel().tolist()), Fraction(0))
        for parts in (column[1 : 1 + PARTS], column[1 + PARTS :])
    )
    return int(column[0].sum()), total, square
