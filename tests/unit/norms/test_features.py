"""Squeeze-excitation after standardised convolutions (`won+se`), and normalised features (`fn`), in float64."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedbn_flwr import build_model, convert_norm
from fedbn_flwr.errors import SettingsError
from fedbn_flwr.norms.features import FeatureLinear, SqueezeExcitation
from tests.support.fixtures import small_net
from tests.support.marks import slow_except
from tests.support.nets import close


def images(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


@pytest.mark.parametrize(
    ("name", "branches"), slow_except({"resnet20", "resnet18"}, [("resnet20", 9), ("resnet18", 8), ("resnet50", 16)])
)
def test_open_gates_leave_the_network_of_won(name: str, branches: int) -> None:
    """The same seed draws the same convolutions; gates whose bias is large are 1."""
    nets = {}
    for norm in ("won", "won+se"):
        torch.manual_seed(0)
        nets[norm] = build_model(name, 10, norm, input_shape=(3, 32, 32), branch_scale=0.2).double().eval()
    gates = [layer for layer in nets["won+se"].modules() if isinstance(layer, SqueezeExcitation)]
    assert len(gates) == branches
    x = images(2, 3, 32, 32)
    closed = nets["won+se"](x)
    for gate in gates:
        nn.init.zeros_(gate.excite.weight)
        nn.init.constant_(gate.excite.bias, 60.0)
    expected = nets["won"](x)
    close(nets["won+se"](x), expected)
    assert (closed - expected).abs().max() > 1e-6


def test_a_gate_is_the_formula_and_has_the_given_number_of_hidden_units() -> None:
    torch.manual_seed(0)
    gate, x = SqueezeExcitation(8, 4).double(), images(3, 8, 5, 6)
    z = x.sum((2, 3)) / 30
    (w1, b1), (w2, b2) = ((layer.weight, layer.bias) for layer in (gate.squeeze, gate.excite))
    assert w1.shape == (2, 8)
    hidden = (z @ w1.T + b1).clamp(min=0)
    close(gate(x), x / (1 + torch.exp(-(hidden @ w2.T + b2)))[:, :, None, None])
    net = build_model("resnet20", 10, "won+se", reduction=8)
    assert {m.squeeze.out_features for m in net.modules() if isinstance(m, SqueezeExcitation)} == {2, 4, 8}


def test_squeeze_excitation_needs_residual_branches() -> None:
    with pytest.raises(SettingsError, match=r"norm 'won\+se': Sequential is not a residual network"):
        convert_norm(small_net(), "won+se")


# --- feature normalisation ---


def test_features_have_one_length_and_the_gradient_is_orthogonal_to_them() -> None:
    torch.manual_seed(0)
    layer, h = FeatureLinear(7, 3).double(), images(5, 7).mul(4).requires_grad_()
    length = h.detach().norm(dim=1, keepdim=True)
    close(layer(h), F.linear(7**0.5 * h.detach() / length, layer.weight, layer.bias))
    F.cross_entropy(layer(h), torch.tensor([0, 1, 2, 0, 1])).backward()
    assert h.grad is not None
    assert float(h.grad.norm()) > 1e-3
    assert float((h.grad * h.detach()).sum(1).abs().max()) < 1e-15
    close(layer(3 * h), layer(h))
    assert layer(torch.zeros(1, 7, dtype=torch.float64)).equal(layer.bias[None])


def test_the_network_has_no_norm_and_the_keys_of_one_without() -> None:
    net = small_net().double()
    plain = convert_norm(copy.deepcopy(net), "none")
    net = convert_norm(net, "fn")
    assert [*net.state_dict()] == [*plain.state_dict()]
    x = images(4, 2, 4, 4)
    features = plain[:4](x)
    close(net(x), plain[4](4 * F.normalize(features)))
    assert build_model("linear", 3, "fn", input_shape=(5,))(torch.ones(2, 5)).shape == (2, 3)


def test_the_last_layer_must_be_linear() -> None:
    dense = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1))
    with pytest.raises(
        SettingsError, match=r"norm 'fn': the last layer with parameters is a Conv2d; expected nn\.Linear"
    ):
        convert_norm(dense, "fn")
