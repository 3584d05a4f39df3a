"""Pretrained weights of a safetensors file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from safetensors.torch import save_file
from torch import nn

from fedbn_flwr import build_model
from fedbn_flwr.errors import SettingsError
from fedbn_flwr.experiment.file.layers import load_experiment
from fedbn_flwr.experiment.prepare import prepare


def trained(name: str, classes: int, **options: Any) -> nn.Module:
    """A network whose every array differs from its initial value."""
    torch.manual_seed(7)
    model = build_model(name, classes, **options)
    with torch.no_grad():
        for key, value in model.state_dict().items():
            if value.is_floating_point():
                value.copy_(torch.rand_like(value) + (0.5 if key.endswith("var") else 0))
    return model


def write(model: nn.Module, file: Path, *, counters: bool = True) -> str:
    state = {k: v.contiguous() for k, v in model.state_dict().items() if counters or not k.endswith("tracked")}
    save_file(state, file)
    return str(file)


def same(one: nn.Module, other: nn.Module, but: str = "-") -> bool:
    others = other.state_dict()
    return all(
        value.equal(others[key])
        for key, value in one.state_dict().items()
        if not key.startswith(but) and not key.endswith("tracked")
    )


@pytest.mark.parametrize("counters", [True, False])
def test_a_file_is_loaded_with_statistics(tmp_path: Path, counters: bool) -> None:
    source = trained("cnn", 10)
    loaded = build_model("cnn", 10, weights=write(source, tmp_path / "a.safetensors", counters=counters))
    assert same(source, loaded)
    torch.save(source.state_dict(), tmp_path / "weights.pt")
    assert same(source, build_model("cnn", 10, weights=str(tmp_path / "weights.pt"))), (
        "a state dict of torch is read too"
    )
    with pytest.raises(SettingsError, match="norm 'fixup' draws its own weights"):
        build_model("resnet20", 10, "fixup", weights="DEFAULT")


def test_another_number_of_classes_keeps_the_last_layer_as_drawn(
    tmp_path: Path, flower_log: pytest.LogCaptureFixture
) -> None:
    source = trained("cnn", 10)
    weights = write(source, tmp_path / "a.safetensors")
    torch.manual_seed(3)
    plain = build_model("cnn", 4)
    torch.manual_seed(3)
    loaded = build_model("cnn", 4, weights=weights)
    assert same(source, loaded, but="classify")
    assert loaded.classify.weight.equal(plain.classify.weight)
    assert "has 10 outputs, but the data have 4 classes: 'classify' keeps its initial values" in flower_log.text


def test_other_norms_get_the_trained_gamma_and_beta(tmp_path: Path) -> None:
    source = trained("cnn", 10)
    loaded = build_model("cnn", 10, "gn", weights=write(source, tmp_path / "a.safetensors"))
    assert isinstance(loaded.bn1, nn.GroupNorm)
    assert loaded.bn1.weight.equal(source.bn1.weight)
    again = build_model("cnn", 10, "gn", weights=write(loaded, tmp_path / "b.safetensors"))
    assert same(loaded, again)


def test_torchvision_s_weights_fit_the_large_stem(tmp_path: Path) -> None:
    source = torchvision.models.resnet18(weights=None)
    weights = write(source, tmp_path / "resnet18.safetensors")
    assert same(source, build_model("resnet18", 1000, input_shape=(3, 224, 224), weights=weights))
    loaded = build_model("torchvision.models:resnet18", 5, weights=weights)
    assert same(source, loaded, but="fc")
    with pytest.raises(
        SettingsError, match=r"size mismatch for conv1\.weight: .*\[64, 3, 7, 7\].*\[64, 3, 3, 3\].*stem"
    ):
        build_model("resnet18", 1000, input_shape=(3, 32, 32), weights=weights)


@pytest.mark.parametrize(
    ("name", "weights", "message"),
    [
        ("cnn", "no.safetensors", r"cannot be read: No such file or directory: .?/.*no\.safetensors"),
        ("cnn", "~no-such-user/a.safetensors", "='~no-such-user/a.safetensors' cannot be read: Could not determine"),
        ("cnn", "broken.safetensors", "cannot be read: "),
        ("cnn", "mlp.safetensors", r'Missing key\(s\) in state_dict: "conv1\.weight", "bn1\.weight"'),
        ("cnn", "more.safetensors", r'Unexpected key\(s\) in state_dict: "head"'),
        ("cnn", "two.safetensors", r"size mismatch for conv1\.weight: .*\[16, 2, 3, 3\].*\[16, 3, 3, 3\]"),
        ("resnet18", "DEFAULT", "model.weights='DEFAULT' cannot be read: No such file .*expected a state dict"),
        ("cnn", "broken.pt", r"model.weights='broken.pt' cannot be read: .*expected a state dict"),
        ("cnn", "nested.pt", r"is a dict with the keys \['epoch', 'model'\]; expected a state dict"),
        ("cnn", "module.pt", r"cannot be read: Weights only load failed.*expected a state dict"),
    ],
)
def test_weights_that_do_not_fit_are_refused_with_their_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, weights: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.safetensors").write_bytes(b"not safetensors")
    write(trained("mlp", 10), tmp_path / "mlp.safetensors")
    write(trained("cnn", 10, input_shape=(2, 8, 8)), tmp_path / "two.safetensors")
    state = trained("cnn", 10).state_dict()
    (tmp_path / "broken.pt").write_bytes(b"not a state dict")
    torch.save({"epoch": 3, "model": state}, tmp_path / "nested.pt")
    torch.save(trained("cnn", 10), tmp_path / "module.pt")
    save_file(
        {**{k: v for k, v in state.items() if "tracked" not in k}, "head": torch.ones(1)}, tmp_path / "more.safetensors"
    )
    with pytest.raises(SettingsError, match=message):
        build_model(name, 10, weights=weights, input_shape=(3, 8, 8) if name == "cnn" else None)


def test_weights_for_colour_images_fit_grey_ones(tmp_path: Path) -> None:
    """A grey image has the outputs of a colour image whose three channels are equal to it."""
    source = trained("cnn", 10, input_shape=(3, 8, 8)).eval()
    loaded = build_model("cnn", 10, weights=write(source, tmp_path / "a.safetensors"), input_shape=(1, 8, 8)).eval()
    images = torch.randn(4, 1, 8, 8)
    torch.testing.assert_close(loaded(images), source(images.expand(-1, 3, -1, -1)))


def test_an_experiment_starts_from_its_weights(tmp_path: Path) -> None:
    source = trained("cnn", 10)
    weights = write(source, tmp_path / "a.safetensors")
    (prepared,) = prepare(load_experiment("{clients: 2, rounds: 1}", [f"model.weights={weights}", "engine.device=cpu"]))
    assert same(source, prepared.model)
