"""Models by name, normalisers against torch's own layers, and what freezing leaves alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedbn_flwr import Role, build_model, convert_norm
from fedbn_flwr.errors import MessageError, SettingsError
from fedbn_flwr.norms.convert import NORMS, frozen_norm


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
    model = build_model(name, 7, in_channels=channels)
    assert model(torch.zeros(2, channels, size, size)).shape == (2, 7)


def test_first_weights_depend_on_the_seed_alone() -> None:
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


# --- convert_norm ------------------------------------------------------------


def trained_batch_norm(channels: int = 4) -> nn.BatchNorm2d:
    torch.manual_seed(0)
    layer = nn.BatchNorm2d(channels, eps=1e-3, dtype=torch.float64)
    nn.init.normal_(layer.weight)
    nn.init.normal_(layer.bias)
    return layer


def scaled(layer: nn.BatchNorm2d, normalised: Tensor) -> Tensor:
    return normalised * layer.weight.view(1, -1, 1, 1) + layer.bias.view(1, -1, 1, 1)


TWINS: dict[str, Callable[[Tensor], Tensor]] = {
    "gn": nn.GroupNorm(2, 4, eps=1e-3, affine=False),
    "ln": nn.LayerNorm([4, 5, 6], eps=1e-3, elementwise_affine=False),
    "in": nn.InstanceNorm2d(4, eps=1e-3),
}


@pytest.mark.parametrize("kind", TWINS)
def test_normaliser_equals_torch_s_layer_with_the_same_gamma_and_beta(kind: str) -> None:
    layer = trained_batch_norm()
    x = torch.randn(3, 4, 5, 6, dtype=torch.float64) * 3 + 1
    expected = scaled(layer, TWINS[kind](x))
    found = convert_norm(layer, kind)(x)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_groups_are_as_asked_and_two_by_default() -> None:
    x = torch.randn(3, 4, 5, 6, dtype=torch.float64)
    layer = trained_batch_norm()
    expected = scaled(layer, F.group_norm(x, 4, eps=1e-3))
    torch.testing.assert_close(convert_norm(layer, "gn", groups=4)(x), expected, rtol=1e-12, atol=1e-12)
    assert convert_norm(trained_batch_norm(), "gn").num_groups == 2


def test_none_is_the_identity() -> None:
    x = torch.randn(2, 4, 3, 3, dtype=torch.float64)
    assert convert_norm(trained_batch_norm(), "none")(x).equal(x)


def test_bn_leaves_the_model_as_it_is() -> None:
    model = build_model("cnn", 10)
    layers = list(model.modules())
    assert convert_norm(model, "bn") is model
    assert list(model.modules()) == layers


@pytest.mark.parametrize("kind", ["gn", "ln", "in", "none"])
@pytest.mark.parametrize("training", [True, False])
def test_conversion_keeps_everything_else(kind: str, training: bool) -> None:
    torch.manual_seed(0)
    model = build_model("cnn", 10).to(torch.float64).train(training)
    for layer in (model.bn1, model.bn2):
        nn.init.normal_(layer.weight)
        nn.init.normal_(layer.bias)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    assert convert_norm(model, kind) is model
    assert not any(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    for key, value in model.state_dict().items():
        assert value.dtype == torch.float64
        assert value.equal(before[key]), key
    assert all(module.training is training for module in model.modules())


def test_conversion_keeps_the_device() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)).to("meta")
    assert {p.device.type for p in convert_norm(model, "gn").parameters()} == {"meta"}


def test_batch_norm_without_gamma_becomes_a_layer_without() -> None:
    model = convert_norm(nn.Sequential(nn.BatchNorm2d(4, affine=False)), "gn")
    assert not list(model.parameters())


def test_conversion_finds_batch_norms_wherever_they_sit() -> None:
    import torchvision

    model = convert_norm(torchvision.models.resnet18(weights=None), "gn")
    assert not any(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    assert isinstance(model.layer2[0].downsample[1], nn.GroupNorm)


def test_a_layer_used_in_two_places_stays_one_layer() -> None:
    shared = nn.BatchNorm2d(4)
    model = nn.ModuleDict({"a": nn.Sequential(shared), "b": nn.Sequential(nn.Conv2d(4, 4, 1), shared)})
    convert_norm(model, "gn")
    assert isinstance(model["a"][0], nn.GroupNorm)
    assert model["b"][1] is model["a"][0]


def test_a_layer_used_twice_by_one_parent_stays_one_layer() -> None:
    shared = nn.BatchNorm2d(4)
    model = convert_norm(nn.Sequential(nn.Conv2d(4, 4, 1), shared, nn.Conv2d(4, 4, 1), shared), "gn")
    assert isinstance(model[1], nn.GroupNorm)
    assert model[3] is model[1]


def test_gamma_that_does_not_train_still_does_not() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)).requires_grad_(False)
    convert_norm(model, "gn")
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_an_unknown_kind_is_answered_with_the_nearest() -> None:
    with pytest.raises(SettingsError, match=r"model\.norm='gnn' is not a normaliser; did you mean 'gn'\?"):
        convert_norm(build_model("cnn", 10), "gnn")


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(SettingsError, match="no option 'group'; did you mean 'groups'"):
        convert_norm(build_model("cnn", 10), "gn", group=2)


def test_groups_that_do_not_divide_name_the_layer() -> None:
    with pytest.raises(SettingsError, match="bn has 16 channels, which 3 groups do not divide"):
        convert_norm(build_model("resnet20", 10), "gn", groups=3)
    with pytest.raises(SettingsError, match=r"1\.0 has 5 channels, which 2 groups do not divide"):
        convert_norm(nn.Sequential(nn.Identity(), nn.Sequential(nn.BatchNorm2d(5))), "gn")


def test_instance_norm_of_single_values_is_refused() -> None:
    with pytest.raises(SettingsError, match="norm 'in': 1 is a BatchNorm1d"):
        convert_norm(nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4)), "in")


# --- frozen_norm -------------------------------------------------------------


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(16, 3)
    )


def one_step(model: nn.Module) -> set[str]:
    """Keys of the state dict that an SGD step on a batch changes."""
    before = {key: value.clone() for key, value in model.state_dict().items()}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    F.cross_entropy(model(torch.randn(8, 1, 4, 4) + 2), torch.arange(8) % 3).backward()
    optimizer.step()
    optimizer.zero_grad()
    return {key for key, value in model.state_dict().items() if not value.equal(before[key])}


WEIGHTS = {"0.weight", "0.bias", "5.weight", "5.bias"}
AFFINE = {"1.weight", "1.bias"}
STATISTICS = {"1.running_mean", "1.running_var", "1.num_batches_tracked"}


@pytest.mark.parametrize(
    ("what", "moves"),
    [
        (frozenset(), WEIGHTS | AFFINE | STATISTICS),
        (frozenset({Role.STATISTICS}), WEIGHTS | AFFINE),
        (frozenset({Role.AFFINE}), WEIGHTS | STATISTICS),
        (frozenset({Role.STATISTICS, Role.AFFINE}), WEIGHTS),
    ],
)
def test_what_is_frozen_does_not_move_and_all_else_does(what: frozenset[Role], moves: set[str]) -> None:
    model = net()
    with frozen_norm(model, what):
        assert one_step(model) == moves


def test_frozen_statistics_are_what_training_normalises_with() -> None:
    model = net()
    model[1].running_mean.fill_(2.0)
    model[1].running_var.fill_(9.0)
    x = torch.randn(5, 1, 4, 4)
    with frozen_norm(model, frozenset({Role.STATISTICS})):
        found = model[:2](x)
    torch.testing.assert_close(found, (model[0](x) - 2) / (9 + 1e-5) ** 0.5)


def test_dropout_stays_on_while_statistics_are_frozen() -> None:
    model = net().eval()
    x = torch.randn(4, 1, 4, 4)
    with frozen_norm(model, frozenset({Role.STATISTICS})):
        assert model[3].training
        assert not model(x).equal(model(x))


def test_requires_grad_is_restored_afterwards() -> None:
    model = net()
    model[1].bias.requires_grad_(False)  # somebody's own choice, not ours to undo
    with frozen_norm(model, frozenset({Role.AFFINE})):
        assert not model[1].weight.requires_grad
    assert model[1].weight.requires_grad
    assert not model[1].bias.requires_grad


def test_requires_grad_is_restored_after_an_error() -> None:
    model = net()
    with pytest.raises(RuntimeError, match="diverged"), frozen_norm(model, frozenset({Role.AFFINE})):
        raise RuntimeError("diverged")
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_training_without_freezing_follows_training_with_it() -> None:
    """A client that froze in one round trains freely in the next."""
    model = net()
    with frozen_norm(model, frozenset({Role.STATISTICS, Role.AFFINE})):
        pass
    with frozen_norm(model, frozenset()):
        assert one_step(model) == WEIGHTS | AFFINE | STATISTICS


def test_a_batch_norm_without_statistics_cannot_be_frozen() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, track_running_stats=False))
    with (
        pytest.raises(MessageError, match="batch norm '1': it keeps none"),
        frozen_norm(model, frozenset({Role.STATISTICS})),
    ):
        pass
