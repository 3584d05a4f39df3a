"""How a process starts fast that is about to import PyTorch and Flower."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def loading() -> Iterator[None]:
    """Import PyTorch and Flower without Python's garbage collector, which would take a sixth of the time.

    Their objects live until the process ends, so the collector never visits them afterwards. It then doesn't write to
    the memory that workers share with this process.
    """
    if "torch" in sys.modules:  # called from Python
        yield
        return
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()
