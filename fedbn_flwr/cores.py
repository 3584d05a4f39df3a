"""How many cores this process may use."""

from __future__ import annotations

import functools
import math
import os
from contextlib import suppress
from pathlib import Path


@functools.cache
def cores() -> int:
    """The cores of the process's affinity, at most those of the container's limit (`docker run --cpus`)."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.floor(min(affinity, limit_of_container(Path("/sys/fs/cgroup")))))


def limit_of_container(cgroup: Path) -> float:
    """The CPUs that the container may use, by its cgroup of version 2; infinite without a limit."""
    with suppress(OSError, ValueError):  # another version, or "max"
        quota, period = map(float, (cgroup / "cpu.max").read_text().split())
        return quota / period
    return math.inf
