"""Group norm with standardised weights, against timm's convolution and the paper's formula in float64."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from timm.layers import StdConv2d
from torch import Tensor, nn
from torch.nn import functional as F

from fedbn_flwr import Role, build_model, convert_norm
from fedbn_flwr.errors import SettingsError
from fedbn_flwr.norms.roles import roles
from fedbn_flwr.norms.wsconv import StdConv2d as OurStdConv2d
from tests.support.marks import slow_except
from tests.support.nets import close, parameters, two_norms


def test_gn_ws_equals_timm_s_convolution_and_torch_s_group_norm() -> None:
    net = two_norms()
    theirs = []
    for i, options in ((0, {"padding": 1, "bias": False}), (3, {"stride": 2, "groups": 2, "bias": True, "padding": 0})):
        conv = StdConv2d(net[i].in_channels, net[i].out_channels, 3, eps=1e-5, dtype=torch.float64, **options)
        conv.load_state_dict(net[i].state_dict())
        theirs.append(conv)
    x = torch.randn(5, 2, 5, 5, dtype=torch.float64)
    y = F.relu(F.group_norm(theirs[0](x), 2, net[1].weight, net[1].bias, eps=1e-3))
    y = F.group_norm(theirs[1](y), 2, net[4].weight, net[4].bias)
    expected = net[6](y.flatten(1))
    close(convert_norm(net, "gn+ws")(x), expected)


def test_gn_ws_leaves_the_state_dict_and_the_weights_as_they_are() -> None:
    model = build_model("resnet20", 10)
    before = {key: value.clone() for key, value in model.state_dict().items() if roles(model)[key] is Role.WEIGHTS}
    after = convert_norm(model, "gn+ws").state_dict()
    assert parameters(model) == 269_722
    assert all(value.equal(after[key]) for key, value in before.items())
    assert all(type(m) is OurStdConv2d for m in model.modules() if isinstance(m, nn.Conv2d))
    grouped = convert_norm(build_model("cnn", 10), "gn+ws", groups=8)
    assert [module.num_groups for module in grouped.modules() if isinstance(module, nn.GroupNorm)] == [8, 8]


def test_a_last_convolution_without_norm_behind_it_keeps_its_weights() -> None:
    dense = convert_norm(nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1)), "gn+ws")
    assert [type(layer) for layer in dense] == [OurStdConv2d, nn.GroupNorm, nn.Conv2d]
    bare = convert_norm(nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4, affine=False)), "gn+ws")
    assert type(bare[0]) is OurStdConv2d


class Padded(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.pad(x, (1, 0, 1, 0)))


class Doubled(nn.Conv2d):
    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(2 * input, weight, bias)


@pytest.mark.parametrize("kind", ["gn+ws", "won"])
@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (lambda: (Doubled(1, 4, 2), nn.BatchNorm2d(4)), "0 is a Doubled; expected a plain Conv2d"),
        (lambda: (Padded(1, 4, 2), nn.BatchNorm2d(4)), "0 is a Padded; expected a plain Conv2d"),
        (
            lambda: (nn.Conv2d(1, 4, 2), nn.ConvTranspose2d(4, 4, 2), nn.BatchNorm2d(4)),
            "1 is a ConvTranspose2d; only",
        ),
    ],
)
def test_a_model_whose_convolutions_would_stay_as_they_are_is_refused(
    layers: Callable[[], tuple[nn.Module, ...]], message: str, kind: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        convert_norm(nn.Sequential(*layers()), kind)


@pytest.mark.parametrize(
    ("layer", "norm", "shape"),
    [
        (nn.Linear(3, 4), nn.BatchNorm1d, (3,)),
        (nn.Conv1d(3, 4, 3, padding=1), nn.BatchNorm1d, (3, 6)),
        (nn.Conv1d(3, 4, 3, padding=1, padding_mode="circular", bias=False), nn.BatchNorm1d, (3, 6)),
        (nn.Conv3d(3, 4, (1, 2, 3), stride=2), nn.BatchNorm3d, (3, 4, 5, 6)),
    ],
)
@pytest.mark.parametrize("kind", ["gn+ws", "won"])
def test_layers_of_tables_series_and_volumes_equal_the_formula(
    layer: nn.Module, norm: type[nn.Module], shape: tuple[int, ...], kind: str
) -> None:
    plain: Any = copy.deepcopy(layer).double()
    weights = plain.weight.detach().flatten(1)
    mu, var = weights.mean(1, keepdim=True), weights.var(1, correction=0, keepdim=True)
    gain = math.sqrt(2 / (1 - 1 / math.pi) / weights.shape[1]) if kind == "won" else 1.0
    expected = gain * (weights - mu) / (var + (1e-6 if kind == "won" else 1e-5)).sqrt()
    own = copy.deepcopy(plain)
    found = convert_norm(nn.Sequential(own, norm(4).double(), nn.Linear(shape[-1], 2).double()), kind)
    assert type(found[2]) is nn.Linear, "the last layer keeps its weights"
    assert found[0].weight is own.weight
    with torch.no_grad():
        plain.weight.copy_(expected.view(plain.weight.shape))
    x = torch.randn(5, *shape, dtype=torch.float64)
    close(found[0](x), plain(x))


def test_linear_layers_of_a_network_with_convolutions_keep_their_weights() -> None:
    """As in both papers, and so that no network of images changes."""
    model = convert_norm(
        nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)), "won"
    )
    assert [type(layer).__name__ for layer in model] == ["StdConv2d", "Identity", "Linear", "Identity", "Linear"]


class Scaled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 0.2 * x


@pytest.mark.parametrize(
    ("name", "last"),
    slow_except({"resnet20", "resnet18"}, [("resnet20", "bn2"), ("resnet18", "bn2"), ("resnet50", "bn3")]),
)
def test_branch_scale_is_a_factor_of_each_residual_branch(name: str, last: str) -> None:
    expected = build_model(name, 10, "won").double()
    model = copy.deepcopy(expected)
    for block in list(expected.modules()):
        if hasattr(block, last) and hasattr(block, "conv2"):
            setattr(block, last, Scaled())  # the bias of the convolution is zero
    torch.manual_seed(0)
    found = build_model(name, 10, "won", branch_scale=0.2).double()
    x = torch.randn(4, 3, 32, 32, dtype=torch.float64)
    torch.testing.assert_close(found(x), expected(x), rtol=1e-12, atol=1e-12)
    assert not torch.allclose(found(x), model(x))


NONE = "the model has no convolution or linear layer to standardise; use 'bn'"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            lambda: convert_norm(nn.Sequential(nn.Conv2d(4, 4, 1, groups=4), nn.BatchNorm2d(4)), "gn+ws"),
            r"norm 'gn\+ws': a filter of 0 is a single weight",
        ),
        (
            lambda: build_model("mobilenet_v2", 10, "won", branch_scale=0.2),
            "norm 'won': MobileNetV2 is not a residual network with known branches",
        ),
        (lambda: convert_norm(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2)), "gn+ws"), NONE),
        (lambda: convert_norm(nn.Sequential(nn.Linear(2, 4)), "won"), NONE),
        (
            lambda: convert_norm(nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(4, 2)), "gn+ws"),
            r"norm 'gn\+ws': the model has no batch norm",
        ),
    ],
)
def test_a_network_without_what_a_norm_needs_is_refused(make: Callable[[], object], says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        make()
