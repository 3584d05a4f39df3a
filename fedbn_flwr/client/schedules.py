"""Learning rates of a round, by its number and the number of rounds."""

from __future__ import annotations

import math
from collections.abc import Sequence


def step(now: int, rounds: int, lr: float, milestones: Sequence[float], gamma: float) -> float:
    """`lr`, multiplied by `gamma` after each milestone, which is a round or a fraction of all rounds."""
    # 0.29 * 100 is 28.999999999999996; without the correction round 29 would come after the milestone.
    ends = [milestone * rounds + 1e-9 if milestone <= 1 else milestone for milestone in milestones]
    return lr * float(gamma ** sum(now > end for end in ends))


def cosine(now: int, rounds: int, lr: float) -> float:
    """Half a cosine from `lr` in the first round to zero in the round after the last."""
    return lr * 0.5 * (1 + math.cos(math.pi * (now - 1) / rounds))
