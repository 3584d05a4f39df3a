"""Accuracy on each domain, of the global model and of the clients' own models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fedbn_flwr.commands import cli
from fedbn_flwr.data.dataset import DataSet, Groups
from fedbn_flwr.data.examples import Examples
from fedbn_flwr.data.load import load
from fedbn_flwr.data.source import Source
from fedbn_flwr.errors import DataError
from fedbn_flwr.experiment.data import rows_by_domain, shares_of
from fedbn_flwr.experiment.file.layers import parse_yaml, read_experiment
from fedbn_flwr.experiment.listeners.evaluate import own_means
from tests.support.images import numbered, write_parquet

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
