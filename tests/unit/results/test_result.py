"""`Result` and `Results`: runs read from their folders."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import torchvision
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torchvision.models import resnet18

from fedbn_flwr import Result, Results, build_model, run, run_all
from fedbn_flwr.commands import cli
from fedbn_flwr.data.load import load
from fedbn_flwr.data.source import Source
from fedbn_flwr.errors import MissingPackage, UserError
from fedbn_flwr.norms import NORMS
from fedbn_flwr.results.read import portable
from fedbn_flwr.results.read.portable import folded
from tests.support.command import ROOT, python_blocks
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


# --- Exported models: outputs against the run's network, folded batch norms by formula, and no need of this project.


SETTINGS: Mapping[str, Any] = {
    "rounds": 1,
    "clients": 2,
    "data": {"name": "digits", "examples": 80, "test_examples": 20},
    "train": {"steps": 3, "lr": 0.1},
    "engine": {"workers": 0, "device": "cpu"},
}
# Runs where importing this project fails.
ELSEWHERE = """
import sys
sys.modules["fedbn_flwr"] = None
import numpy as np, torch
form, file, inputs, outputs = sys.argv[1:]
given = np.load(inputs)
if form == "torch":
    about = {"fedbn.json": ""}
    found = torch.export.load(file, extra_files=about).module()(torch.from_numpy(given)).detach().numpy()
    print(about["fedbn.json"])
else:
    import json, onnxruntime
    session = onnxruntime.InferenceSession(file)
    print(json.dumps({key: json.loads(value) for key, value in session.get_modelmeta().custom_metadata_map.items()}))
    (found,) = session.run(None, {"inputs": given})
np.save(outputs, found)
assert not any(name.startswith(("fedbn_flwr.", "flwr")) for name in sys.modules)
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return run(SETTINGS, strategy="FedBN", out=tmp_path_factory.mktemp("run"), progress=False)


def expected(result: Result, client: int | None, inputs: np.ndarray) -> np.ndarray:
    """In float64, normalised by model.json."""
    moments = json.loads((result.folder / "model.json").read_text())["normalise"]
    mean, std = (np.array(moments[key], np.float64).reshape(1, -1, 1, 1) for key in ("mean", "std"))
    with torch.no_grad():
        return result.model(client).double()(torch.from_numpy((inputs.astype(np.float64) - mean) / std)).numpy()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "client", "fold"),
    [("torch", None, False), ("torch", 1, True), ("onnx", 1, False), ("onnx", None, True)],
)
def test_a_model_loads_where_this_project_is_not(
    form: Any, client: int | None, fold: bool, trained: Result, tmp_path: Path
) -> None:
    if form == "onnx":
        pytest.importorskip("onnxruntime")
    file, inputs = tmp_path / "model", np.random.default_rng(0).random((7, 1, 8, 8), np.float32)
    said = "\n".join(trained.export(file, client, form=form, fold=fold))
    assert ("2 of 2 batch norms folded" in said) is fold
    if form == "torch" and not fold:
        assert "largest difference from the run's network: 0 (" in said
    np.save(tmp_path / "in.npy", inputs)
    words = [sys.executable, "-c", ELSEWHERE, form, str(file), str(tmp_path / "in.npy"), str(tmp_path / "out.npy")]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["classes"] == [*"0123456789"]
    assert np.load(tmp_path / "out.npy") == pytest.approx(expected(trained, client, inputs), abs=1e-3)


def test_weights_have_the_normalisation_and_the_names(trained: Result, tmp_path: Path) -> None:
    trained.export(tmp_path / "m.safetensors", form="safetensors")
    own = trained.model().state_dict()
    with safe_open(tmp_path / "m.safetensors", "pt") as file:
        assert json.loads(file.metadata()["classes"]) == [*"0123456789"]
        assert {*file.keys()} == {"normalise.mean", "normalise.deviation", *(f"network.{key}" for key in own)}
        assert all(torch.equal(file.get_tensor(f"network.{key}"), value) for key, value in own.items())


@pytest.mark.parametrize("form", ["safetensors", "torch"])
def test_the_units_of_scaled_targets_are_part_of_the_file(form: Any, tmp_path: Path) -> None:
    inputs = np.random.default_rng(0).normal(size=(120, 2))
    rows = np.column_stack([inputs, 5000 + 900 * inputs[:, 0]])
    np.savetxt(tmp_path / "t.csv", rows, delimiter=",", header="a,b,y", comments="")
    data = {"name": str(tmp_path / "t.csv"), "label": "y", "test": 0.2, "targets": "scale"}
    result = run(SETTINGS, data=data, model="mlp", out=tmp_path / "run", progress=False)
    assert "outputs: in the targets' units: y" in result.export(tmp_path / "m", form=form)
    given = torch.from_numpy(inputs).float()
    with torch.no_grad():
        expected = result.model()(result.normalise()(given))
        if form == "torch":
            found = torch.export.load(tmp_path / "m").module()(given)
        else:
            arrays = load_file(tmp_path / "m")
            network = build_model("mlp", 1, input_shape=(2,)).eval()
            network.load_state_dict({key.removeprefix("network."): arrays[key] for key in arrays if "network" in key})
            scaled = network((given - arrays["normalise.mean"]) / arrays["normalise.deviation"])
            found = scaled * arrays["units.deviation"] + arrays["units.mean"]
            with safe_open(tmp_path / "m", "pt") as file:
                known = json.loads(file.metadata()["targets"])
            assert (known["mean"], known["std"]) == (arrays["units.mean"].tolist(), arrays["units.deviation"].tolist())
    assert 4000 < float(expected.mean()) < 6000
    torch.testing.assert_close(found.double(), expected.double(), rtol=1e-6, atol=0)


def randomised(network: nn.Module) -> nn.Module:
    """The network in float64 and evaluation mode, with batch norms as after a training."""
    for module in network.double().eval().modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            for tensor in (module.weight.data, module.bias.data, module.running_mean, module.running_var):
                tensor.copy_(torch.rand_like(tensor) + 0.5)
    return network


def norms_in(network: nn.Module) -> int:
    return sum(isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d) for module in network.modules())


class Twice(nn.Module):
    """The convolution's outputs are used without batch norm too."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x)
        return self.bn(x) + x


def test_batch_norms_are_folded_by_the_formula() -> None:
    """Not after another layer, or one whose outputs are used twice, and no other norm."""
    network = randomised(
        nn.Sequential(
            *(nn.Conv2d(2, 1, 3, bias=False), nn.BatchNorm2d(1), Twice(), nn.ReLU(), nn.BatchNorm2d(4)),
            *(nn.ConvTranspose2d(4, 3, 2), nn.BatchNorm2d(3), nn.Conv2d(3, 4, 2), nn.GroupNorm(2, 4)),
            *(nn.ConvTranspose2d(4, 4, 1, groups=2), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 5)),
            nn.BatchNorm1d(5),
        )
    )
    made, found, of_all = folded(network)
    assert (found, of_all, norms_in(made), norms_in(network)) == (3, 6, 3, 6)
    x = torch.rand(3, 2, 8, 8, dtype=torch.float64)
    assert torch.allclose(made(x), network(x), rtol=0, atol=1e-12)
    linear, norm = network[12], network[13]
    factor = norm.weight / torch.sqrt(norm.running_var + norm.eps)
    assert torch.allclose(made[12].weight, linear.weight * factor[:, None], rtol=0, atol=1e-12)
    assert isinstance(made[8], nn.GroupNorm)


@pytest.mark.parametrize(("name", "norm", "there"), [("cnn", "bn", 2), ("resnet20", "bn", 19), ("resnet20", "gn", 0)])
def test_networks_of_the_library_are_folded(name: str, norm: str, there: int) -> None:
    network = randomised(build_model(name, 10, norm, input_shape=(3, 32, 32)))
    made, found, of_all = folded(network)
    assert (found, of_all, norms_in(made)) == (there, there, 0)
    x = torch.rand(2, 3, 32, 32, dtype=torch.float64)
    assert torch.allclose(made(x), network(x), rtol=1e-10, atol=1e-12)


def test_a_network_that_cannot_be_traced_is_not_folded() -> None:
    class Branches(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(UserError, match="batch norms cannot be folded: the network cannot be traced"):
        folded(Branches())


@pytest.mark.slow
def test_a_file_that_computes_something_else_is_not_kept(
    trained: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "m.pt2").write_text("an earlier file")
    monkeypatch.setattr(portable, "folded", lambda network: (nn.Sequential(network, nn.ReLU()), 0, 0))
    with pytest.raises(UserError, match="the outputs of the file differ by"):
        trained.export(tmp_path / "m.pt2", fold=True)
    assert [*tmp_path.iterdir()] == [tmp_path / "m.pt2"]
    assert (tmp_path / "m.pt2").read_text() == "an earlier file"


def test_targets_come_in_their_units(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    inputs = draw.normal(5, 2, (120, 3)).astype(np.float32)
    np.savez(tmp_path / "data.npz", x=inputs, y=(inputs @ [3.0, -2.0, 1.0] * 100 + 4000).astype(np.float32))
    settings = {
        **SETTINGS,
        "data": {
            "name": str(tmp_path / "data.npz"),
            "inputs": "x",
            "label": "y",
            "test": 0.2,
            "targets": "scale",
            "task": "regression",
        },
    }
    done = run(settings, model={"name": "mlp"}, out=tmp_path / "run", progress=False)
    said = "\n".join(done.export(tmp_path / "m.pt2", fold=True))
    assert "1 of 1 batch norms folded" in said
    found = torch.export.load(tmp_path / "m.pt2").module()(torch.from_numpy(inputs[:9])).detach()
    with torch.no_grad():
        assert torch.allclose(found, done.model()(done.normalise()(torch.from_numpy(inputs[:9]))), rtol=1e-5)


def test_the_page_s_reader_of_a_table_predicts_what_the_command_predicts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    draw = np.random.default_rng(0)
    frame = pd.DataFrame({"age": draw.normal(50, 9, 120), "sex": draw.choice(["f", "m"], 120)})
    frame = frame.assign(bp=frame["age"] * 2, ill=np.where(frame["age"] > 50, "yes", "no"))
    frame.loc[::7, "bp"], frame.loc[::11, "sex"] = np.nan, None
    frame.to_csv("patients.csv", index=False)
    data = {"name": "./patients.csv", "label": "ill", "test": 0.2, "missing": "mean", "categories": {"sex": ["f", "m"]}}
    done = run({**SETTINGS, "data": data, "model": "mlp"}, out="run", progress=False)
    done.export("model.pt2")
    (code,) = [code for code in python_blocks((ROOT / "docs" / "commands.md").read_text()) if "patients.csv" in code]
    names: dict[str, Any] = {}
    exec(code, names)
    assert cli.main(["predict", "run/FedAvg", "--data", "patients.csv", "--out", "found.csv"]) == 0
    assert [*names["table"]["prediction"]] == [*pd.read_csv("found.csv")["prediction"]]


def test_the_command_and_its_errors(
    trained: Result, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "m.pt2"
    assert cli.main(["export", str(trained.folder), "--client", "0", "--out", str(out)]) == 0
    assert "the model of client 0: FedBN after round 1" in capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(MissingPackage, match=r"export to ONNX needs the package 'onnx.*, which is not installed"):
        trained.export(tmp_path / "m.onnx", form="onnx")
