"""`data.targets: scale`: the run equals one on targets that were scaled by hand, and reports the original units."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sklearn.datasets
import torch
from flwr.app import Context
from numpy.typing import NDArray

from fedbn_flwr import Result, client_app, run
from fedbn_flwr.errors import RunFailed, SettingsError
from fedbn_flwr.experiment.node import make_client
from fedbn_flwr.results.folder.writer import RunFolder
from tests.support.federations import near
from tests.support.sites import served

Table = NDArray[np.float64]
INPUTS = [f"x{number}" for number in range(10)]


def table(columns: int = 1) -> tuple[Table, Table]:
    """442 patients: ten inputs, and the progression of diabetes, 25 to 346; a second target is made up."""
    inputs, targets = sklearn.datasets.load_diabetes(return_X_y=True)
    more = 1e-3 * inputs[:, 2] + 5e-5 * targets / 100
    return inputs.astype(np.float32).astype(float), np.stack([targets, more], 1)[:, :columns]


def write(folder: Path, inputs: Table, targets: Table) -> dict[str, Any]:
    """Every fifth row is a test example."""
    folder.mkdir(parents=True)
    labels = [f"y{number}" for number in range(targets.shape[1])]
    rows = np.concatenate([inputs, targets], 1)
    is_test = np.arange(len(rows)) % 5 == 4
    for name, some in (("train", rows[~is_test]), ("test", rows[is_test])):
        lines = [",".join([*INPUTS, *labels]), *(",".join(map(repr, row)) for row in some.tolist())]
        (folder / f"{name}.csv").write_text("\n".join(lines))
    return {"name": str(folder), "label": labels, "inputs": INPUTS, "task": "regression"}


def settings(data: dict[str, Any], **changes: Any) -> dict[str, Any]:
    given: dict[str, Any] = {
        "rounds": 3,
        "clients": 3,
        "data": data,
        "model": {"name": "mlp"},
        "train": {"lr": 0.05, "batch_size": 32},
        "strategy": {"name": "FedAvg"},
        "engine": {"device": "cpu", "workers": 0},
    }
    return given | changes


def moments(targets: Table) -> tuple[Table, Table]:
    train = targets.astype(np.float32).astype(float)[np.arange(len(targets)) % 5 != 4]
    return train.mean(0), train.std(0)


@pytest.mark.parametrize("columns", [1, 2])
def test_a_run_is_that_on_targets_scaled_by_hand_in_other_units(columns: int, tmp_path: Path) -> None:
    inputs, targets = table(columns)
    mean, deviation = moments(targets)
    raw = write(tmp_path / "raw", inputs, targets)
    by_hand = write(tmp_path / "scaled", inputs, (targets - mean) / deviation)
    validation = {"evaluate": {"validation": 0.2, "clients": True}}
    found = run(settings(raw | {"targets": "scale"}, **validation), out=tmp_path / "a", progress=False)
    twin = run(settings(by_hand, **validation), out=tmp_path / "b", progress=False)
    near(twin.model().state_dict(), found.model().state_dict(), rtol=2e-3, atol=2e-4)
    described = json.loads((found.folder / "model.json").read_text())["targets"]
    np.testing.assert_allclose(described["mean"], mean, rtol=1e-12)
    np.testing.assert_allclose(described["std"], deviation, rtol=1e-12)
    last, other = found.lines[-1], twin.lines[-1]
    assert math.isclose(last["train_loss"], other["train_loss"], rel_tol=1e-3), "of scaled numbers"
    assert math.isclose(last["r2"], other["r2"], rel_tol=1e-2)
    if columns == 1:
        for key in ("rmse", "mae", "clients_own_rmse", "validation_rmse"):
            assert math.isclose(last[key], other[key] * deviation[0], rel_tol=1e-3), key
    truth = targets[4::5]
    with torch.no_grad():
        outputs = found.model()(found.normalise()(torch.from_numpy(inputs[4::5]).float())).double().numpy()
    error = np.sqrt(((outputs.reshape(truth.shape) - truth) ** 2).mean(0)).mean()
    assert math.isclose(last["rmse"], error, rel_tol=1e-5), "in float64, from the model in the folder"


def test_sites_agree_on_the_moments_of_their_targets_and_resume_with_them(tmp_path: Path) -> None:
    inputs, targets = table()
    parts = [slice(0, 150), slice(150, 250), slice(250, 440)]
    for number, part in enumerate(parts):
        write(tmp_path / f"site-{number}", inputs[part], targets[part])
    data = {"name": "/nowhere", "inputs": INPUTS, "label": "y0", "task": "regression", "targets": "scale"}
    experiment = settings(data, evaluate={"server": False})
    configs: list[dict[str, Any]] = [{"data-path": str(tmp_path / f"site-{number}")} for number in range(3)]
    whole = served(experiment, tmp_path / "whole", configs)
    with pytest.raises(RunFailed, match="OSError"):
        served(experiment, tmp_path / "resumed", configs, failing_after(2))
    resumed = served(experiment, tmp_path / "resumed", configs, resume=True)
    assert (whole / "model.safetensors").read_bytes() == (resumed / "model.safetensors").read_bytes()
    used = np.concatenate([some[np.arange(len(some)) % 5 != 4] for some in (targets[part] for part in parts)])
    mean, deviation = RunFolder(whole).model_description().units or ((), ())
    np.testing.assert_allclose((mean, deviation), (used.mean(0), used.std(0)), rtol=1e-12)
    assert Result.read(whole).lines[-1]["clients_own_rmse"] > 10, "in the targets' units"


def failing_after(last: int) -> Any:
    """The app of clients that fail after this round."""

    def make(context: Context, config: Any) -> Any:
        if config.get("server-round", 0) > last:
            raise OSError("power cut")
        return make_client(context, config)

    return client_app(make)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"normalise": "unit"}, "needs data.normalise: moments"),
        ({"task": "classification"}, "is for regression targets, but .* has labels for classification"),
    ],
)
def test_it_needs_numbers_and_the_moments_of_inputs(changes: dict[str, Any], match: str, tmp_path: Path) -> None:
    inputs, targets = table()
    data = write(tmp_path / "data", inputs, targets.round() % 2 if "task" in changes else targets)
    with pytest.raises(SettingsError, match=f"data.targets is 'scale', which {match}"):
        run(settings(data | {"targets": "scale"} | changes, clients=2), out=tmp_path / "out", progress=False)
