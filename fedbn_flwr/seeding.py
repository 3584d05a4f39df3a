"""Every random draw depends on (seed, round, client, step) and on nothing else.

So a resumed run draws the same batches, and so do runs with another order of clients or another engine.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import numpy as np
import torch


def seed_for(seed: int, purpose: str, *where: int) -> int:
    """A 63-bit seed that depends only on the arguments; `purpose` separates random streams."""
    # Hashed as text, where (1,) and (1, 0) differ; NumPy's SeedSequence treats them as equal.
    text = "/".join([purpose, str(seed), *map(str, where)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def generator(seed: int, purpose: str, *where: int) -> torch.Generator:
    """A torch generator on the CPU, for data on any device: devices draw different streams."""
    return torch.Generator().manual_seed(seed_for(seed, purpose, *where))


# NumPy's global generators: the ones that open blocks will restore, and free ones from blocks that have ended.
_outside: list[object] = []
_spare: list[np.random.MT19937] = []


@contextmanager
def preserve_rng(numpy_seed: int = 0) -> Iterator[None]:
    """Restore the global generators of Python, NumPy and torch (on the CPU and the current GPU) after the block.

    Inside, NumPy draws from another generator with this seed, because copying a generator's state takes longer than all
    the rest. Blocks of several threads may overlap, for instance in a parked round and its caller.
    """
    python, on_cpu = random.getstate(), torch.get_rng_state()
    on_gpu = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    before = np.random.get_bit_generator()  # type: ignore[attr-defined]
    _outside.append(before)
    try:
        inside = _spare.pop()
    except IndexError:
        inside = np.random.MT19937()
    np.random.set_bit_generator(inside)  # type: ignore[attr-defined]
    np.random.seed(numpy_seed)
    try:
        yield
    finally:
        random.setstate(python)
        torch.set_rng_state(on_cpu)
        if on_gpu is not None:
            torch.cuda.set_rng_state(on_gpu)
        np.random.set_bit_generator(before)  # type: ignore[attr-defined]
        _outside.remove(before)
        if inside not in _outside:
            _spare.append(inside)


@contextmanager
def streams(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Seed the global generators of Python, NumPy and torch inside the block; restore them afterwards.

    If `device` is a GPU, its generator is seeded, and it is the current device inside the block.
    """
    gpu = device if device is not None and device.type == "cuda" else None
    with torch.cuda.device(gpu) if gpu else nullcontext(), preserve_rng(seed % 2**32):
        random.seed(seed)
        # Not torch.manual_seed: it also queues a call for every GPU that was not used yet, which costs 1 ms.
        torch.default_generator.manual_seed(seed)
        if gpu:
            torch.cuda.manual_seed(seed)  # of the current GPU
        yield
