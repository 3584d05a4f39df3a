"""Given models at all clients without training, against direct computation and `fedbn predict`."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from fedbn_flwr import LocalGrid, client_app, evaluate, run, run_all
from fedbn_flwr.commands import cli
from fedbn_flwr.errors import RunFailed, SettingsError
from fedbn_flwr.experiment.data import load_data, shares_of
from fedbn_flwr.experiment.file.layers import load_experiment
from fedbn_flwr.experiment.node import make_client
from fedbn_flwr.experiment.run.launch import serve
from fedbn_flwr.results.read.runs import find_runs
from fedbn_flwr.results.report.rows import group
from fedbn_flwr.results.report.tables import judged_table
from fedbn_flwr.results.result import Result
from fedbn_flwr.results.yaml_text import dump_yaml

SETTINGS: dict[str, Any] = {
    "rounds": 2,
    "clients": 4,
    "data": {"name": "digits", "examples": 300, "test_examples": 150, "partition": {"kind": "dirichlet", "alpha": 1.0}},
    "train": {"lr": 0.1, "batch_size": 20, "steps": 5},
    "engine": {"workers": 0, "device": "cpu"},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Result]:
    folder = tmp_path_factory.mktemp("models")
    names = ("FedAvg", "FixBN")
    return [run({**SETTINGS, "seed": 0}, strategy=name, out=folder / name, progress=False) for name in names]


def twin(result: Result) -> tuple[list[int], list[float]]:
    """The numbers of test examples, and the accuracies, of the four clients, computed directly in float64."""
    (settings,) = load_experiment(json.dumps(SETTINGS)).runs
    dataset = load_data(settings.data, "cpu")
    _, shares = shares_of(settings.data, 4, 0, "cpu")
    model, normalise = result.model().double(), result.normalise()
    outputs = model(normalise(dataset.test.inputs.double() / 255))
    right = (outputs.argmax(1) == dataset.test.labels).double()
    return [len(rows) for rows in shares], [float(right[rows].mean()) for rows in shares]


def test_each_client_measures_what_direct_computation_gives(models: list[Result], tmp_path: Path) -> None:
    judged = evaluate(SETTINGS, *models, out=tmp_path)
    assert judged.labels == [str(model.folder) for model in models]
    counts, *accuracies = twin(models[0])[0], *(twin(model)[1] for model in models)
    for found, expected in zip(judged, accuracies, strict=True):
        assert [found.clients["own_examples"][str(client)] for client in range(4)] == counts
        assert own(found) == pytest.approx(expected, abs=1e-9)
        assert (found.summary.status, found.summary.rounds, len(found.lines)) == ("finished", 0, 1)
    found = {first: cells for first, *cells in judged_table(group(find_runs([tmp_path])))[1]}
    means = [np.average(expected, weights=counts) for expected in accuracies]
    assert found["weighted"] == ["150", *(f"{mean:.2%}" for mean in means)]
    tested = stats.ttest_rel(accuracies[1], accuracies[0])
    low, high = tested.confidence_interval(0.95)
    difference = np.mean(accuracies[1]) - np.mean(accuracies[0])
    assert found["difference to the first"] == ["", "-", f"{100 * difference:+.2f}"]
    assert found["95 % interval"] == ["", "-", f"{100 * low:+.2f} to {100 * high:+.2f}"]
    assert found["p (Holm)"] == ["", "-", f"{tested.pvalue:.3f}"]


def own(result: Result) -> list[float]:
    values = result.clients["own_accuracy"]
    return [values[str(client)] for client in range(len(values))]


def test_runs_that_differ_only_in_how_they_train_need_no_choice(models: list[Result], tmp_path: Path) -> None:
    runs = {"one": {}, "two": {"strategy": "FixBN"}, "three": {"train": {"lr": 0.5}}}
    one, several = (
        evaluate({**SETTINGS, **more}, models[0], out=tmp_path / str(len(more))) for more in ({}, {"runs": runs})
    )
    assert [own(result) for result in one] == [own(result) for result in several]


def test_a_run_without_rounds_stands_beside_those_that_train(tmp_path: Path) -> None:
    runs = {"start": {"rounds": 0}, "trained": {}}
    start, trained = run_all({**SETTINGS, "runs": runs}, out=tmp_path, progress=False)
    assert own(start) == pytest.approx(twin(start)[1], abs=1e-9)
    assert (start.summary.rounds, trained.summary.rounds) == (0, 2)


def test_no_train_message_is_sent(models: list[Result], tmp_path: Path) -> None:
    """On the grid of a Flower run, as on real sites; the model is a file of weights, so the sites agree on moments."""
    kinds: list[str] = []

    class Listening(LocalGrid):
        def push_messages(self, messages: Any) -> Any:
            sent = list(messages)
            kinds.extend(message.metadata.message_type for message in sent)
            return super().push_messages(sent)

    torch.save(models[0].model().state_dict(), tmp_path / "weights.pt")
    text = dump_yaml({**SETTINGS, "rounds": 0, "evaluate": {"models": [str(tmp_path / "weights.pt")]}})
    config = {"experiment": text, "out": str(tmp_path / "out")}
    with Listening(client_app(make_client), 4, run_config=config) as grid:
        serve(grid, config)
    assert len([kind for kind in kinds if kind.startswith("evaluate")]) == 4
    assert not any(kind.startswith("train") for kind in kinds)
    assert own(Result.read(tmp_path / "out")) == pytest.approx(twin(models[0])[1], abs=1e-9)


def write_site(folder: Path, seed: int, shift: float) -> Path:
    draw = np.random.default_rng(seed)
    folder.mkdir()
    for part, count in (("train", 60), ("test", 31)):
        inputs = draw.normal(shift, 1 + seed, (count, 2))
        labels = np.where(inputs @ [1.0, -1.0] + draw.normal(0, 0.5, count) > 0, "yes", "no")
        with (folder / f"{part}.csv").open("w", newline="") as file:
            csv.writer(file).writerows(
                [("a", "b", "label"), *((*row, label) for row, label in zip(inputs, labels, strict=True))]
            )
    return folder


def test_sites_measure_what_predict_gives_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    sites = [write_site(tmp_path / f"site{number}", number, 3.0 * number) for number in range(3)]
    nodes = [{"data-path": str(site), "min-batch": 1} for site in sites]
    settings: dict[str, Any] = {
        "rounds": 3,
        "clients": 3,
        "data": {"name": "sites", "label": "label", "shape": [2], "class_names": ["no", "yes"], "normalise": "moments"},
        "model": "mlp",
        "train": {"lr": 0.1, "batch_size": 20},
        "evaluate": {"server": False},
        "engine": {"workers": 0, "device": "cpu"},
    }
    done = run(settings, strategy="FixBN", node_config=nodes, out="run", progress=False)
    (judged,) = evaluate(settings, done, node_config=nodes, out="judged")
    for number, site in enumerate(sites):
        words = ["predict", str(done.folder), "--data", str(site), "--out", "predictions.csv"]
        assert cli.main(words) == 0
        said = re.search(r"accuracy ([0-9.]+): (\d+) of 31 labels", capsys.readouterr().out)
        assert said is not None
        assert judged.clients["own_examples"][str(number)] == 31
        assert judged.clients["own_accuracy"][str(number)] == pytest.approx(int(said[2]) / 31)
    others = {**settings, "data": {**settings["data"], "class_names": ["yes", "no"]}}
    with pytest.raises((SettingsError, RunFailed), match="classes"):
        evaluate(others, done, node_config=nodes, out="others")


def test_what_cannot_be_judged_is_named(models: list[Result], tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="does not fit the"):
        evaluate(SETTINGS, models[0], model="mlp", out=tmp_path)
    with pytest.raises(SettingsError, match=r"model\.safetensors' cannot be read"):
        evaluate(SETTINGS, tmp_path, out=tmp_path)
    with pytest.raises(SettingsError, match="differ in their data or network; choose one by only=LABEL and seed="):
        evaluate({**SETTINGS, "runs": {"one": {}, "two": {"seed": 1}}}, models[0], out=tmp_path)
    with pytest.raises(SettingsError, match="instead of training, but rounds is 2"):
        run(SETTINGS, evaluate={"models": ["a"]}, out=tmp_path)


def test_the_command_prints_a_table(models: list[Result], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "e.yaml").write_text(dump_yaml(SETTINGS))
    words = [word for model in models for word in ("--model", str(model.folder))]
    assert cli.main(["evaluate", str(tmp_path / "e.yaml"), *words, "--out", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out
    table = shown[shown.index("accuracy on each client's own test examples") :].partition("\n\n")[0]
    assert "difference to the first" in table
    assert cli.main(["report", str(tmp_path)]) == 0
    assert table in capsys.readouterr().out
