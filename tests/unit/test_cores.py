"""The number of cores, with a container's limit."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fedbn_flwr.cores import cores, limit_of_container
from tests.support.command import PATIENCE


@pytest.mark.parametrize(
    ("text", "limit"),
    [("250000 100000\n", 2.5), ("50000 100000\n", 0.5), ("max 100000\n", math.inf), (None, math.inf)],
)
def test_the_limit_of_a_container_is_read(text: str | None, limit: float, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "cpu.max").write_text(text)
    assert limit_of_container(tmp_path) == limit


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity of processes")
def test_a_process_that_is_bound_to_one_core_has_one() -> None:
    bound = f"import os; os.sched_setaffinity(0, {{{min(os.sched_getaffinity(0))}}})"
    code = f"{bound}; from fedbn_flwr.cores import cores; print(cores())"
    assert subprocess.check_output([sys.executable, "-c", code], text=True, timeout=PATIENCE) == "1\n"
    assert 1 <= cores() <= (os.cpu_count() or 1)
