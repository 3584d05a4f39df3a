"""Patients of four hospitals, part of the package, and inputs that each site scales by its own training examples."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict

from fedbn_flwr.commands import cli
from fedbn_flwr.data.catalogue import CATALOGUE
from fedbn_flwr.data.dataset import DataSet, Groups
from fedbn_flwr.data.examples import Examples, main_input
from fedbn_flwr.data.load import load
from fedbn_flwr.data.source import Source
from fedbn_flwr.errors import DataError, FedbnError
from fedbn_flwr.experiment.data import load_data, rows_by_domain, shares_of
from fedbn_flwr.experiment.file.layers import parse_yaml, read_experiment
from fedbn_flwr.experiment.listeners.evaluate import own_means
from fedbn_flwr.experiment.node import ClientParts
from fedbn_flwr.experiment.settings import Data, Settings
from tests.support.experiments import read
from tests.support.images import numbered, write_parquet

HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
CODES = {2: (2, 3, 4), 6: (1, 2)}  # columns of the source's files, and their values but the first


def test_the_hospitals_have_the_rows_of_flamby() -> None:
    """Ogier du Terrail et al. 2022, table of Fed-Heart-Disease; one row of all, by the source's file."""
    heart, entry = load(Source(name="heart")), CATALOGUE["heart"]
    assert (heart.classes, heart.shape, len(heart.train)) == (entry.classes, (entry.channels,), entry.examples)
    assert heart.groups.names == heart.domains.names == entry.domains == HOSPITALS
    assert torch.bincount(heart.groups.train).tolist() == [199, 172, 30, 85]
    assert torch.bincount(heart.groups.test).tolist() == [104, 89, 16, 45]
    rows = torch.cat([main_input(heart.train.inputs), main_input(heart.test.inputs)]).tolist()
    # 63,1,1,145,233,1,2,150,0,2.3,... : typical angina is the first kind, hypertrophy the last electrocardiogram.
    assert [63, 1, 145, 233, 1, 150, 0, pytest.approx(2.3), 0, 0, 0, 0, 1] in rows


def test_its_rows_are_those_of_the_source_split_as_by_flamby(shared_data: Path) -> None:
    from sklearn.model_selection import train_test_split

    if not (folder := shared_data / "heart_disease").is_dir():
        pytest.skip("no heart_disease/ in the folder of real data sets")
    heart = load(Source(name="heart"))
    for number, hospital in enumerate(HOSPITALS):
        with (folder / f"processed.{hospital}.data").open() as file:
            every = [row[:10] + row[13:] for row in csv.reader(file) if row]
        rows = np.array([row for row in every if "?" not in row], dtype=np.float64)
        ill = rows[:, -1] > 0
        stratify = ill if min(np.bincount(ill, minlength=2)) > 2 else None
        split = train_test_split(
            np.arange(len(rows)), test_size=1 - 0.66, train_size=0.66, random_state=43, shuffle=True, stratify=stratify
        )
        coded = [rows[:, column] == value for column, values in CODES.items() for value in values]
        inputs = np.column_stack([*(rows[:, i] for i in range(10) if i not in CODES), *coded]).astype(np.float32)
        of_split = (heart.train, heart.groups.train), (heart.test, heart.groups.test)
        for chosen, (part, groups) in zip(split, of_split, strict=True):
            here = np.sort(chosen)
            assert main_input(part.inputs)[groups == number].tolist() == inputs[here].tolist()
            assert part.labels[groups == number].tolist() == ill[here].tolist()


# --- data.normalise: own -------------------------------------------------------


def test_each_site_s_training_inputs_have_mean_zero_and_deviation_one() -> None:
    data = read("{clients: 4, data: {name: heart, normalise: own, partition: {kind: natural}}}").data
    raw, own = load(data), load_data(data, "cpu")
    for part, rows in enumerate(shares_of(data, 4, 0, "cpu")[0]):
        before, values = main_input(raw.train.inputs)[rows].double(), main_input(own.train.inputs)[rows].double()
        constant = before.amin(0) == before.amax(0)
        assert values.mean(0).abs().max() < 1e-6
        assert (values.std(0, correction=0) - 1)[~constant].abs().max() < 1e-6
        assert not values[:, constant].any()
        assert bool(constant.any()) == (part == 2)  # no cholesterol in Switzerland
        test = shares_of(data, 4, 0, "cpu")[1][part]
        deviation = before.std(0, correction=0).where(~constant, 1)
        expected = (main_input(raw.test.inputs)[test].double() - before.mean(0)) / deviation
        assert main_input(own.test.inputs)[test].numpy() == pytest.approx(expected.numpy(), abs=1e-5)
    assert load_data(data.model_copy(update={"normalise": "unit"}), "cpu").train.inputs is not own.train.inputs


def test_channels_of_series_are_scaled_over_time() -> None:
    heart = load(Source(name="heart"))
    series = main_input(heart.train.inputs)[:, :12].reshape(-1, 3, 4)
    tests = main_input(heart.test.inputs)[:, :12].reshape(-1, 3, 4)
    own = replace(heart, train=replace(heart.train, inputs=series), test=replace(heart.test, inputs=tests))
    values = main_input(own.standardised().train.inputs)[own.groups.train == 0]
    assert values.double().mean((0, 2)).abs().max() < 1e-6
    assert values.double().std((0, 2), correction=0).numpy() == pytest.approx(np.ones(3), abs=1e-6)


def test_a_site_with_a_file_of_its_own_scales_by_its_rows(tmp_path: Path) -> None:
    for part, values in (("train", [1.0, 3.0] * 20), ("test", [5.0] * 4)):
        lines = [f"{value},{i % 2}" for i, value in enumerate(values)]
        (tmp_path / f"{part}.csv").write_text("\n".join(["value,label", *lines]))
    run: Settings = read("{clients: 4, data: {name: heart, label: label, normalise: own, partition: {kind: natural}}}")
    parts = ClientParts.of(run, Context(1, 0, {"data-path": str(tmp_path), "partition-id": 0}, RecordDict(), {}))
    assert main_input(parts.dataset.train.inputs).unique().tolist() == [-1, 1]
    assert main_input(parts.dataset.test.inputs).unique().tolist() == [3]
    assert not parts.sends_sums


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "heart"}, r"'own', which is for the sites of partition natural, but partition.kind is 'iid'"),
        ({"name": "digits", "partition": {"kind": "natural"}}, "'own', which is for numbers, but 'digits' has other"),
    ],
)
def test_data_without_sites_or_numbers_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises((FedbnError, ValueError), match=message):
        load_data(Data(normalise="own", **settings), "cpu")


def test_test_examples_of_a_site_without_training_examples_are_refused() -> None:
    heart = load(Source(name="heart"))
    groups = Groups(heart.groups.names, heart.groups.train.clamp(max=2), heart.groups.test)
    with pytest.raises(DataError, match="test examples of groups without training examples"):
        replace(heart, groups=groups).standardised()


def test_a_folder_of_the_same_name_is_mentioned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[str] = []
    monkeypatch.setattr("fedbn_flwr.data.load.log_once", logged.append)
    monkeypatch.chdir(tmp_path)
    load(Source(name="heart"))
    assert not logged
    (tmp_path / "heart").mkdir()
    load(Source(name="heart"))
    assert logged == [
        "data.name=heart is the data set of this package; for the file or folder of this name write ./heart"
    ]


# --- Accuracy on each domain, of the global model and of the clients' own models.


SITES = ["farm yard", "sea"]
TEST = {"label": [0, 1, 2, 0, 1, 2, 0, 1], "domain": ["sea", "farm yard"] + ["sea"] * 4 + ["farm yard"] * 2}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "sites"
    rows: dict[str, Any] = {"label": [i % 3 for i in range(24)], "domain": [SITES[i // 3 % 2] for i in range(24)]}
    write_parquet(folder / "train.parquet", (8, 8, 3), rows, {"label": numbered(3)}, "image")
    write_parquet(folder / "test.parquet", (8, 8, 3), TEST, {"label": numbered(3)}, "image")
    return folder


def history(data: Path, out: Path, *words: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    base = ["rounds=2", "clients=2", f"data.name={data}", "data.partition={kind: domain}", "train.batch_size=4"]
    base += ["train.epochs=3", "engine.workers=0"]
    assert cli.main(["run", "quick", *base, *words, "--out", str(out)]) == 0
    (file,) = out.rglob("history.jsonl")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return lines, json.loads((file.parent / "summary.json").read_text())


def test_accuracies_of_domains_average_to_that_of_all_images(data: Path, tmp_path: Path) -> None:
    lines, summary = history(data, tmp_path / "out", "strategy={name: FedAvg}")
    for line in lines:
        sea, farm = line["accuracy_sea"], line["accuracy_farm_yard"]
        assert 5 * sea + 3 * farm == pytest.approx(8 * line["accuracy"], abs=1e-12)
        assert sea * 5 == pytest.approx(round(sea * 5), abs=1e-9), "a share of five images"
    assert summary["accuracy_sea"] == lines[-1]["accuracy_sea"]
    assert "clients_own_accuracy_sea" not in summary


def test_fedavg_s_clients_score_as_the_global_model_on_their_domain(data: Path, tmp_path: Path) -> None:
    """The client of a domain holds all its test images; under FedAvg it evaluates the global model itself."""
    lines, summary = history(data, tmp_path / "out", "strategy={name: FedAvg}", "evaluate.clients=true")
    for line in [*lines, summary]:
        for domain in ("sea", "farm_yard"):
            assert line[f"clients_own_accuracy_{domain}"] == line[f"accuracy_{domain}"]
        mean = (line["accuracy_sea"] + line["accuracy_farm_yard"]) / 2
        assert line["clients_own_accuracy"] == pytest.approx(mean, abs=1e-12), "each client counts alike"
    assert not [key for key in lines[0] if "@" in key]


def test_personal_models_are_evaluated_by_domain_too(data: Path, tmp_path: Path) -> None:
    lines, summary = history(data, tmp_path / "out", "strategy={name: FedBN}", "data.partition={kind: iid}")
    assert {"clients_own_accuracy_sea", "clients_own_accuracy_farm_yard"} <= summary.keys()
    assert not [key for key in lines[0] if "@" in key], "also where all clients have images of every domain"


def test_own_test_images_are_those_of_the_client_s_domain(data: Path) -> None:
    text = f"{{clients: 4, data: {{name: {data}, partition: {{kind: domain}}}}}}"
    (run,) = read_experiment(parse_yaml(text)).runs
    own = shares_of(run.data, 4, 0, "cpu")[1]
    dataset = load(Source(name=str(data)))
    assert dataset.domains.names == ("farm yard", "sea")
    assert torch.cat(own).sort().values.tolist() == list(range(8))
    assert [set(dataset.domains.test[rows].tolist()) for rows in own[2:]] == [{1}, {1}]
    assert set(dataset.domains.test[torch.cat(own[:2])].tolist()) == {0}


def test_rows_by_domain_leave_out_domains_without_test_images(data: Path) -> None:
    rows = rows_by_domain(load(Source(name=str(data), domains=["sea", "farm yard"])))
    assert {name: found.tolist() for name, found in rows.items()} == {"sea": [0, 2, 3, 4, 5], "farm_yard": [1, 6, 7]}
    assert rows_by_domain(load(Source(name="digits"))) == {}


def test_a_domain_may_have_the_word_images_in_its_name() -> None:
    values = {"own_accuracy": 0.5, "own_examples": 4, "own_accuracy_night_images": 0.25, "own_examples_night_images": 4}
    assert own_means({0: values}) == {"own_accuracy": 0.5, "own_accuracy_night_images": 0.25}


@pytest.mark.parametrize(
    ("names", "wrong"),
    [
        (["farm yard", "farm-yard"], "farm-yard"),
        (["of", "sea"], "of"),
        (["std", "sea"], "std"),
        (["sea", "x worst-tenth"], "x worst-tenth"),
    ],
)
def test_domains_whose_figures_have_no_name_of_their_own_are_refused(names: list[str], wrong: str) -> None:
    rows = torch.tensor([0, 1, 1])
    images = Examples(torch.zeros(3, 1, 2, 2, dtype=torch.uint8), rows)
    data = DataSet("sites", images, images, ("a", "b"), Groups(tuple(names), rows, rows))
    with pytest.raises(
        DataError, match=f"a domain whose accuracy would have the name of another metric; .*: '{wrong}'"
    ):
        rows_by_domain(data)
    alone = Groups(tuple(names), rows, None)
    assert rows_by_domain(DataSet("sites", images, images, ("a", "b"), alone)) == {}, "no figures of domains"
