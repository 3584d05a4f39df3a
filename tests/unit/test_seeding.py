"""Seeds of the global generators."""

from __future__ import annotations

import random

import numpy as np
import torch

from fedbn_flwr import seeding


def drawn() -> tuple[float, ...]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_every_global_generator_is_seeded_inside_and_restored_afterwards() -> None:
    with seeding.kept():
        outside = drawn()
    inside = []
    for _ in range(2):
        with seeding.streams(3):
            inside.append(drawn())
    assert inside[0] == inside[1]
    assert not {*inside[0]} & {*outside}
    assert drawn() == outside
