"""`Result` and `Results`: runs read from their folders."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import torchvision
from safetensors.torch import load_file, save_file
from torch import nn
from torchvision.models import resnet18

from fedbn_flwr import Result, Results, run, run_all
from fedbn_flwr.data.load import load
from fedbn_flwr.data.source import Source
from fedbn_flwr.errors import UserError
from fedbn_flwr.norms import NORMS
from tests.support.images import write_splits
from tests.support.marks import slow_except
from tests.support.runs import write_run

SMALL: dict[str, Any] = {
    "rounds": 2,
    "clients": 2,
    "train": {"steps": 4, "lr": 0.05},
    "engine": {"workers": 0, "device": "cpu"},
}


def accuracy(result: Result, model: nn.Module) -> float:
    """On the test examples of the digits, in plain PyTorch."""
    images, labels = load(Source(name="digits")).test.batch(torch.arange(359))
    with torch.no_grad():
        predicted = model(result.normalise()(images / 255)).argmax(1)
    return float((predicted == labels).float().mean())


@pytest.fixture(scope="module")
def fixbn(tmp_path_factory: pytest.TempPathFactory) -> Result:
    out = tmp_path_factory.mktemp("fixbn")
    return run(SMALL, strategy={"name": "FixBN", "freeze_round": 1}, label="<b>FixBN</b>", out=out, progress=False)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    runs = {"FedAvg": {}, "FedBN": {"strategy": {"name": "FedBN"}}}
    return run_all(SMALL, runs=runs, seeds=[0, 1], out=tmp_path_factory.mktemp("runs"), progress=False)


# --- one run -----------------------------------------------------------------


def test_the_model_has_the_accuracy_of_the_summary(fixbn: Result) -> None:
    assert accuracy(fixbn, fixbn.model()) == pytest.approx(fixbn.summary.accuracy, abs=1e-7)
    assert not fixbn.model().training


def test_the_history_is_a_frame_with_a_row_per_round(fixbn: Result) -> None:
    assert list(fixbn.history.index) == [1, 2]
    assert fixbn.history["accuracy"].iloc[-1] == fixbn.summary.accuracy
    assert fixbn.history["bytes_up"].sum() == fixbn.summary.traffic.bytes_up


def test_a_run_is_read_from_its_folder_or_from_the_one_above(fixbn: Result) -> None:
    for folder in (fixbn.folder, str(fixbn.folder.parent)):
        again = Result.read(folder)
        assert again.folder == fixbn.folder
        assert again.config == fixbn.config
        assert again.summary == fixbn.summary
        pd.testing.assert_frame_equal(again.history, fixbn.history)
    assert fixbn.config["strategy"] == {"name": "FixBN", "freeze_round": 1}
    assert fixbn.classes == tuple("0123456789")


def test_a_notebook_shows_a_run_and_its_plot(fixbn: Result) -> None:
    shown = fixbn._repr_html_()
    assert "&lt;b&gt;FixBN&lt;/b&gt;" in shown
    assert "<b>" not in shown
    assert f"{100 * (fixbn.summary.accuracy or 0):.2f}%" in shown
    assert "finished, 2 of 2 rounds" in repr(fixbn)
    assert fixbn.plot()._repr_png_().startswith(b"\x89PNG")


def test_a_file_that_is_missing_is_named(fixbn: Result, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no 'best\.safetensors'; files with models: model\.safetensors"):
        fixbn.model(file="best.safetensors")
    with pytest.raises(UserError, match="is not a folder"):
        Result.read(tmp_path / "absent")
    with pytest.raises(UserError, match="holds no run"):
        Result.read(tmp_path)


class Counting(nn.Module):
    """A normaliser of the user that counts its batches, and has no version as batch norm has."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("num_batches_tracked", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.num_batches_tracked += 1
        return x - self.running_mean[:, None, None]


def test_counters_of_the_user_s_own_normaliser_start_at_zero(tmp_path: Path) -> None:
    model = {"name": "cnn", "norm": f"{__name__}:Counting"}
    result = run(SMALL, model=model, strategy={"name": "FedBN"}, out=tmp_path, progress=False)
    assert {int(value) for key, value in result.model().state_dict().items() if "num_batches" in key} == {0}
    counted = {int(value) for key, value in result.model(client=0).state_dict().items() if "num_batches" in key}
    assert counted == {8}  # 2 rounds of 4 steps


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda file: file.write_bytes(file.read_bytes()[:-9]), "it cannot be read: Error while deserializing"),
        (lambda file: save_file({"a": torch.ones(1)}, file), "it does not fit the network of model.json .*Missing key"),
    ],
)
def test_a_damaged_model_is_one_message(fixbn: Result, tmp_path: Path, change: Any, message: str) -> None:
    copied = tmp_path / "run"
    shutil.copytree(fixbn.folder, copied)
    change(copied / "model.safetensors")
    with pytest.raises(UserError, match=rf"model.safetensors': {message}.*; restore the file from a copy"):
        Result.read(copied).model()


@pytest.mark.parametrize("shape", [[1, 8, 8], [3], [1, 20], [1, 4, 4, 4]])
def test_inputs_of_any_shape_are_normalised(shape: list[int], tmp_path: Path) -> None:
    known = {"mean": [0.25 * i for i in range(shape[0])], "std": [0.5] * shape[0]}
    build = {"name": "mlp", "num_classes": 2, "norm": "bn", "input_shape": shape}
    write_run(tmp_path / "run", "FedAvg", files={"model.json": {"build": build, "normalise": known}})
    inputs = torch.rand(2, *shape)
    mean = torch.tensor(known["mean"]).view(-1, *[1] * (inputs.ndim - 2))
    assert torch.equal(Result.read(tmp_path).normalise()(inputs), (inputs - mean) / 0.5)


# --- several runs ------------------------------------------------------------


def test_runs_are_a_tuple_in_the_order_of_the_experiment(results: Results) -> None:
    assert len(results) == 4
    assert results.labels == ["FedAvg", "FedBN"]
    assert results[-1].folder.name == "FedBN-seed1"
    assert [result.summary.seed for result in results[:2]] == [0, 1]


def test_a_run_is_found_by_its_label_or_its_folder(results: Results) -> None:
    assert results.find("FedBN-seed1") is results[-1]
    with pytest.raises(
        UserError, match=r"2 runs are called .FedBN.; give the label or the folder of one; .*known: FedAvg-seed0"
    ):
        results.find("FedBN")
    with pytest.raises(UserError, match="0 runs are called 'FedBM'"):
        results.find("FedBM")


def test_runs_are_joined_in_frames_a_table_and_a_plot(results: Results) -> None:
    assert list(results.summaries["label"]) == ["FedAvg", "FedAvg", "FedBN", "FedBN"]
    means = results.summaries.groupby("label")["accuracy"].mean()
    assert f"{100 * means['FedAvg']:.2f}%" in results.table()
    assert "FedAvg (2 seeds)" in repr(results)
    assert "<bdi>FedAvg (2 seeds)</bdi>" in results._repr_html_()
    assert len(results.history) == 8
    assert set(results.history["seed"]) == {0, 1}
    assert results.plot()._repr_png_().startswith(b"\x89PNG")
    assert Results([results[0], results[2]]).labels == ["FedAvg", "FedBN"]


def test_runs_are_read_from_several_folders(results: Results, fixbn: Result) -> None:
    both = Results.read(results[0].folder.parent, fixbn.folder)
    assert {result.folder for result in both} == {*(result.folder for result in results), fixbn.folder}
    with pytest.raises(UserError, match=r"holds 4 runs: FedAvg-seed0.*give the folder of one"):
        Result.read(results[0].folder.parent)


# --- models ------------------------------------------------------------------


def test_personal_models_are_those_that_the_clients_evaluated(results: Results) -> None:
    result = results[2]
    accuracies = [accuracy(result, result.model(client)) for client in range(2)]
    assert sum(accuracies) / 2 == pytest.approx(result.summary.values["clients_accuracy"], abs=1e-6)
    assert accuracies[0] != accuracies[1]
    with pytest.raises(UserError, match="there is no client 2; the run has the clients 0 to 1"):
        result.model(2)
    with pytest.raises(UserError, match="client 0 has no model of its own"):
        results[0].model(0)


def test_a_run_without_a_global_model_has_those_of_its_clients(tmp_path: Path) -> None:
    result = run(SMALL, strategy="Standalone", out=tmp_path, progress=False)
    with pytest.raises(UserError, match=r"has no global model.*model\(client=0\)"):
        result.model()
    accuracies = [accuracy(result, result.model(client)) for client in range(2)]
    assert sum(accuracies) / 2 == pytest.approx(result.summary.values["clients_accuracy"], abs=1e-6)


@pytest.mark.parametrize("norm", slow_except({"bn", "gn+ws", "fixup"}, NORMS))
def test_a_model_of_every_norm_can_be_loaded(norm: str, tmp_path: Path) -> None:
    model = "resnet20" if norm == "fixup" else "cnn"
    strategy = {"name": "HeteroBN", "statistics": "query"} if norm == "sbn" else "FedAvg"
    options = {"brn": {"warmup": 0}} if norm == "brn" else {}
    changes: dict[str, Any] = {
        "model": {"name": model, "norm": norm, **options},
        "strategy": strategy,
        "train": {"steps": 1},
    }
    result = run(SMALL, **changes, rounds=1, out=tmp_path, progress=False)
    assert accuracy(result, result.model()) == pytest.approx(result.summary.accuracy, abs=1e-7)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    write_splits(folder, (32, 32, 3), {"label": [0, 1, 2] * 4}, {"label": ["a", "b", "c"]})
    return folder


@pytest.mark.parametrize(
    ("norm", "layer"),
    slow_except({"bn"}, [("bn", None), ("gn", functools.partial(nn.GroupNorm, 2)), ("none", nn.Identity)]),
)
def test_torchvision_loads_the_file(norm: str, layer: Any, pictures: Path, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"model": {"name": "resnet18", "stem": "large", "norm": norm}, "train": {"steps": 1}}
    result = run(SMALL, **changes, rounds=1, data=str(pictures), out=tmp_path, progress=False)
    model = resnet18(num_classes=3, norm_layer=layer)
    model.load_state_dict(load_file(result.folder / "model.safetensors"), strict=True)
    images = torch.rand(4, 3, 32, 32)
    assert torch.equal(model.eval()(images), result.model()(images))
    assert isinstance(result.model(), torchvision.models.ResNet)
    assert result.classes == ("a", "b", "c")


# --- how a person names a run --------------------------------------------------


def test_a_folder_may_be_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path / "x", "first")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Result.read("~/x").folder == tmp_path / "x"
    assert [result.label for result in Results.read("~/x")] == ["first"]
