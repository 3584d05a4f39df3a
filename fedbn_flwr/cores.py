"""How many cores this process may use."""

from __future__ import annotations

import functools
import math
import os
from contextlib import suppress
from pathlib import Path


@functools.cache
def cores() -> int:
    """The number of cores that the process's affinity and the container's limit (`docker run --cpus`) allow."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.floor(min(affinity, limit_of_container(Path("/sys/fs/cgroup")))))


def limit_of_container(cgroup: Path) -> float:
    """The container's limit on CPUs, from its cgroup (version 2); infinite without a limit."""
    with suppress(OSError, ValueError):  # another version of cgroup, or "max"
        quota, period = map(float, (cgroup / "cpu.max").read_text().split())
        return quota / period
    return math.inf
