"""Clients that never train, evaluated as newcomers (`evaluate.unseen`), against direct computation."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fedbn_flwr import run
from fedbn_flwr.errors import SettingsError
from fedbn_flwr.experiment.data import load_data, normalisation_of, shares_of
from fedbn_flwr.experiment.file.layers import load_experiment
from fedbn_flwr.experiment.parts import make_model
from fedbn_flwr.experiment.prepare import prepare

EXPERIMENT: dict[str, Any] = {
    "rounds": 2,
    "clients": 3,
    "data": {"name": "digits", "examples": 300, "test_examples": 150,
             "partition": {"kind": "dirichlet", "alpha": 1.0}},
    "train": {"lr": 0.05, "batch_size": 100, "steps": 3},
    "evaluate": {"unseen": {"clients": [2]}, "every": 2},
    "engine": {"workers": 0, "device": "cpu"},
}  # fmt: skip


def experiment(strategy: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {**EXPERIMENT, "strategy": strategy, **more}


def accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    with torch.no_grad():
        return float((model.eval()(images).argmax(1) == labels).double().mean())


def twins(settings: Any, arrays: dict[str, torch.Tensor], client: int) -> dict[str, float]:
    """What a newcomer gets on its own test examples with each of the three batch norms, computed directly."""
    dataset = load_data(settings.data, "cpu")
    train, test = (rows[client] for rows in shares_of(settings.data, settings.clients, settings.seed, "cpu"))
    mean, std = (torch.tensor(each).view(1, -1, 1, 1) for each in normalisation_of(settings, dataset))

    def images(examples: Any, rows: torch.Tensor) -> torch.Tensor:
        return (examples.inputs[rows].float() / 255 - mean) / std

    new = make_model(settings, dataset)
    whole, measured, own = (copy.deepcopy(new) for _ in range(3))
    whole.load_state_dict(arrays, strict=False)
    measured.load_state_dict(arrays, strict=False)
    for layer in measured.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.momentum = 1.0  # one pass over all training images at once leaves their unbiased moments
    with torch.no_grad():
        measured.train()(images(dataset.train, train))
    norms = {name for name, layer in new.named_modules() if isinstance(layer, nn.BatchNorm2d)}
    own.load_state_dict({k: v for k, v in arrays.items() if k.rpartition(".")[0] not in norms}, strict=False)
    inputs, labels = images(dataset.test, test), dataset.test.labels[test]
    return {name: accuracy(model, inputs, labels)
            for name, model in (("mean", whole), ("batch", measured), ("own", own))}  # fmt: skip


@pytest.mark.parametrize("strategy", ["FedBN", "FedAvg"])
def test_each_batch_norm_gives_what_direct_computation_gives(strategy: str, tmp_path: Path) -> None:
    given = experiment({"name": strategy})
    result = run(given, out=tmp_path, progress=False)
    (settings,) = load_experiment(json.dumps(given)).runs
    arrays = {key: value.clone() for key, value in result.model().state_dict().items() if "num_batches" not in key}
    expected = twins(settings, arrays, 2)
    if strategy == "FedAvg":  # it keeps nothing on the clients
        expected["own"] = expected["mean"]
    summary = json.loads((result.folder / "summary.json").read_text())
    assert {way: summary[f"unseen_{way}_accuracy"] for way in expected} == pytest.approx(expected, abs=1e-6)
    assert len({*expected.values()}) == (3 if strategy == "FedBN" else 2), "the ways differ"


def test_a_newcomer_never_trains_and_is_not_missed(tmp_path: Path) -> None:
    """The others train as if there were no third client: its node is hidden from the strategy."""
    result = run(experiment({"name": "FedAvg"}), out=tmp_path, progress=False)
    summary = json.loads((result.folder / "summary.json").read_text())
    assert (summary["clients_due"], summary["clients"]) == (2, 2)
    lines = [json.loads(line) for line in (result.folder / "clients.jsonl").read_text().splitlines()]
    assert [sorted(line["clients"]) for line in lines] == [["0", "1"], ["0", "1", "2"]]
    assert set(lines[1]["clients"]["2"]) == {f"unseen_{way}_accuracy" for way in ("mean", "batch", "own")}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"evaluate": {"unseen": {"clients": [3]}}}, r"\[3\], but clients is 3; expected some of the numbers 0 to 2"),
        ({"evaluate": {"unseen": {"clients": [0, 1, 2]}}}, "so that others train"),
        ({"evaluate": {"unseen": {"clients": [1, 1]}}}, "list each client once"),
        ({"evaluate": {"unseen": {"clients": [1], "statistics": ["all"]}}}, "evaluate.unseen.statistics"),
        (
            {"strategy": {"name": "FedBN", "global_norm": "initial"}},
            r"unseen\.statistics is \['mean', 'batch', 'own'\], but .* FedBN has no mean for a newcomer: .* affine",
        ),
        ({"strategy": {"name": "Standalone"}}, "Standalone trains no global model, so it has none for a newcomer"),
        ({"strategy": {"name": "FedAvg", "min_train_nodes": 3}}, "min_train_nodes .* is 3, but there are 2 clients"),
    ],
)
def test_settings_that_leave_no_newcomer_or_no_model_are_errors(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(SettingsError, match=reason):
        prepare(load_experiment(json.dumps(experiment({"name": "FedAvg"}) | changes)))
