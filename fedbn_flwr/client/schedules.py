"""Learning rates as functions of the round and the number of rounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

Schedule = Callable[[int, int], float]


def steps(lr: float, milestones: Sequence[float] = (), gamma: float = 0.1) -> Schedule:
    """`lr`, multiplied by `gamma` after each milestone, which is a round or a fraction of all rounds."""

    def schedule(server_round: int, rounds: int) -> float:
        # 0.29 * 100 is 28.999999999999996; without the correction round 29 would come after the milestone.
        ends = [milestone * rounds + 1e-9 if milestone <= 1 else milestone for milestone in milestones]
        return lr * gamma ** sum(server_round > end for end in ends)

    return schedule


def cosine(lr: float, warmup: int = 0) -> Schedule:
    """Half a cosine from `lr` in the round after `warmup` to zero in the round after the last."""
    return lambda now, rounds: lr * 0.5 * (1 + math.cos(math.pi * (now - 1 - warmup) / (rounds - warmup)))


def exponential(lr: float, gamma: float, warmup: int = 0) -> Schedule:
    """`lr` in the round after `warmup`, then multiplied by `gamma` in each round."""
    return lambda now, rounds: float(lr * gamma ** (now - 1 - warmup))


def linear_warmup(lr: float, warmup: int, after: Schedule) -> Schedule:
    """Rises by equal steps in the first `warmup` rounds; the round after them is the first with the rate of `after`."""
    return lambda now, rounds: lr * now / (warmup + 1) if now <= warmup else after(now, rounds)
