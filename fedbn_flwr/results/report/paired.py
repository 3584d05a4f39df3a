"""The paired t test of two rows of a report over the seeds that both have."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Paired:
    """A mean difference, its 95 % interval, and the two-sided p value, NaN where there is none."""

    pairs: int
    difference: float = math.nan
    low: float = math.nan
    high: float = math.nan
    p: float = math.nan


def paired(values: Mapping[int, float], base: Mapping[int, float]) -> Paired:
    """`values` minus `base`, both by seed. A single pair, and differences that are all equal, have no p value."""
    found = [value - base[seed] for seed, value in values.items() if seed in base]
    count = len(found)
    if not found or not all(map(math.isfinite, found)):
        return Paired(count)
    mean = statistics.fmean(found)
    error = statistics.stdev(found) / math.sqrt(count) if count > 1 else 0.0
    if not error:
        return Paired(count, mean)
    from scipy.special import stdtr, stdtrit  # distribution of t, and its inverse

    width = float(stdtrit(count - 1, 0.975)) * error
    return Paired(count, mean, mean - width, mean + width, 2 * float(stdtr(count - 1, -abs(mean) / error)))
