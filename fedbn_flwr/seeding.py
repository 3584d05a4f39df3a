"""Every random draw depends on where it happens, (seed, round, client, step), and on nothing else.

So a resumed run, clients in another order, and another engine all see the same batches.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def seed_for(seed: int, purpose: str, *where: int) -> int:
    """A 63-bit number that is a function of its arguments; `purpose` keeps streams apart."""
    # Hashed as text, where (1,) and (1, 0) differ; NumPy's SeedSequence takes them for the same.
    text = "/".join([purpose, str(seed), *map(str, where)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def generator(seed: int, purpose: str, *where: int) -> torch.Generator:
    """A torch generator on the CPU, whatever the device of the data: devices draw different streams."""
    import torch

    return torch.Generator().manual_seed(seed_for(seed, purpose, *where))


def states() -> list[torch.Tensor]:
    """Where torch's global generators stand: the CPU's, and that of the GPU in use."""
    import torch

    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else [])]


def set_states(found: list[torch.Tensor]) -> None:
    import torch

    torch.set_rng_state(found[0])
    for state in found[1:]:
        torch.cuda.set_rng_state(state)


@contextmanager
def streams(seed: int, device: torch.device) -> Iterator[None]:
    """Inside, torch's global generators of the CPU and of `device` begin at `seed`; outside they are as they were."""
    import torch

    on_gpu = device.type == "cuda"
    with torch.random.fork_rng([device] if on_gpu else []):
        # Not torch.manual_seed: it also queues a call for every GPU that was not used yet, which costs 1 ms.
        torch.default_generator.manual_seed(seed)
        if on_gpu:
            torch.cuda.manual_seed(seed)
        yield
