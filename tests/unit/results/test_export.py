"""Exported models: outputs against the run's network, folded batch norms by formula, and no need of this project."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from fedbn_flwr import Result, build_model, run
from fedbn_flwr.commands import cli
from fedbn_flwr.errors import MissingPackage, UserError
from fedbn_flwr.results.read import portable
from fedbn_flwr.results.read.portable import folded
from tests.support.command import ROOT, python_blocks

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
    torch.manual_seed(0)
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
