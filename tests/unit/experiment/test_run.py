"""What a run leaves on the disk and in memory, and that its figures do not depend on the workers."""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import fedbn_flwr
import fedbn_flwr.experiment.run.launch as experiment_run
import fedbn_flwr.experiment.run.loop as experiment_loop
import fedbn_flwr.experiment.run.side_by_side as side_by_side
from fedbn_flwr import extensions
from fedbn_flwr.errors import MissingPackage, SettingsError
from fedbn_flwr.experiment.file.layers import load_experiment
from fedbn_flwr.experiment.listeners.listener import FinishedRound, Running
from fedbn_flwr.experiment.parts import Parts
from fedbn_flwr.strategies import FedAvg, Rule

EXPERIMENT = """
rounds: 1
clients: 2
train: {steps: 1}
engine: {workers: 0, device: cpu}
runs:
  FedAvg: {strategy: {name: FedAvg}}
  FixBN: {strategy: {name: FixBN, freeze_round: 1, base: {name: FedProx, proximal_mu: 0.1}}}
"""


def test_a_run_folder_has_the_examples_of_each_client(tmp_path: Path) -> None:
    changes = ["seed=7", "clients=3", "data.partition={kind: classes, classes_per_client: 4}", "only=FedAvg"]
    experiment_run.carry_out(load_experiment(EXPERIMENT, changes), tmp_path, resume=False)
    partition = json.loads(next(tmp_path.glob("*/partition.json")).read_text())
    assert partition["title"].startswith("digits: classes, classes_per_client=4")
    assert [sum(count > 0 for count in counts) for counts in partition["counts"]] == [4, 4, 4]
    assert sum(map(sum, partition["counts"])) == 1438


@pytest.mark.slow
def test_nothing_of_a_finished_run_stays_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep has many runs; models may be large."""
    rules: list[weakref.ref[Rule]] = []
    left: list[int] = []
    run_one = experiment_run.run_one

    def watched(prepared: Parts, *arguments: Any) -> None:
        gc.collect()
        left.append(sum(rule() is not None for rule in rules))
        rules.append(weakref.ref(prepared.rule))
        run_one(prepared, *arguments)

    monkeypatch.setattr(experiment_run, "run_one", watched)
    experiment = load_experiment(EXPERIMENT + "  Scaffold: {strategy: {name: Scaffold}}\n")
    experiment_run.carry_out(experiment, tmp_path, resume=False)
    assert left == [0, 0, 0]


def test_the_server_has_no_model_while_clients_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It needs one only to evaluate, and workers need the memory."""
    left: list[torch.nn.Module | None] = []
    train_round = experiment_loop.train_round

    def watched(running: Running, *arguments: Any) -> FinishedRound:
        left.append(vars(running.prepared).get("model"))
        return train_round(running, *arguments)

    monkeypatch.setattr(experiment_loop, "train_round", watched)
    engine = {"workers": 2, "device": "cpu"}
    changes: dict[str, Any] = {"rounds": 2, "clients": 2, "train": {"steps": 1}, "engine": engine}
    assert fedbn_flwr.run(changes, out=tmp_path / "out", progress=False).history["accuracy"].notna().all()
    assert left == [None, None]


@pytest.mark.slow
@pytest.mark.parametrize("statistics", ["model", "reestimated"])
def test_the_server_s_figures_do_not_depend_on_its_threads(statistics: str, tmp_path: Path) -> None:
    """One thread evaluates for each worker, a batch of 40 of the 360 test examples at a time."""
    evaluate = {"batch_size": 40, "statistics": statistics, "metrics": ["auc", "macro_f1"]}
    histories = []
    for workers in (0, 1, 3):
        engine = {"workers": workers, "device": "cpu"}
        result = fedbn_flwr.run(
            {"rounds": 2, "clients": 3, "train": {"steps": 2}, "evaluate": evaluate, "engine": engine},
            out=tmp_path / str(workers),
            progress=False,
        )
        histories.append(result.history.drop(columns="seconds").to_dict("records"))
    assert histories[0] == histories[1] == histories[2]
    assert {"accuracy", "loss", "auc", "macro_f1", "evaluated_with"} <= histories[0][0].keys()


def test_a_part_whose_extension_was_deleted_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a checkout without the folders of extensions; what needs none of them works."""
    for module in (extensions, experiment_run):
        monkeypatch.setattr(module, "declared", lambda kind: {})
    plain = "{model: {name: mlp}, rounds: 1, train: {steps: 1}, engine: {workers: 0}}"
    assert not experiment_run.carry_out(load_experiment(plain), tmp_path / "plain", resume=False).failures
    with pytest.raises(MissingPackage, match="'ray' of engines needs a folder that was deleted from fedbn_flwr/exten"):
        experiment_run.carry_out(load_experiment("model: {name: mlp}\nengine: {name: ray}"), tmp_path, resume=False)
    with pytest.raises(MissingPackage, match="of bounds needs a folder that was deleted"):
        FedAvg(bounds={"max_share": 0.2})


def test_on_a_gpu_this_process_trains_and_workers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_by_side, "choose_device", lambda name: torch.device("cuda"))
    auto, four = (load_experiment("demo", [f"engine.workers={each}"]).runs[0] for each in ("auto", 4))
    assert side_by_side.workers_of(auto) == 0
    with pytest.raises(SettingsError, match=r"engine\.workers is 4.* cannot use a GPU; give 0, or engine\.name ray"):
        side_by_side.workers_of(four)
