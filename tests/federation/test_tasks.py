"""Runs of every task, on scikit-learn's embedded tables; what does not suit the labels is refused before training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sklearn.datasets
import sklearn.metrics
import torch
from flwr.app import ArrayRecord
from torch import nn

from fedbn_flwr import BNClient, LocalGrid, client_app, run
from fedbn_flwr.errors import RunFailed, SettingsError
from fedbn_flwr.experiment.file.layers import read_experiment
from fedbn_flwr.experiment.prepare import prepare
from fedbn_flwr.strategies import FedAvg, FixBN

TABLES = '''
import numpy as np
import torch
from sklearn.datasets import load_breast_cancer, load_diabetes, load_wine
from torch.nn import functional as F


def split(x, y):
    rows = np.random.default_rng(0).permutation(len(x))
    x, y = x[rows].astype(np.float32), y[rows]
    return {"train": (x[::2], y[::2]), "test": (x[1::2], y[1::2])}


def diabetes():
    x, y = load_diabetes(return_X_y=True)
    return split(x, y.astype(np.float32))


def pair():
    """Two numbers for each patient."""
    x, y = load_diabetes(return_X_y=True)
    return split(x, np.stack([y / 100, y**0.5], 1).astype(np.float32))


def cancer():
    return split(*load_breast_cancer(return_X_y=True))


def wine():
    """Three labels that are no classes: whether it has more of three substances than the median."""
    x, _ = load_wine(return_X_y=True)
    return split(x, x[:, :3] > np.median(x[:, :3], 0))


def relative_error(outputs, targets):
    return float(((outputs.reshape(-1) - targets) / targets).abs().mean())
'''


@pytest.fixture(autouse=True)
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_data.py").write_text(TABLES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


def settings(name: str, **more: Any) -> dict[str, Any]:
    return {
        "rounds": 3,
        "clients": 2,
        "data": {"name": f"own_data:{name}", **more.pop("data", {})},
        "model": {"name": "mlp"},
        "train": {"lr": 0.02, "epochs": 2, **more.pop("train", {})},
        "engine": {"workers": 0, "device": "cpu"},
        **more,
    }


def test_a_regression_is_judged_by_its_lowest_error(tmp_path: Path) -> None:
    evaluate = {"validation": 0.2, "metrics": ["own_data:relative_error"]}
    given = settings("diabetes", clients=3, train={"lr": 0.002}, evaluate=evaluate)
    result = run(given, out=tmp_path / "out", progress=False)
    figures, history = result.summary.to_json(), result.lines
    assert figures["task"] == "regression"
    errors = [line["rmse"] for line in history]
    held_out = [line["validation_rmse"] for line in history]
    assert figures["best_test_rmse"] == min(errors)
    assert figures["best_round"] == 1 + held_out.index(min(held_out))
    assert figures["best_round_rmse"] == errors[held_out.index(min(held_out))]
    assert {"relative_error", "mae", "r2"} <= figures.keys()
    assert not any("accuracy" in key for key in figures.keys() - {"accuracy_of"})
    # The figures are those of the model's file, by scikit-learn, on normalised inputs.
    data = sklearn.datasets.load_diabetes(return_X_y=True)
    rows = np.random.default_rng(0).permutation(len(data[0]))
    train, test = (data[0][rows].astype(np.float32)[part::2] for part in (0, 1))
    targets = data[1][rows][1::2].astype(np.float32)
    inputs = torch.from_numpy((test - train.mean(0)) / train.std(0))
    outputs = result.model()(inputs).detach().numpy()[:, 0]
    line = history[-1]
    assert line["rmse"] == pytest.approx(sklearn.metrics.root_mean_squared_error(targets, outputs), rel=1e-4)
    assert line["mae"] == pytest.approx(sklearn.metrics.mean_absolute_error(targets, outputs), rel=1e-4)
    assert line["r2"] == pytest.approx(sklearn.metrics.r2_score(targets, outputs), abs=1e-4)
    assert line["loss"] == pytest.approx(line["rmse"] ** 2, rel=1e-5)
    assert line["relative_error"] == pytest.approx(float(np.abs((outputs - targets) / targets).mean()), rel=1e-4)


@pytest.mark.parametrize(
    ("name", "more", "keys"),
    [
        ("pair", {"train": {"loss": "mae"}}, {"rmse", "mae", "r2"}),
        ("cancer", {"data": {"task": "binary"}, "train": {"class_weights": "balanced"}}, {"accuracy"}),
        (
            "wine",
            {"train": {"lr": 0.1, "epochs": 4, "label_smoothing": 0.1}, "evaluate": {"metrics": ["auc"]}},
            {"macro_f1", "accuracy", "auc"},
        ),
    ],
)
def test_every_task_trains(name: str, more: dict[str, Any], keys: set[str], tmp_path: Path) -> None:
    given = settings(name, strategy={"name": "FixBN", "freeze_round": 2}, **more)
    first, _, line = run(given, out=tmp_path / "out", progress=False).lines
    assert line["loss"] < first["loss"]
    figures = line.keys() & {"rmse", "mae", "r2", "accuracy", "macro_f1", "auc", "mean_iou"}
    assert figures == keys


@pytest.mark.parametrize(
    ("name", "more", "words"),
    [
        (
            "diabetes",
            {"train": {"loss": "cross_entropy"}},
            r"train\.loss is cross_entropy, but 'own_data:diabetes' has numbers \(regression\); expected mse or mae or",
        ),
        (
            "cancer",
            {"train": {"loss": "mse"}},
            r"train\.loss is mse, but .* one class per example \(classification\); exp",
        ),
        (
            "cancer",
            {"train": {"loss": "bce"}},
            r"train\.loss is bce, but .* expected cross_entropy, or module:callable",
        ),
        (
            "diabetes",
            {"train": {"label_smoothing": 0.1}},
            r"train\.label_smoothing is 0\.1, but .* \(regression\); leave",
        ),
        (
            "wine",
            {"train": {"class_weights": [1, 2, 3]}},
            r"train\.class_weights is .*, but .* \(multilabel\); leave it",
        ),
        (
            "diabetes",
            {"evaluate": {"metrics": ["auc"]}},
            r"evaluate\.metrics: metric 'auc' is not defined for regression",
        ),
        (
            "cancer",
            {"evaluate": {"metrics": ["r2"]}},
            r"evaluate\.metrics: metric 'r2' is not defined for classification",
        ),
        (
            "wine",
            {"train": {"loss": {"name": "huber", "delta": 1}}},
            r"train\.loss is huber, but .* several labels per",
        ),
        (
            "diabetes",
            {"train": {"loss": {"name": "huber", "delta": -1}}},
            r"train\.loss='huber', given .* failed: .*delta",
        ),
    ],
)
def test_what_does_not_suit_the_labels_is_refused(name: str, more: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        prepare(read_experiment(settings(name, **more)))


def test_a_client_of_one_s_own_has_the_figures_of_its_task() -> None:
    """BNClient and LocalGrid, as another Flower project uses them."""
    x, y = sklearn.datasets.load_diabetes(return_X_y=True)
    inputs, targets = torch.from_numpy(x).float() * 20, torch.from_numpy(y).float() / 100
    model = nn.Sequential(nn.Linear(10, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))

    def make_client(context: Any) -> BNClient:
        own = nn.Sequential(nn.Linear(10, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
        rows = slice(int(context.node_config["partition-id"]), None, 2)
        batches = list(zip(inputs[rows].split(32), targets[rows].split(32), strict=True))
        return BNClient(own, batches, batches, lr=0.05, task="regression", context=context)

    with LocalGrid(client_app(make_client), 2) as grid:
        found = FixBN(FedAvg(min_available_nodes=2), freeze_round=2).start(
            grid, ArrayRecord(model.state_dict()), num_rounds=3
        )
    (first, *_, final) = found.evaluate_metrics_clientapp.values()
    assert {"loss", "rmse", "mae", "r2"} <= {*final}
    assert float(final["rmse"]) < float(first["rmse"])


def test_a_regression_that_diverges_is_told_the_size_of_its_labels(tmp_path: Path) -> None:
    given = settings("diabetes", train={"lr": 10.0, "epochs": 20})
    with pytest.raises(RunFailed, match=r"or set data\.targets: scale\. The regression targets are 1\d\d in size"):
        run(given, out=tmp_path / "out", progress=False)
