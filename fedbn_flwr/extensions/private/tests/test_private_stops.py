"""Private runs whose process is killed: the reported epsilon is never below that of the replies that left clients."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Message
from scipy.optimize import brentq
from scipy.stats import norm

from fedbn_flwr import LocalGrid, client_app
from fedbn_flwr.errors import SettingsError
from fedbn_flwr.experiment.file.layers import load_experiment
from fedbn_flwr.experiment.listeners.listener import FinishedRound, Running
from fedbn_flwr.experiment.listeners.progress import Reporter
from fedbn_flwr.experiment.node import make_client
from fedbn_flwr.experiment.prepare import prepare
from fedbn_flwr.experiment.run.loop import run_one
from fedbn_flwr.messages.reply import partition_of
from fedbn_flwr.results.folder.writer import RunFolder
from fedbn_flwr.results.read.runs import find_runs
from fedbn_flwr.strategies import FixBN, Rule
from tests.support.command import PATIENCE
from tests.support.runs import saved_round

fork = multiprocessing.get_context("fork")
ROUNDS, COST = 3, 1 / 2.0**2 + 1 / 4.0**2
TEXT = """
rounds: 3
clients: 2
data: {examples: 60}
model: {name: mlp}
train: {lr: 0.05, steps: 1}
evaluate: {every: 3}
strategy: {name: Private, noise: 2.0, statistics_noise: 4.0, base: {name: FedAvg, fraction_evaluate: 0.0}}
engine: {workers: 0, device: cpu, checkpoint_every: 2}
"""
POINTS = ("before the first message", "after a client replied", "before the checkpoint")
Stop = tuple[int, str]  # a round, and a point in it


class Killed(LocalGrid):
    """Ends the process at a point of a round; a file has a line for each reply that left a client."""

    def __init__(self, out: Path, stop: Stop | None) -> None:
        super().__init__(client_app(make_client), 2, run_config={"experiment": TEXT})
        self.left, self.stop = out.with_suffix(".left"), stop

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        replies: list[Message] = []
        for message in messages:
            if message.metadata.message_type != "train":
                replies += super().send_and_receive([message], timeout=timeout)
                continue
            number = next(iter(message.content.config_records.values()))["server-round"]
            if self.stop == (number, POINTS[0]):
                os._exit(9)
            (reply,) = super().send_and_receive([message], timeout=timeout)
            with self.left.open("a") as file:
                file.write(f"{partition_of(reply.content)}\n")
            if self.stop == (number, POINTS[1]):
                os._exit(9)
            replies.append(reply)
        return replies


class KilledAtTheEnd(Reporter):
    """It is asked before the listeners that write the history and the checkpoint."""

    def __init__(self, stop: Stop | None) -> None:
        super().__init__()
        self.at = stop

    def on_round(self, running: Running, at: FinishedRound) -> FinishedRound:
        if self.at == (at.number, POINTS[2]):
            os._exit(9)
        return super().on_round(running, at)


def settings(strategy: dict[str, Any]) -> Any:
    (prepared,) = prepare(
        load_experiment(TEXT, [f"strategy.{key}={json.dumps(value)}" for key, value in strategy.items()])
    )
    return prepared


def _session(out: Path, stop: Stop | None, strategy: dict[str, Any]) -> None:
    prepared, run = settings(strategy), RunFolder(out)
    config = prepared.run.model_dump(mode="json")
    run.check(config, resume=True)
    run_one(prepared, Killed(out, stop), run, KilledAtTheEnd(stop), run.begin(config))
    os._exit(0)


def session(out: Path, stop: Stop | None, **strategy: Any) -> None:
    process = fork.Process(target=_session, args=(out, stop, strategy))
    process.start()
    process.join(PATIENCE)
    assert process.exitcode == (0 if stop is None else 9)


def epsilon(costs: float) -> float:
    """Of Gaussian mechanisms whose squared mu add to this, by Balle and Wang 2018, theorem 8."""
    mu = math.sqrt(costs)

    def excess(value: float) -> float:
        return float(norm.cdf(mu / 2 - value / mu) - math.exp(value) * norm.cdf(-mu / 2 - value / mu) - 1e-5)

    return float(brentq(excess, 0, 200, xtol=1e-12))


def reported(out: Path) -> float:
    (run,) = find_runs([out])
    found = run.values["privacy"]["epsilon"]
    assert isinstance(found, float)
    return found


def check(out: Path, begun: int) -> None:
    """The report is that of the rounds begun, and no client sent more replies."""
    left = out.with_suffix(".left")
    replies = left.read_text().split() if left.exists() else []
    most = max([replies.count(client) for client in set(replies)], default=0)
    assert most <= begun
    assert reported(out) == pytest.approx(epsilon(begun * COST), rel=1e-6)


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize(
    "rounds",
    [(1, 1), *(pytest.param(each, marks=pytest.mark.slow) for each in ((1,), (2,), (2, 2), (1, 2, 2, 3)))],
    ids=str,
)
def test_every_begun_round_counts(tmp_path: Path, rounds: tuple[int, ...], point: str) -> None:
    out, begun, done = tmp_path / "run", 0, 0
    for number in rounds:
        session(out, (number, point))
        begun, done = begun + number - done, number - 1
        check(out, begun)  # also of a run that is not resumed
    session(out, None)
    check(out, begun + ROUNDS - done)
    assert saved_round(out) == ROUNDS


def test_noise_that_is_repeated_counts_once(tmp_path: Path) -> None:
    for stop in ((2, POINTS[1]), (2, POINTS[2]), None):
        session(tmp_path / "run", stop, noise_seed=5)
    assert reported(tmp_path / "run") == pytest.approx(epsilon(ROUNDS * COST), rel=1e-6)


def test_a_stop_between_rounds_costs_nothing(tmp_path: Path) -> None:
    prepared, run = settings({}), RunFolder(tmp_path / "run")
    config = prepared.run.model_dump(mode="json")

    class Stopping(Reporter):
        def on_round(self, running: Running, at: FinishedRound) -> FinishedRound:
            return replace(super().on_round(running, at), stop=KeyboardInterrupt() if at.number == 2 else None)

    for ended in (True, False):
        done = run.begin(config)
        try:
            run_one(settings({}), Killed(run.path, None), run, Stopping(), done)
        except KeyboardInterrupt:
            assert ended
    check(run.path, ROUNDS)


def test_a_lost_count_is_refused(tmp_path: Path) -> None:
    session(tmp_path / "run", (2, POINTS[1]))
    file = tmp_path / "run" / "promises"
    file.rename(tmp_path / "kept")
    prepared, run = settings({}), RunFolder(tmp_path / "run")
    done = run.begin(run.config())
    with pytest.raises(SettingsError, match=r"its file 'promises' does not have 'total' of the rounds that were begun"):
        run_one(prepared, Killed(run.path, None), run, KilledAtTheEnd(None), done)
    assert run.summary().notes["privacy"]["releases"] == 2  # type: ignore[union-attr]


def test_a_rule_inside_another_keeps_its_promise(tmp_path: Path) -> None:
    from fedbn_flwr.experiment.listeners.recording import keep_promises, promises_of
    from fedbn_flwr.strategies import FedAvg

    class Counting(FedAvg):
        promised = ("asked_for",)

        class Memory(FedAvg.Memory):
            asked_for: int = 0

    def make() -> Rule:
        rule = FixBN(Counting(), freeze_round=1)
        rule.memory, rule.strategy.memory = rule.Memory(), Counting.Memory()
        return rule

    first, run = make(), RunFolder(tmp_path)
    first.strategy.memory.asked_for = 4  # type: ignore[attr-defined]
    run.write_promises(promises_of(first))
    for _ in range(2):
        again = make()
        keep_promises(again, run, 0)
        assert promises_of(again) == {"asked_for": 4}
