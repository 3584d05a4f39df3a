"""Models by name: their parameters, shapes and first weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedbn_flwr import build_model
from fedbn_flwr.errors import SettingsError
from fedbn_flwr.norms.convert import NORMS


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


# --- models ------------------------------------------------------------------


def test_parameter_counts() -> None:
    assert parameters(build_model("resnet20", 10)) == 269_722
    # 9*16 + 2*16 + 9*16*32 + 2*32 + 128*10 + 10
    assert parameters(build_model("cnn", 10)) == 6_138
    assert parameters(build_model("resnet20", 10, "none")) == 269_722 - 1_376


@pytest.mark.parametrize("norm", [norm for norm in NORMS if norm in ("bn", "gn", "ln", "in")])
def test_normalisers_have_as_many_parameters_as_batch_norm(norm: str) -> None:
    assert parameters(build_model("resnet20", 10, norm)) == 269_722


@pytest.mark.parametrize(("name", "channels", "size"), [("cnn", 1, 8), ("cnn", 3, 32), ("resnet20", 1, 28)])
def test_models_take_grey_and_colour(name: str, channels: int, size: int) -> None:
    model = build_model(name, 7, input_shape=(channels, size, size))
    assert model(torch.zeros(2, channels, size, size)).shape == (2, 7)


def test_first_weights_depend_only_on_the_seed() -> None:
    def weights(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return next(build_model("resnet20", 10).parameters())

    assert weights(0).equal(weights(0))
    assert not weights(0).equal(weights(1))


def test_an_unknown_model_is_answered_with_the_nearest() -> None:
    with pytest.raises(SettingsError, match=r"model\.name='resnet2' is not a model; did you mean 'resnet20'"):
        build_model("resnet2", 10)


def test_resnet20_halves_pixels_and_doubles_channels_twice() -> None:
    model = build_model("resnet20", 10)
    x = torch.zeros(1, 16, 32, 32)
    shapes = []
    for block in model.stages:
        x = block(x)
        shapes.append(tuple(x.shape[1:]))
    assert shapes == [(16, 32, 32)] * 3 + [(32, 16, 16)] * 3 + [(64, 8, 8)] * 3


def test_resnet20_shortcut_is_option_a() -> None:
    """Every other pixel, and zeros for the channels that are new (He et al. 2015)."""
    block = build_model("resnet20", 10).stages[3]
    x = torch.randn(2, 16, 6, 6)
    expected = torch.zeros(2, 32, 3, 3)
    for row in range(3):
        for column in range(3):
            expected[:, 8:24, row, column] = x[:, :, 2 * row, 2 * column]
    nn.init.zeros_(block.bn2.weight)  # the other path gives zero
    assert block(x).equal(F.relu(expected))


def test_resnet20_is_three_by_two_n_plus_two_layers() -> None:
    model = build_model("resnet20", 10)
    layers = [module for module in model.modules() if isinstance(module, nn.Conv2d | nn.Linear)]
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    assert (len(layers), len(norms)) == (20, 19)
