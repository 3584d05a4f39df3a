"""Learning rates as functions of the round and the number of rounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Schedule = Callable[[int, int], float]


@dataclass(frozen=True)
class StepSchedule:
    """`lr`, multiplied by `gamma` after each milestone, which is a round or a fraction of all rounds."""

    lr: float
    milestones: Sequence[float] = ()
    gamma: float = 0.1

    def __call__(self, server_round: int, rounds: int) -> float:
        # 0.29 * 100 is 28.999999999999996; without the correction round 29 would come after the milestone.
        ends = [milestone * rounds + 1e-9 if milestone <= 1 else milestone for milestone in self.milestones]
        passed = sum(server_round > end for end in ends)
        return self.lr * self.gamma**passed


@dataclass(frozen=True)
class CosineSchedule:
    """Half a cosine from `lr` in the round after `warmup` to zero in the round after the last."""

    lr: float
    warmup: int = 0

    def __call__(self, server_round: int, rounds: int) -> float:
        return self.lr * 0.5 * (1 + math.cos(math.pi * (server_round - 1 - self.warmup) / (rounds - self.warmup)))


@dataclass(frozen=True)
class ExponentialSchedule:
    """`lr` in the round after `warmup`, then multiplied by `gamma` in each round."""

    lr: float
    gamma: float
    warmup: int = 0

    def __call__(self, server_round: int, rounds: int) -> float:
        return float(self.lr * self.gamma ** (server_round - 1 - self.warmup))


@dataclass(frozen=True)
class LinearWarmup:
    """Rises by equal steps in the first `warmup` rounds; the round after them is the first with the schedule's rate."""

    lr: float
    warmup: int
    schedule: Schedule

    def __call__(self, server_round: int, rounds: int) -> float:
        if server_round <= self.warmup:
            return self.lr * server_round / (self.warmup + 1)
        return self.schedule(server_round, rounds)
