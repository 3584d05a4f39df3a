"""A short soak: benchmarks/soak.py with few rounds.

docs/results/robustness.md#wrong-replies-and-long-runs has the long ones.
"""

from __future__ import annotations

import pytest

from benchmarks.soak import CLIENTS, HEADS, soak


@pytest.mark.slow
def test_failing_replies_leave_nothing_behind() -> None:
    """Open files and temporary folders of the last rounds are those of the first, and so is the memory."""
    watch, app = soak("FedAvg", 100, 0, 0, False, as_errors=False)
    faults = {app.fault(number, client, None) for number in range(1, 101) for client in range(CLIENTS)}
    assert faults == {None, "error", "garbage", "NaN"}
    first, last = (dict(zip(HEADS, watch.rows[number], strict=True)) for number in (1, -1))
    assert last["RSS_MB"] - first["RSS_MB"] < 20
    assert [last[name] for name in ("files", "temporary")] == [first[name] for name in ("files", "temporary")]
    assert last["threads"] <= first["threads"] + 1  # one may be writing a checkpoint
    absent, _ = soak("FedAvg", 100, 0, 0, False, as_errors=True)
    assert absent.digest == watch.digest
