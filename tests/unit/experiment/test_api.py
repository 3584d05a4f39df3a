"""`fedbn_flwr.run` and `run_all`: what they accept, what they return, and what they leave as it was."""

from __future__ import annotations

import functools
import gc
import json
import logging
import re
import weakref
from pathlib import Path
from typing import Any, assert_type

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import fedbn_flwr
import fedbn_flwr.experiment.prepare as prepare
import fedbn_flwr.experiment.run.launch as experiment_run
import fedbn_flwr.experiment.run.loop as experiment_loop
from fedbn_flwr import Result, Results, Settings, extensions, run, run_all
from fedbn_flwr.commands import cli
from fedbn_flwr.errors import MissingPackage, SettingsError
from fedbn_flwr.experiment.file.layers import load_experiment
from fedbn_flwr.experiment.listeners.listener import FinishedRound, Running
from fedbn_flwr.experiment.parts import Parts
from fedbn_flwr.experiment.settings import Data, Engine, Model, Train
from fedbn_flwr.strategies import FedAvg, Rule
from tests.support.command import ROOT, python
from tests.support.images import write_splits

TINY: dict[str, Any] = {"rounds": 1, "clients": 2, "train": {"steps": 1}, "engine": {"workers": 0, "device": "cpu"}}


class Net(nn.Sequential):
    """A network of the user, which an experiment names as module:name."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, num_classes), nn.BatchNorm1d(num_classes))


def test_run_does_what_the_command_does(tmp_path: Path) -> None:
    words = ["rounds=2", "clients=2", "train={steps: 2, epochs: null}", "engine.workers=0"]
    assert cli.main(["run", "quick", *words, "--out", str(tmp_path / "command")]) == 0
    changes: Any = {"rounds": 2, "clients": 2, "train": {"steps": 2, "epochs": None}, "engine": {"workers": 0}}
    result = run("quick", **changes, out=tmp_path / "python", progress=False)
    assert_type(result, Result)
    there = tmp_path / "command" / "FixBN"
    assert result.folder == tmp_path / "python" / "FixBN"
    assert result.summary.status == "finished"
    for file in ("config.yaml", "model.safetensors"):
        assert (result.folder / file).read_bytes() == (there / file).read_bytes()


@pytest.mark.parametrize(
    "changes",
    [
        {"data": {"partition": {"kind": "dirichlet", "alpha": 0.5}}, "model": {"norm": "gn"}, "strategy": "Standalone"},
        {
            "data": Data.model_validate({"partition": {"kind": "dirichlet", "alpha": 0.5}}),
            "model": Model(norm="gn"),
            "strategy": {"name": "Standalone"},
        },
        {
            "data": {"partition": {"kind": "dirichlet", "alpha": np.float32(0.5)}},
            "model": {"norm": "gn"},
            "strategy": "Standalone",
            "train": {"steps": np.int64(1)},
        },
    ],
)
def test_changes_are_dicts_section_objects_or_names(changes: Any, tmp_path: Path) -> None:
    result = run(TINY, **changes, out=tmp_path, progress=False)
    config = result.config
    assert config["data"]["partition"] == {
        "kind": "dirichlet", "alpha": 0.5, "min_size": 1
    }  # fmt: skip
    assert config["data"]["name"] == "digits"
    assert config["model"]["norm"] == "gn"
    assert config["model"]["name"] == "cnn"
    assert config["strategy"] == {"name": "Standalone"}
    assert config["train"]["steps"] == 1
    assert config["engine"]["workers"] == 0


def test_settings_are_an_experiment_and_so_is_a_result_s_config(tmp_path: Path) -> None:
    settings = Settings(rounds=1, clients=2, train=Train(steps=1), engine=Engine(workers=0, device="cpu"), label="mine")
    first = run(settings, out=tmp_path / "a", progress=False)
    again = run(first.config, out=tmp_path / "b", progress=False)
    other = run(first.config, seed=1, out=tmp_path / "c", progress=False)
    assert first.label == again.label == "mine"
    model, same, different = ((each.folder / "model.safetensors").read_bytes() for each in (first, again, other))
    assert model == same != different


def of_width(width: int) -> type[nn.Module]:
    class Wide(nn.Sequential):
        def __init__(self, num_classes: int) -> None:
            super().__init__(nn.Flatten(), nn.Linear(64, width), nn.BatchNorm1d(width), nn.Linear(width, num_classes))

    return Wide


def test_a_partial_stands_for_its_name_and_arguments(tmp_path: Path) -> None:
    sweep = {"model.name": [functools.partial(MLP, hidden=width) for width in (4, 8)]}
    results = run_all(TINY, sweep=sweep, out=tmp_path, progress=False)
    assert [result.config["model"]["name"] for result in results] == [f"{__name__}:MLP(hidden={n})" for n in (4, 8)]
    assert [result.model().hidden for result in results] == [4, 8]
    again = run(results[1].config, model={"options": {"hidden": 5}}, out=tmp_path / "again", progress=False)
    assert again.model().hidden == 5, "options come after the partial's arguments"


class MLP(nn.Sequential):
    def __init__(self, num_classes: int, hidden: int = 3) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, hidden), nn.BatchNorm1d(hidden), nn.Linear(hidden, num_classes))
        self.hidden = hidden


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_a_class_inside_a_function_trains_as_one_of_a_module_does(workers: int, tmp_path: Path) -> None:
    engine = {"workers": workers, "device": "cpu"}
    runs = {
        "inside": {"model": of_width(6)},
        "lambda": {"model": lambda num_classes: of_width(6)(num_classes)},
        "plain": {"model": {"name": MLP, "options": {"hidden": 6}}},
        "wider": {"model": of_width(7)},
    }
    results = run_all(TINY, engine=engine, runs=runs, out=tmp_path, jobs=1, progress=False)
    inside, as_lambda, plain, wider = (load_file(result.folder / "model.safetensors") for result in results)
    assert all(inside[key].equal(plain[key]) and as_lambda[key].equal(plain[key]) for key in plain)
    assert len(inside["2.weight"]) == 6 != len(wider["2.weight"])
    assert [len(result.model()[2].weight) for result in results] == [6, 6, 6, 7]


IN_ANOTHER_PROCESS = """
import sys
from tests.unit.experiment.test_api import TINY, Result, SettingsError, of_width, run

out = sys.argv[1]
for call in (Result.read(out).model, lambda: run(TINY, model=of_width(6), out=out, resume=True, progress=False)):
    try:
        call()
    except SettingsError as error:
        print(error)
"""


@pytest.mark.slow
def test_a_run_of_a_class_inside_a_function_is_resumed_in_its_process_alone(tmp_path: Path) -> None:
    model = of_width(6)
    kept = run(TINY, model=model, out=tmp_path, progress=False)
    assert run(TINY, model=model, out=tmp_path, resume=True, progress=False).summary.began == kept.summary.began
    name = kept.config["model"]["name"]
    assert re.fullmatch(rf"{__name__}:of_width\.<locals>\.Wide@[0-9a-f]{{8}}-\d+", name)
    found = python(IN_ANOTHER_PROCESS, kept.folder.parent, cwd=ROOT)
    unknown, changed = found.stdout.splitlines()
    assert unknown.startswith(f"model.name={name!r} was defined inside a function and given to run(), and this process")
    assert f"cannot be resumed: {name.partition('@')[0]!r} was defined inside a function" in changed


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rouns": 3}, "unknown key 'rouns'"),
        ({"train": {"lrr": 3}}, "unknown key 'train.lrr'"),
        ({"train": {"lr": "0.1"}}, "train.lr is '0.1': expected a number"),
        ({"model": Net(10)}, r"model has a Net (?s:.*); expected numbers.* functions and classes$"),
        ({"model": {"name": object()}}, "model has a object .*; expected numbers"),
        ({"seeds": [0, 1]}, r"has 2 runs \(labels: FedAvg; seeds: 0, 1\); run_all\(\) carries out all"),
        ({"resume": True}, "to resume runs, give their folder"),
        ({"only": "FixBN"}, "only='FixBN' is not a label"),
        ({"seed": (number for number in range(2))}, r"seed is \[0, 1\]: expected a whole number"),
        ({"seed": {1, 2}}, r"seed is \[1, 2\]: expected a whole number"),
        ({"strategy": lambda: None}, "'.*<lambda>@.*' returned a NoneType; expected a .*Strategy"),
        ({"train": {"lr": float("inf")}}, "train.lr is inf; expected a finite number"),
        ({"train": {"lr": np.float32("nan")}}, "train.lr is nan; expected a finite number"),
        (
            {"train": {"schedule": {"milestones": np.array([1, -np.inf])}}},
            "train.schedule.milestones.1 is -inf; expected a finite number",
        ),
    ],
)
def test_what_is_refused_before_anything_is_written(
    changes: Any, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingsError, match=says) as refused:
        run(TINY, **changes, progress=False)
    assert refused.value.__cause__ is None  # one traceback in a notebook
    assert not list(tmp_path.iterdir())


def test_each_run_has_a_folder_of_its_own_and_is_not_repeated_when_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDBN_OUT", raising=False)
    first, second = run(TINY, progress=False), run(TINY, progress=False)
    assert first.folder != second.folder
    assert first.folder.is_relative_to(tmp_path / "runs")
    kept = run(TINY, out="cell", resume=True, progress=False)
    written = (kept.folder / "model.safetensors").stat()
    again = run(TINY, out="cell", resume=True, progress=False)
    assert again.summary == kept.summary
    assert (again.folder / "model.safetensors").stat() == written
    with pytest.raises(SettingsError, match="clients was 2 and is 3"):
        run(TINY, clients=3, out="cell", resume=True, progress=False)
    with pytest.raises(SettingsError, match=r"other settings: train\.lr was 0\.[0-9]+ and is 0\.7$"):
        run(TINY, train={"lr": 0.7}, out="cell", resume=True, progress=False)


def test_a_run_that_is_resumed_without_a_checkpoint_says_that_it_begins_again(
    tmp_path: Path, flower_log: pytest.LogCaptureFixture
) -> None:
    kept = run(TINY, out=tmp_path, progress=False)
    (kept.folder / "checkpoint").unlink()
    (kept.folder / "summary.json").unlink()
    assert not flower_log.text
    again = run(TINY, out=tmp_path, resume=True, progress=False)
    assert f"{kept.folder} has no checkpoint of its 1 rounds; the run begins again at round 1" in flower_log.text
    assert (again.folder / "checkpoint").exists()


def test_rows_keep_the_order_of_the_file_whichever_run_began_first(tmp_path: Path) -> None:
    runs = {"Z": {}, "M": {"train": {"steps": 2}}, "A": {"train": {"steps": 3}}}
    for only in ("A", "M", ["Z", "A"]):
        run_all(TINY, runs=runs, only=only, out=tmp_path, resume=True, progress=False)
    read = Results.read(tmp_path)
    assert min(read, key=lambda result: result.summary.began).label == "A"
    assert read.labels == ["Z", "M", "A"]
    assert re.findall(r"^\| (\w) \|.*%", (tmp_path / "report.md").read_text(), re.MULTILINE) == ["Z", "M", "A"]


def test_runs_are_compared_and_one_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    runs = {"diverges": {"train": {"lr": 1e30, "steps": 3}}, "trains": {}}
    results = run_all(TINY, runs=runs, out=tmp_path, progress=False)
    assert_type(results, Results)
    assert [result.label for result in results] == ["diverges", "trains"]
    assert [result.summary.status for result in results] == ["failed", "finished"]
    assert "the client diverged?" in str(results[0].summary.error)
    some = run_all(TINY, runs=runs, only=["trains"], seeds=range(2), out=tmp_path / "some", progress=False)
    assert [(result.label, result.summary.seed) for result in some] == [("trains", 0), ("trains", 1)]


def test_a_deployment_is_rehearsed_with_the_data_of_each_site(tmp_path: Path) -> None:
    sizes = {"north": 12, "south": 6}
    for site, count in sizes.items():
        write_splits(tmp_path / site, (8, 8), {"label": [0, 1, 2] * (count // 3)}, {"label": ["a", "b", "c"]})
    sites: list[dict[str, str | int | float | bool]] = [{"data-path": str(tmp_path / site)} for site in sizes]
    data = {"classes": 3, "channels": 1, "size": 8, "normalise": "unit"}
    result = run(TINY, data=data, evaluate={"server": False}, node_config=sites, out=tmp_path / "out", progress=False)
    (line,) = (json.loads(line) for line in (result.folder / "clients.jsonl").read_text().splitlines())
    assert {client: values["examples"] for client, values in line["clients"].items()} == {"0": 12, "1": 6}
    assert result.summary.accuracy_of == "the clients' models on their test examples, mean"
    assert torch.equal(result.normalise()(torch.full((1, 1, 8, 8), 0.5)), torch.full((1, 1, 8, 8), 0.5))
    with pytest.raises(SettingsError, match="node_config has 2 entries, but there are 3 clients"):
        run(TINY, clients=3, node_config=sites, progress=False)


def test_data_that_changed_between_two_runs_are_read_again(tmp_path: Path) -> None:
    images = []
    for count in (12, 6):
        write_splits(tmp_path / "data", (8, 8), {"label": [0, 1, 2] * (count // 3)}, {"label": ["a", "b", "c"]})
        result = run(TINY, data={"name": str(tmp_path / "data")}, out=tmp_path / str(count), progress=False)
        (line,) = (json.loads(line) for line in (result.folder / "clients.jsonl").read_text().splitlines())
        images.append(sum(values["examples"] for values in line["clients"].values()))
    assert images == [12, 6]


def test_weights_that_changed_between_two_runs_are_read_again(tmp_path: Path) -> None:
    weights, means = tmp_path / "weights.safetensors", []
    arrays = load_file(run(TINY, model="mlp", out=tmp_path / "0", progress=False).folder / "model.safetensors")
    for number in (1.0, 5.0):
        save_file({**arrays, "bn.running_mean": torch.full_like(arrays["bn.running_mean"], number)}, weights)
        changes: Any = {"strategy": "FedBN", "model": {"name": "mlp", "weights": str(weights)}, "train": {"lr": 1e-9}}
        result = run(TINY, **changes, out=tmp_path / str(number), progress=False)
        means.append(float(result.model(client=0).get_buffer("bn.running_mean").mean()))
    assert means[1] - means[0] == pytest.approx(0.9 * 4, rel=1e-3), "0.1 of them are of the batch"


def test_the_process_is_left_as_it_was(tmp_path: Path) -> None:
    torch.set_num_threads(2)
    logging.getLogger("flwr").setLevel(logging.INFO)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    run(TINY, out=tmp_path, progress=False).model()
    assert torch.get_num_threads() == 2
    assert logging.getLogger("flwr").level == logging.INFO
    assert torch.equal(torch.rand(3), expected)


def test_progress_is_shown_unless_it_is_turned_off(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(TINY, out=tmp_path / "quiet", progress=False)
    assert capsys.readouterr() == ("", "")
    run(TINY, out=tmp_path / "shown")
    assert "[1/1] FedAvg: 1 round in" in capsys.readouterr().out


# --- What a run leaves on the disk and in memory, and that its figures do not depend on the workers.


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
    monkeypatch.setattr(prepare, "choose_device", lambda name: torch.device("cuda"))
    auto, four = (load_experiment("demo", [f"engine.workers={each}"]).runs[0] for each in ("auto", 4))
    assert prepare.workers_of(auto) == 0
    with pytest.raises(SettingsError, match=r"engine\.workers is 4.* cannot use a GPU; give 0, or engine\.name ray"):
        prepare.workers_of(four)
