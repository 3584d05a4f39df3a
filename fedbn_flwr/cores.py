"""How many cores this process may use."""

from __future__ import annotations

import functools
import math
import os
from pathlib import Path


@functools.cache
def cores() -> int:
    """The cores of the process's affinity, at most those of the container's limit (`docker run --cpus`)."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.floor(min(affinity, limit_of_container(Path("/sys/fs/cgroup")))))


def limit_of_container(cgroup: Path) -> float:
    """The CPUs that the container may use, by its cgroup of version 2 or 1; infinite without a limit."""
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        try:
            quota, period = map(float, " ".join((cgroup / name).read_text() for name in names).split())
        except (OSError, ValueError):  # another version, or "max"
            continue
        if quota > 0:
            return quota / period
    return math.inf
