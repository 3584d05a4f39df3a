"""The time of a slice: what share of it a run gets, whether a run begins, and after which round it stops."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedbn_flwr.errors import OutOfTime, SettingsError
from fedbn_flwr.experiment.file.layers import load_experiment
from fedbn_flwr.experiment.listeners import slices
from fedbn_flwr.experiment.listeners.listener import FinishedRound
from fedbn_flwr.experiment.listeners.slices import InTime, Slice, end_of
from fedbn_flwr.results.folder import RunFolder
from tests.support.runs import write_run

NOTHING: Any = None  # arrays


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    found = SimpleNamespace(now=0.0)
    monkeypatch.setattr(slices, "monotonic", lambda: found.now)
    return found


@pytest.mark.parametrize(
    ("now", "runs", "jobs", "share"),
    [
        (0, 3, 1, 4),  # one after the other: a third of 12 s
        (4, 2, 1, 8),
        (2, 2, 1, 7),  # the first took 2 s of its 4 s
        (0, 4, 2, 6),  # two at a time have half of it
        (0, 3, 2, 8),
        (8, 1, 2, 12),  # the last one has all that is left
        (0, 1, 1, 12),
        (13, 2, 1, 12.5),  # half of -1 s: no time at all
    ],
)
def test_runs_share_the_time_that_is_left(
    now: float, runs: int, jobs: int, share: float, clock: SimpleNamespace
) -> None:
    clock.now = now
    assert Slice(12.0, lambda place: 0.0).share(runs, jobs) == share


def test_without_minutes_no_run_ends(clock: SimpleNamespace) -> None:
    clock.now = 5.0
    assert end_of(None, 5.0) == Slice(math.inf, lambda place: 9.0).share(3) == math.inf
    assert end_of(0.5, 5.0) == 35.0


@pytest.mark.parametrize("minutes", [0, -1.0, math.nan, "12"])
def test_minutes_are_a_positive_number(minutes: Any) -> None:
    with pytest.raises(SettingsError, match=r"minutes is .*; expected a number above 0"):
        end_of(minutes, 0.0)


def test_a_run_begins_if_its_round_ends_in_time_and_the_first_one_always(clock: SimpleNamespace) -> None:
    """Rounds of 30, 3 and 0.5 s, and a run that hasn't begun yet and is judged by the run before it."""
    longest = [30.0, 3.0, 0.5, 0.0]
    time = Slice(12.0, lambda place: longest[place])
    assert time.may_begin(0)
    clock.now = 10.0
    assert not time.may_begin(1)  # it would end after 13 s
    assert not time.may_begin(3)  # 40 s
    assert time.may_begin(2)
    assert time.may_begin(3)  # 10.5 s
    assert time.unfinished == [1, 3]


def stops(folder: Path, seconds: list[float], ends: float, clock: SimpleNamespace, *settings: str) -> int:
    """The round after which a run stops whose rounds take so long; 0 if it does not stop."""
    run = load_experiment("{model: {name: mlp}, rounds: 100}", settings).runs[0]
    listener, running = InTime(ends), SimpleNamespace(run=run, folder=RunFolder(folder))
    listener.on_start(running, FinishedRound(0, NOTHING, NOTHING))  # type: ignore[arg-type]
    for number, took in enumerate(seconds, start=1):
        clock.now += took
        at = FinishedRound(number, NOTHING, NOTHING, line={"seconds": took})
        at = listener.on_round(running, at)  # type: ignore[arg-type]
        if isinstance(at.stop, OutOfTime):
            return number
    return 0


@pytest.mark.parametrize(
    ("seconds", "ends", "after"),
    [
        ([1.0] * 12, 12.0, 12),  # a thirteenth round would end after 13 s
        ([1.0] * 12, 13.0, 0),
        ([3.0, 1.0, 1.0, 1.0], 8.0, 4),  # at 6 s, another one of 3 s would end after 9 s
        ([3.0, *[1.0] * 14], 17.0, 15),  # the first of 15 rounds is none of the last eleven any more
        ([20.0, 1.0], 12.0, 1),  # one round is trained in any case
    ],
)
def test_a_run_stops_before_the_round_that_would_exceed_its_time(
    seconds: list[float], ends: float, after: int, clock: SimpleNamespace, tmp_path: Path
) -> None:
    assert stops(tmp_path, seconds, ends, clock) == after


def test_the_last_rounds_include_an_evaluation_and_a_checkpoint(clock: SimpleNamespace, tmp_path: Path) -> None:
    """Round 1, of 5 s, evaluates or follows a checkpoint, as one in twenty does; 25 s are enough after round 20."""
    seconds = [5.0, *[1.0] * 19]
    for setting in ("evaluate.every=20", "engine.checkpoint_every=20"):
        clock.now = 0.0
        assert stops(tmp_path, seconds, 25.0, clock, setting) == 17  # after 21 s
    clock.now = 0.0
    assert stops(tmp_path, seconds, 25.0, clock) == 0


def test_rounds_of_earlier_slices_count(clock: SimpleNamespace, tmp_path: Path) -> None:
    write_run(tmp_path / "run", "FedAvg", lines=[{"seconds": 6.0}])
    assert stops(tmp_path / "run", [1.0] * 9, 10.0, clock) == 5  # after 5 s, another one of 6 s would end after 11 s
