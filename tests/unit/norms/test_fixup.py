"""Fixup, against its paper's formulas in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F

from fedbn_flwr import Role, build_model, convert_norm
from fedbn_flwr.errors import SettingsError
from fedbn_flwr.norms.roles import roles
from tests.support.nets import parameters

RESNETS = {
    "resnet20": (lambda: build_model("resnet20", 5, input_shape=(2, 9, 9)), 2, 9, 2),
    "resnet18": (lambda: build_model("resnet18", 5, input_shape=(2, 8, 8)), 2, 8, 2),
    "resnet50": (lambda: build_model("resnet50", 5, input_shape=(2, 8, 8)), 2, 16, 3),
}


def blocks_of(model: nn.Module) -> list[tuple[str, Any]]:
    found = [(name, module) for name, module in model.named_modules() if hasattr(module, "conv2")]
    return [(f"{name}.", module) for name, module in found]


def scattered(model: nn.Module) -> nn.Module:
    """The model, with all its zeros and scalars changed."""
    for parameter in model.parameters():
        if parameter.numel() == 1 or not parameter.any():
            nn.init.normal_(parameter, std=0.3)
    return model


def by_the_paper(model: nn.Module, x: Tensor, m: int) -> Tensor:
    """Figure 1 of the paper, right, from the entries of the state dict."""
    at = model.state_dict()
    ours = "stages.0.conv1.weight" in at
    stem, fc = ("conv", "classify") if ours else ("conv1", "fc")
    x = F.relu(F.conv2d(x, at[f"{stem}.weight"], padding=1) + at["bn.bias" if ours else "bn1.bias"])
    for name, block in blocks_of(model):
        y, stride = x, block.conv1.stride if ours else block.stride
        for i in range(1, m + 1):
            weight = at[f"{name}conv{i}.weight"]
            strided = i == m - 1 if m == 3 else i == 1
            y = y + at[f"{name}conv{i}.input_bias"]
            y = F.conv2d(y, weight, stride=stride if strided else 1, padding=weight.shape[-1] // 2)
            if i < m:
                y = F.relu(y + at[f"{name}bn{i}.bias"])
        y = y * at[f"{name}bn{m}.weight"] + at[f"{name}bn{m}.bias"]
        if f"{name}downsample.0.weight" in at:
            x = x + at[f"{name}downsample.0.input_bias"]
            x = F.conv2d(x, at[f"{name}downsample.0.weight"], stride=stride)
        elif y.shape != x.shape:  # option A
            extra = (y.shape[1] - x.shape[1]) // 2
            x = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, extra, extra))
        x = F.relu(x + y)
    return F.linear(x.mean((2, 3)) + at[f"{fc}.input_bias"], at[f"{fc}.weight"], at[f"{fc}.bias"])


@pytest.mark.parametrize("name", RESNETS)
def test_fixup_computes_what_its_paper_draws(name: str) -> None:
    make, channels, _, m = RESNETS[name]
    model = scattered(convert_norm(make(), "fixup").double())
    x = torch.randn(2, channels, 8, 8, dtype=torch.float64)
    torch.testing.assert_close(model(x), by_the_paper(model, x, m), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", RESNETS)
def test_fixup_s_first_weights_are_those_of_the_paper_s_rules(name: str) -> None:
    make, _, branches, m = RESNETS[name]
    model = make()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    after = convert_norm(model, "fixup").state_dict()
    blocks = blocks_of(model)
    assert len(blocks) == branches
    scales = {f"{block}conv{i}.weight": branches ** (-1 / (2 * m - 2)) for block, _ in blocks for i in range(1, m)}
    zeros = {f"{block}conv{m}.weight" for block, _ in blocks}
    zeros |= {key for key in after if key.startswith(("classify.", "fc."))}
    for key, value in after.items():
        if value.numel() == 1:
            assert float(value) == (1.0 if key.endswith(f"bn{m}.weight") else 0.0), key
        elif key in zeros:
            assert not value.any(), key
        else:
            torch.testing.assert_close(value, before[key] * scales.get(key, 1.0))
    # L^(-1/2) of nine branches, 16^(-1/4)
    assert {"resnet20": 1 / 3, "resnet18": 8**-0.5, "resnet50": 0.5}[name] == pytest.approx(scales.popitem()[1])


@pytest.mark.parametrize(
    ("name", "scalars"), [("resnet20", 9 * 5 + 2), ("resnet18", 8 * 5 + 3 + 2), ("resnet50", 16 * 7 + 4 + 2)]
)
def test_fixup_has_five_scalars_in_a_basic_block_and_seven_in_a_bottleneck(name: str, scalars: int) -> None:
    make = RESNETS[name][0]
    assert parameters(convert_norm(make(), "fixup")) == parameters(convert_norm(make(), "none")) + scalars


def test_a_step_of_sgd_moves_the_zeros() -> None:
    model = convert_norm(build_model("resnet20", 10), "fixup")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):  # the first moves the classifier, which has no gradient to pass back before
        optimizer.zero_grad()
        F.cross_entropy(model(torch.randn(4, 3, 8, 8)), torch.arange(4)).backward()
        optimizer.step()
    assert all(block.conv2.weight.any() for block in model.stages)


def test_fixup_keeps_dtype_mode_and_what_does_not_train() -> None:
    model = build_model("resnet20", 10).double().eval().requires_grad_(False)
    convert_norm(model, "fixup")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}
    assert not any(module.training for module in model.modules())
    assert not any(parameter.requires_grad for parameter in model.parameters())
    with torch.device("meta"):
        model = torchvision.models.resnet34(weights=None)
    assert {parameter.device.type for parameter in convert_norm(model, "fixup").parameters()} == {"meta"}


def test_all_of_fixup_is_weights_to_rules_for_batch_norm() -> None:
    model = convert_norm(build_model("resnet20", 10), "fixup")
    assert set(roles(model).values()) == set(roles(model.state_dict()).values()) == {Role.WEIGHTS}


def other_block() -> nn.Module:
    model = torchvision.models.resnet18(weights=None)
    model.layer2[1] = nn.Sequential(nn.Conv2d(128, 128, 3), nn.BatchNorm2d(128))
    return model


def no_classifier() -> nn.Module:
    model = torchvision.models.resnet18(weights=None)
    model.fc = nn.Identity()
    return model


def block_without_norm() -> nn.Module:
    model = build_model("resnet20", 10)
    del model.stages[0].bn2
    return model


def one_more_norm() -> nn.Module:
    model = build_model("resnet20", 10)
    model.stages[0].extra = nn.ModuleList([nn.BatchNorm2d(16)])
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: build_model("cnn", 10), "Sequential is not a residual network with known branches"),
        (lambda: build_model("mobilenet_v2", 10), "MobileNetV2 is not a residual network with known branches"),
        (lambda: build_model("resnet20", 10, "gn"), r"stages\.0\.bn1 is a GroupNorm; expected a batch norm"),
        (lambda: build_model("resnet20", 10, "fixup"), r"stages\.0\.bn1 is a Scalars; expected a batch norm"),
        (lambda: build_model("resnet20", 10, "won"), r"stages\.0\.conv1 is a StdConv2d; expected a plain convolution"),
        (other_block, r"outside of its residual blocks the model has the batch norms \['bn1', 'layer2\.1\.1'\]"),
        (no_classifier, r"outside .* the linear layers \[\]; expected one batch norm, in the stem, and a classifier"),
        (block_without_norm, r"stages\.0\.bn2 is nothing; expected a batch norm"),
        (
            one_more_norm,
            r"outside of its residual blocks the model has the batch norms \['bn', 'stages\.0\.extra\.0'\]",
        ),
    ],
)
def test_a_network_with_unknown_branches_is_refused(make: Any, message: str) -> None:
    with pytest.raises(SettingsError, match=f"norm 'fixup': {message}"):
        convert_norm(make(), "fixup")
