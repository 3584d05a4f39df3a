"""Seeds of the global generators."""

from __future__ import annotations

import random

import numpy as np
import torch

from fedbn_flwr import seeding


def drawn() -> tuple[float, ...]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_every_global_generator_is_seeded_inside_and_restored_afterwards() -> None:
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    outside = drawn()
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    inside = []
    for _ in range(2):
        with seeding.streams(3):
            inside.append(drawn())
    assert inside[0] == inside[1]
    assert not {*inside[0]} & {*outside}
    assert drawn() == outside


def test_blocks_may_overlap() -> None:
    """Those of a parked round and of its caller do: each has its own numbers when it continues."""

    def draw() -> float:
        return float(np.random.rand())

    np.random.seed(1)
    one, two = np.random.rand(2).tolist()
    np.random.seed(0)
    first, second = np.random.rand(2).tolist()
    np.random.seed(1)
    assert draw() == one
    caller, parked, other = seeding.preserve_rng(), seeding.preserve_rng(), seeding.preserve_rng()
    with caller:
        assert draw() == first
        parked.__enter__()  # the round stops here, and its caller continues
    with other:
        assert draw() == first
    with seeding.preserve_rng():
        parked.__exit__(None, None, None)
        assert draw() == second  # of the round
    assert draw() == two  # of the caller
