"""FedWon: networks without normalisation against timm's layers and clipping, and the rule that asks for them."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from fedbn_flwr.strategies.fedwon import clip_adaptively  # type: ignore[import-untyped]
from timm.layers import ScaledStdConv2d
from timm.utils.agc import adaptive_clip_grad
from torch import Tensor, nn
from torch.nn import functional as F

from fedbn_flwr import BNClient, build_model, convert_norm
from fedbn_flwr.messages.arrays import unpack
from fedbn_flwr.norms.wsconv import RELU_GAMMA, StdConv2d
from fedbn_flwr.strategies import FedWon
from tests.support.federations import Federations, near
from tests.support.plugin import RecordingGrid


def won_net() -> nn.Module:
    layers = nn.Sequential(
        nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 8), nn.Linear(8, 3)
    )
    return convert_norm(layers, "won")


# --- the convolution ---------------------------------------------------------


def won_conv(*sizes: int, **options: Any) -> Any:
    """A convolution as FedWon has it, which always has a bias."""
    return convert_norm(nn.Conv2d(*sizes, **options), "won")


CONVOLUTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "stride and padding": {"stride": 2, "padding": 1},
    "groups": {"groups": 2},
    "depthwise": {"groups": 4, "padding": (1, 2)},
    "dilation": {"dilation": 2},
    "no bias": {"bias": False},
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_the_convolution_equals_timm_s_with_a_gain_of_one(name: str) -> None:
    options = {"padding": 0, **CONVOLUTIONS[name]}
    gamma = 1.3
    ours = won_conv(4, 8, 3, dtype=torch.float64, **options)
    ours.gamma = gamma
    theirs = ScaledStdConv2d(4, 8, 3, gamma=gamma, dtype=torch.float64, **options | {"bias": True})
    theirs.load_state_dict(ours.state_dict() | {"gain": torch.ones(8, 1, 1, 1, dtype=torch.float64)})
    x, there = (torch.randn(3, 4, 9, 9, dtype=torch.float64).requires_grad_() for _ in range(2))
    there.data.copy_(x.data)
    y, expected = ours(x), theirs(there)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    seed = torch.randn_like(y)
    y.backward(seed)
    expected.backward(seed)
    torch.testing.assert_close(x.grad, there.grad, rtol=1e-12, atol=1e-12)
    for key, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, theirs.get_parameter(key).grad, rtol=1e-12, atol=1e-12)


def test_gamma_is_brock_s_for_relu() -> None:
    """1 / deviation of relu(x) for a standard normal x: mean 1/sqrt(2 pi), mean square 1/2."""
    assert pytest.approx(1 / math.sqrt(0.5 - 1 / (2 * math.pi)), rel=1e-15) == RELU_GAMMA
    assert won_conv(1, 1, 3).gamma == RELU_GAMMA
    x = torch.randn(2_000_000, dtype=torch.float64)
    assert float((RELU_GAMMA * F.relu(x)).var()) == pytest.approx(1, abs=0.01)


# --- convert_norm(model, "won") ----------------------------------------------


def test_resnet20_has_a_bias_where_it_had_gamma_and_beta() -> None:
    model = build_model("resnet20", 10, "won")
    assert sum(p.numel() for p in model.parameters()) == 269_722 - 1_376 + 688
    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    assert len(convolutions) == 19
    assert all(type(conv) is StdConv2d and conv.gamma == RELU_GAMMA and not conv.bias.any() for conv in convolutions)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in model.modules())


def test_the_state_dict_has_only_weights_and_biases() -> None:
    keys = ["conv1.weight", "conv1.bias", "conv2.weight", "conv2.bias", "classify.weight", "classify.bias"]
    assert list(build_model("cnn", 10, "won").state_dict()) == keys


@pytest.mark.parametrize("training", [True, False])
def test_conversion_keeps_dtype_mode_and_what_trains(training: bool) -> None:
    model = build_model("cnn", 10).to(torch.float64).train(training)
    model.conv1.requires_grad_(False)
    assert convert_norm(model, "won") is model
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    assert all(module.training is training for module in model.modules())
    trains = {key for key, parameter in model.named_parameters() if parameter.requires_grad}
    assert trains == {"conv2.weight", "conv2.bias", "classify.weight", "classify.bias"}


def test_a_bias_that_is_there_stays() -> None:
    conv = nn.Conv2d(2, 4, 3)
    weight, bias = conv.weight, conv.bias
    new = convert_norm(nn.Sequential(conv), "won")[0]
    assert new.weight is weight
    assert new.bias is bias


def test_a_convolution_used_in_two_places_stays_one() -> None:
    shared = nn.Conv2d(4, 4, 3, padding=1)
    model = convert_norm(nn.Sequential(shared, nn.ReLU(), shared), "won")
    assert isinstance(model[0], StdConv2d)
    assert model[2] is model[0]


def test_a_model_that_is_itself_a_convolution_is_replaced() -> None:
    assert type(convert_norm(nn.Conv2d(2, 4, 3), "won")) is StdConv2d


# --- adaptive gradient clipping ----------------------------------------------


def random_parameters(scale: float) -> list[nn.Parameter]:
    shapes = [(6, 3, 3, 3), (6,), (5, 12), (5,), (4, 1, 3, 3), (2, 3, 5), ()]
    parameters = [nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in shapes]
    parameters.append(nn.Parameter(torch.zeros(3, 4, dtype=torch.float64)))  # shorter than eps
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter) * scale
    parameters[2].grad[0] = 0.0
    return parameters


def named(parameters: list[nn.Parameter]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    return {f"{i}": p for i, p in enumerate(parameters)}, {f"{i}": p.grad for i, p in enumerate(parameters)}


@pytest.mark.parametrize("scale", [1e-3, 0.1, 1.0, 100.0])
@pytest.mark.parametrize("factor", [0.01, 0.1, 1.0])
def test_clipping_equals_timm_s(scale: float, factor: float) -> None:
    ours = random_parameters(scale)
    theirs = copy.deepcopy(ours)
    for one, two in zip(ours, theirs, strict=True):
        two.grad = one.grad.clone()
    clip_adaptively(*named(ours), factor)
    adaptive_clip_grad(theirs, factor)
    for one, two in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad, two.grad, rtol=1e-13, atol=0)


def test_some_units_are_clipped_and_others_are_not() -> None:
    """The test of the tests above: both branches are taken."""
    parameters = random_parameters(0.1)
    before = [parameter.grad.clone() for parameter in parameters]
    clip_adaptively(*named(parameters), 0.1)
    kept = [bool(p.grad.equal(old)) for p, old in zip(parameters, before, strict=True)]
    assert len(set(kept)) == 2


def test_a_client_clips_all_but_the_last_linear_layer(federation: Federations) -> None:
    """A round against a hand-written one with timm's clipping."""
    fed = federation((8,), batches=4, model=won_net, dtype=torch.float64, lr=0.5, momentum=0.9)
    client = BNClient(copy.deepcopy(fed.model), fed.data[0], **fed.options)
    found = client.train_round(unpack(fed.arrays()), {"fedbn.fedwon-clip": 0.02}).arrays

    def by_hand(exempt: set[str]) -> dict[str, Tensor]:
        twin = copy.deepcopy(fed.model).train()
        optimizer = torch.optim.SGD(twin.parameters(), lr=0.5, momentum=0.9)
        for inputs, targets in fed.data[0].batches:
            optimizer.zero_grad()
            F.cross_entropy(twin(inputs), targets).backward()
            adaptive_clip_grad([p for name, p in twin.named_parameters() if name not in exempt], 0.02)
            optimizer.step()
        return twin.state_dict()

    last = {"5.weight", "5.bias"}
    near(by_hand(last), found, rtol=1e-11, atol=1e-13)
    for exempt in (set(), last | {"4.weight", "4.bias"}, {name for name, _ in fed.model.named_parameters()}):
        assert not np.allclose(found["5.weight"], by_hand(exempt)["5.weight"].numpy(), rtol=1e-6)


# --- the rule ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "clip"), [({}, 0.1), ({"clip": 0.5}, 0.5), ({"clip": 0}, None), ({"clip": None}, None)]
)
def test_clients_are_asked_to_clip(federation: Federations, options: dict[str, Any], clip: float | None) -> None:
    fed = federation((4, 4), model=won_net)
    grid = RecordingGrid(fed.app(), 2)
    FedWon(fraction_evaluate=0.0, **options).start(grid, fed.arrays(), num_rounds=2)
    assert {each.config.get("fedbn.fedwon-clip") for each in grid.sent} == {clip}
