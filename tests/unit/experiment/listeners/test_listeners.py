"""The output of each listener for a round: figures, files, lines on the screen."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.app import ArrayRecord
from torch.nn import functional as F

from fedbn_flwr import LocalGrid, client_app, run
from fedbn_flwr.client.evaluation import evaluate
from fedbn_flwr.commands import cli
from fedbn_flwr.data.batches import TestBatches
from fedbn_flwr.errors import RunFailed, StorageError
from fedbn_flwr.experiment.file.content import merge
from fedbn_flwr.experiment.file.layers import load_experiment, parse_overrides
from fedbn_flwr.experiment.listeners.evaluate import Choose, Evaluate
from fedbn_flwr.experiment.listeners.listener import FinishedRound, Running
from fedbn_flwr.experiment.listeners.recording import History, Saving
from fedbn_flwr.experiment.metered import MeteredGrid
from fedbn_flwr.experiment.node import ClientMaker
from fedbn_flwr.experiment.prepare import prepare
from fedbn_flwr.experiment.run.loop import train_round
from fedbn_flwr.experiment.settings import Settings
from fedbn_flwr.messages import protocol
from fedbn_flwr.messages.arrays import pack
from fedbn_flwr.models.tensors import initial_arrays
from fedbn_flwr.results.folder.writer import RunFolder
from fedbn_flwr.results.read.runs import find_runs
from fedbn_flwr.results.result import Result
from fedbn_flwr.results.yaml_text import parse_yaml
from fedbn_flwr.tasks import CLASSIFICATION, REGRESSION, Task
from tests.support.runs import saved_round

EXPERIMENT = """
rounds: 5
clients: 2
train: {lr: 0.05, batch_size: 16, steps: 1}
evaluate: {every: 2, clients: true}
engine: {workers: 0, device: cpu, checkpoint_every: 2}
"""


class OwnDisks(MeteredGrid):
    """Nodes whose states the server cannot read."""

    def contexts(self) -> None:
        return None


@pytest.fixture(params=[MeteredGrid])
def running(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Running]:
    experiment = load_experiment(EXPERIMENT)
    (prepared,) = prepare(experiment)
    with LocalGrid(client_app(ClientMaker(experiment)), 2) as grid:
        arrays = pack(initial_arrays(prepared.model))
        prepared.rule.begin(5, arrays)
        identity = {protocol.RUN: prepared.name, protocol.TOKEN: "0" * 32}
        yield Running(prepared, request.param(grid), RunFolder(tmp_path), identity)


def start(running: Running) -> FinishedRound:
    """Before the first round."""
    arrays = pack(initial_arrays(running.prepared.model))
    return FinishedRound(0, arrays, arrays)


def test_models_are_evaluated_every_other_round_and_after_the_last(running: Running) -> None:
    listener, at, evaluated = Evaluate(running.prepared), start(running), []
    for _ in range(5):
        at = listener.on_round(running, train_round(running, at))
        if "accuracy" in at.line:
            evaluated.append(at.number)
    assert evaluated == [2, 4, 5]
    data = running.prepared.dataset
    # The model on which the figures were measured is that of the last round.
    twin = evaluate(
        running.prepared.model, TestBatches(data.test, data.moments, 100), F.cross_entropy, running.prepared.device
    )
    assert (at.line["accuracy"], at.line["loss"]) == (twin["accuracy"], twin["loss"])
    assert at.line["evaluated_with"] == "model"
    assert at.line["clients_accuracy"] == at.line["accuracy"], "FedAvg's clients have the same model and examples"


@pytest.mark.parametrize("words", [("model.norm=sbn",), ("evaluate.statistics=reestimated",)])
def test_a_batch_of_one_image_is_evaluated_with_the_one_before(words: tuple[str, ...], tmp_path: Path) -> None:
    """It has no batch statistics where batch norm follows a fully connected layer."""
    outcome = run_of("data.test_examples=101", *words, out=tmp_path)
    assert outcome.summary.status == "finished"


def test_a_model_that_cannot_be_evaluated_ends_its_run_by_name(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="round 1: the model cannot be evaluated: ValueError: Expected more"):
        run_of("data.test_examples=10", "evaluate.batch_size=1", "model.norm=sbn", out=tmp_path)


def run_of(*words: str, out: Path) -> Result:
    data = {"name": "digits", "examples": 100}
    changes = parse_overrides(["rounds=1", "evaluate={every: 1}", "model.name=mlp", *words])
    return run(merge({**parse_yaml(EXPERIMENT), "data": data}, changes), out=out, progress=False)


def test_a_listener_that_cannot_start_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Saving, running: Running, at: FinishedRound) -> None:
        raise StorageError("the disk is full")

    monkeypatch.setattr(Saving, "on_start", full)
    with pytest.raises(StorageError, match="the disk is full"):
        run_of(out=tmp_path)
    (found,) = find_runs([tmp_path])
    assert (found.summary.status, found.summary.error) == ("failed", "the disk is full")


def test_the_history_has_what_was_sent_and_the_summary_adds_it_up(running: Running, tmp_path: Path) -> None:
    listener = History()
    at = start(running)
    listener.on_start(running, at)
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "running"
    for _ in range(2):
        at = listener.on_round(running, train_round(running, at))
    lines = RunFolder(tmp_path).history()
    assert [line["round"] for line in lines] == [1, 2]
    assert [line["messages_down"] for line in lines] == [2, 2]
    again = History()
    again.on_start(running, at)  # of a resumed run
    assert again.summary.traffic.messages_up == 4
    assert again.summary.rounds == 2
    assert again.summary.seconds == sum(line["seconds"] for line in lines)


@pytest.mark.parametrize(
    ("error", "status"),
    [(None, "finished"), (KeyboardInterrupt(), "interrupted"), (RunFailed("no node is left"), "failed")],
)
def test_the_end_of_a_run_is_in_its_summary(
    error: BaseException | None, status: str, running: Running, tmp_path: Path
) -> None:
    listener = History()
    listener.on_start(running, start(running))
    listener.on_end(running, error)
    found = RunFolder(tmp_path).summary()
    assert (found.status, found.error) == (status, "no node is left" if status == "failed" else None)


def checkpoints(running: Running, folder: Path, stop: int = 0) -> list[int]:
    """The round of the checkpoint after each of four rounds."""
    files, listener = History(), Saving()
    at, rounds = start(running), []
    files.on_start(running, at)
    listener.on_start(running, at)
    for _ in range(4):
        at = files.on_round(running, train_round(running, at))
        at = listener.on_round(
            running, dataclasses.replace(at, stop=KeyboardInterrupt() if at.number == stop else None)
        )
        rounds.append(saved_round(folder))
        assert at.checkpoint_round == rounds[-1]
    train_round(running, at)
    listener.on_end(running, KeyboardInterrupt())  # in the middle of round 5
    rounds.append(saved_round(folder))
    return rounds


def test_checkpoints_are_written_every_n_rounds_and_at_a_stop(running: Running, tmp_path: Path) -> None:
    assert checkpoints(running, tmp_path, stop=3) == [0, 2, 3, 4, 4]
    assert len(list(RunFolder(tmp_path).checkpoint.clients())) == 2


def test_a_checkpoint_calls_no_pydantic(running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would hide the KeyboardInterrupt of SIGTERM, and the run would continue or fail."""
    before = Saving.on_start

    def forbid(*args: Any) -> None:
        before(*args)
        monkeypatch.setattr(Settings, "model_dump", None)

    monkeypatch.setattr(Saving, "on_start", forbid)
    assert checkpoints(running, tmp_path, stop=1)[0] == 1


@pytest.mark.parametrize("running", [OwnDisks], indirect=True)
def test_where_nodes_keep_their_states_the_last_whole_round_is_saved(running: Running, tmp_path: Path) -> None:
    engine = running.run.engine.model_copy(update={"checkpoint_every": 3})
    prepared = dataclasses.replace(running.prepared, run=running.run.model_copy(update={"engine": engine}))
    assert checkpoints(dataclasses.replace(running, prepared=prepared), tmp_path) == [0, 0, 3, 3, 4]
    assert list(RunFolder(tmp_path).checkpoint.clients()) == []


@pytest.mark.parametrize("running", [MeteredGrid, OwnDisks], indirect=True)
def test_a_round_is_saved_once(running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end of a run its last round is saved already."""
    written: list[str] = []
    for name in ("write_model", "write_checkpoint"):
        monkeypatch.setattr(RunFolder, name, lambda *_, name=name: written.append(name))
    listener = Saving()
    listener.on_start(running, start(running))
    at = dataclasses.replace(start(running), number=5, is_last=True)
    assert listener.on_round(running, at).checkpoint_round == 5
    listener.on_end(running, None)
    assert written == ["write_model", "write_checkpoint"]


# --- The best round by validation, for shares and for errors.


@pytest.mark.parametrize(
    ("task", "values", "expected"),
    [
        (CLASSIFICATION, [0.5, 0.4, 0.5, 0.6, 0.6], [1, 4]),
        (REGRESSION, [9.0, 8.0, 8.0, 7.0, math.nan, 7.5, 7.0], [1, 2, 4]),
        (REGRESSION, [math.nan] * 3, []),
    ],
)
def test_the_best_round_is_the_first_of_equal_ones(task: Task, values: list[float], expected: list[int]) -> None:
    rule = SimpleNamespace(traits=SimpleNamespace(has_global_model=False))
    run = Settings(evaluate={"validation": 0.1})
    running: Any = SimpleNamespace(prepared=SimpleNamespace(rule=rule, task=task, run=run))
    best, found = Choose(running.prepared, []), []
    for number, value in enumerate(values, start=1):
        line: dict[str, Any] = {"round": number, f"validation_{task.main}": value}
        at = best.on_round(running, FinishedRound(number, ArrayRecord(), ArrayRecord(), line=line))
        found += [at.line["best_round"]] if "best_round" in at.line else []
    assert found == expected


# --- `evaluate.domains`: each client tests its own model on the examples of every domain.


OF_DOMAINS = """
rounds: 2
clients: 3
data:
  {name: digits_five, random: true, examples: 90, test_examples: 60, domains: [mnist, usps, svhn], partition: domain}
model: lenet
train: {lr: 0.01, batch_size: 8, steps: 1}
evaluate: {every: 2, domains: true}
engine: {workers: 0, device: cpu}
runs: {one: {strategy: FedBN}}
"""
DOMAINS = ("mnist", "svhn", "usps")


def test_each_client_s_model_is_tested_on_every_domain(tmp_path: Path) -> None:
    """Of 20 test examples each, so that the mean over the domains is the figure of all, and that of the client's domain
    the figure of its own examples."""
    file = tmp_path / "experiment.yaml"
    file.write_text(OF_DOMAINS)
    assert cli.main(["run", str(file), "--out", str(tmp_path / "out")]) == 0
    folder = RunFolder(tmp_path / "out" / "one")
    clients = folder.lines("clients.jsonl")[-1]["clients"]
    assert len({each["loss_mnist"] for each in clients.values()}) == 3, "each client has its own model"
    for each in clients.values():
        (own,) = (domain for domain in DOMAINS if f"own_loss_{domain}" in each)
        for name in ("loss", "accuracy"):
            assert sum(each[f"{name}_{domain}"] for domain in DOMAINS) / 3 == pytest.approx(each[name])
            assert each[f"{name}_{own}"] == pytest.approx(each[f"own_{name}"])
    line = folder.lines("history.jsonl")[-1]
    for domain in DOMAINS:
        mean = sum(each[f"accuracy_{domain}"] for each in clients.values()) / 3
        assert line[f"clients_accuracy_{domain}"] == pytest.approx(mean)
    assert "clients' accuracy, by domain" in (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
