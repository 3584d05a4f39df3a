"""`convert_norm`: normalisers against torch's own layers, and what can be converted."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune
from torchvision.ops import FrozenBatchNorm2d

from fedbn_flwr import build_model, convert_norm, roles
from fedbn_flwr.errors import SettingsError
from fedbn_flwr.norms import NORMS
from fedbn_flwr.norms.convert import NORMALISERS, Normaliser, NormOptions
from tests.support.nets import two_norms


def trained_batch_norm(channels: int = 4) -> nn.BatchNorm2d:
    torch.manual_seed(0)
    layer = nn.BatchNorm2d(channels, eps=1e-3, dtype=torch.float64)
    nn.init.normal_(layer.weight)
    nn.init.normal_(layer.bias)
    return layer


def scaled(layer: nn.BatchNorm2d, normalised: Tensor) -> Tensor:
    return normalised * layer.weight.view(1, -1, 1, 1) + layer.bias.view(1, -1, 1, 1)


INPUTS = {"features": (4,), "series": (4, 7), "images": (4, 5, 6), "volumes": (4, 3, 5, 2)}
LAYERS = {"features": nn.BatchNorm1d, "series": nn.BatchNorm1d, "images": nn.BatchNorm2d, "volumes": nn.BatchNorm3d}
TWINS: dict[str, Callable[..., nn.Module]] = {
    "gn": lambda *shape: nn.GroupNorm(2, 4, eps=1e-3, affine=False),
    "ln": lambda *shape: nn.LayerNorm(shape, eps=1e-3, elementwise_affine=False),
    "in": lambda *shape: (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)[len(shape) - 2](4, eps=1e-3),
    "sbn": lambda *shape: nn.SyncBatchNorm(4, eps=1e-3, affine=False, track_running_stats=False),
    "none": lambda *shape: nn.Identity(),
}


@pytest.mark.parametrize(
    ("kind", "data"), [(kind, data) for kind in TWINS for data in INPUTS if (kind, data) != ("in", "features")]
)
def test_normaliser_equals_torch_s_layer_with_the_same_gamma_and_beta(kind: str, data: str) -> None:
    layer = LAYERS[data](4, eps=1e-3, dtype=torch.float64)
    nn.init.normal_(layer.weight)
    nn.init.normal_(layer.bias)
    x = torch.randn(3, *INPUTS[data], dtype=torch.float64) * 3 + 1
    expected, shape = TWINS[kind](*INPUTS[data])(x), [1, 4] + [1] * (x.ndim - 2)
    if kind != "none":
        expected = expected * layer.weight.view(shape) + layer.bias.view(shape)
    torch.testing.assert_close(convert_norm(layer, kind)(x), expected, rtol=1e-12, atol=1e-12)


def test_groups_are_as_asked_and_two_by_default() -> None:
    x = torch.randn(3, 4, 5, 6, dtype=torch.float64)
    layer = trained_batch_norm()
    expected = scaled(layer, F.group_norm(x, 4, eps=1e-3))
    torch.testing.assert_close(convert_norm(layer, "gn", groups=4)(x), expected, rtol=1e-12, atol=1e-12)
    assert convert_norm(trained_batch_norm(), "gn").num_groups == 2


def test_bn_leaves_the_model_as_it_is() -> None:
    model = build_model("cnn", 10)
    layers = list(model.modules())
    assert convert_norm(model, "bn") is model
    assert list(model.modules()) == layers


@pytest.mark.parametrize("kind", ["gn", "ln", "in", "none"])
@pytest.mark.parametrize("training", [True, False])
def test_conversion_keeps_everything_else(kind: str, training: bool) -> None:
    model = build_model("cnn", 10).to(torch.float64).train(training)
    for layer in (model.bn1, model.bn2):
        nn.init.normal_(layer.weight)
        nn.init.normal_(layer.bias)
    model.bn1.requires_grad_(False)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    assert convert_norm(model, kind) is model
    assert not any(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    for key, value in model.state_dict().items():
        assert value.dtype == torch.float64
        assert value.equal(before[key]), key
    assert all(module.training is training for module in model.modules())
    assert {key for key, value in model.named_parameters() if not value.requires_grad} <= {"bn1.weight", "bn1.bias"}
    assert kind == "none" or not model.bn1.weight.requires_grad
    on_meta = convert_norm(nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)).to("meta"), kind)
    assert {parameter.device.type for parameter in on_meta.parameters()} == {"meta"}


def test_a_layer_used_by_two_parents_and_twice_by_one_stays_one_layer() -> None:
    shared = nn.BatchNorm2d(4)
    twice = nn.Sequential(nn.Conv2d(4, 4, 1), shared, nn.Conv2d(4, 4, 1), shared)
    model = convert_norm(nn.ModuleDict({"a": nn.Sequential(shared), "b": twice}), "gn")
    assert isinstance(model["a"][0], nn.GroupNorm)
    assert model["b"][1] is model["b"][3] is model["a"][0]


def test_the_signature_has_the_options_of_all_normalisers() -> None:
    assert NORMS.keys() == NORMALISERS.keys()
    assert NormOptions.__annotations__.keys() == {option for norm in NORMALISERS.values() for option in norm.options}


@pytest.mark.parametrize("shape", [(3, 4), (3, 4, 1), (3, 4, 1, 1)])
def test_instance_norm_of_single_values_is_refused(shape: tuple[int, ...]) -> None:
    """Also of images that have shrunk to one pixel, where the output would be beta."""
    model = convert_norm(nn.Sequential(nn.Identity(), nn.BatchNorm1d(4)), "in")
    with pytest.raises(SettingsError, match=r"norm 'in': 1 has an input of shape \[3, 4.*\], with one value"):
        model(torch.randn(shape))


CHANGED = [kind for kind in NORMS if kind not in ("bn", "fixup")]


@pytest.mark.parametrize("kind", CHANGED)
def test_a_lazy_batch_norm_is_refused_until_it_knows_its_channels(kind: str) -> None:
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.LazyBatchNorm2d())
    with pytest.raises(SettingsError, match="1 is a LazyBatchNorm2d of unknown size"):
        convert_norm(net, kind)
    net(torch.randn(2, 1, 4, 4))
    assert not any(type(module) is nn.BatchNorm2d for module in convert_norm(net, kind).modules())


@pytest.mark.parametrize("kind", CHANGED)
def test_a_synchronised_batch_norm_is_converted_as_any(kind: str) -> None:
    plain = two_norms()
    synchronised = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain))
    assert isinstance(synchronised[1], nn.SyncBatchNorm)
    x = torch.randn(3, 2, 5, 5, dtype=torch.float64)
    assert convert_norm(synchronised, kind)(x).equal(convert_norm(plain, kind)(x))


@pytest.mark.parametrize("kind", ["gn", "none", "brn"])
def test_renormalisation_can_be_converted_in_turn(kind: str) -> None:
    x = torch.randn(3, 2, 5, 5, dtype=torch.float64)
    net = two_norms()
    again = convert_norm(convert_norm(copy.deepcopy(net), "brn"), kind)
    assert again(x).equal(convert_norm(net, kind)(x))


def reference(layer: nn.BatchNorm2d, kind: str) -> nn.Module:
    """The layer with a beta of zero."""
    full = nn.BatchNorm2d(layer.num_features, dtype=torch.float64)
    full.weight = layer.weight
    return convert_norm(nn.Sequential(nn.Conv2d(1, 1, 1), full), kind)[1]


@pytest.mark.parametrize("kind", ["gn", "ln", "in", "sbn", "brn", "hbn"])
def test_batch_norm_without_beta_or_gamma_becomes_a_layer_without(kind: str) -> None:
    if kind != "hbn":
        assert not list(convert_norm(nn.Sequential(nn.BatchNorm2d(4, affine=False)), kind).parameters())
    layer = nn.BatchNorm2d(4, dtype=torch.float64)
    layer.bias = None  # as with bias=False, which the lowest versions of PyTorch lack
    nn.init.normal_(layer.weight)
    expected, options = reference(layer, kind), {"warmup": 0} if kind == "brn" else {}
    found = convert_norm(nn.Sequential(layer), kind, **options)
    more = ["0.alpha"] if kind == "hbn" else []
    assert [name for name, _ in found.named_parameters()] == ["0.weight", *more]
    if kind == "brn":
        expected.warmup = 0
    for _ in range(3):
        x = torch.randn(3, 4, 5, 6, dtype=torch.float64) * 3 + 1
        torch.testing.assert_close(found(x), expected(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["gn", "ln", "in", "gn+ws", "sbn", "brn", f"{__name__}:Scaled"])
def test_a_gamma_of_two_layers_stays_one(kind: str) -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4))
    model[3].weight = model[1].weight
    convert_norm(model, kind)
    assert model[3].weight is model[1].weight
    assert "Scaled" in kind or model[3].bias is not model[1].bias


@pytest.mark.parametrize("kind", ["gn", "ln", "in", "sbn", "brn", "torch.nn:InstanceNorm2d"])
def test_a_model_without_a_norm_to_replace_is_refused(kind: str) -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), FrozenBatchNorm2d(4))
    with pytest.raises(SettingsError, match=f"norm '{kind}': the model has no batch norm to replace; use 'bn'"):
        convert_norm(model, kind)
    assert convert_norm(model, "none") is model


# --- a normaliser of the user ------------------------------------------------


class Scaled(nn.Module):
    """Batch norm's gamma and running mean, and a parameter of its own."""

    def __init__(self, channels: int, layer: nn.Module) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(channels))
        self.gain = nn.Parameter(torch.ones(()))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.replaced = type(layer).__name__

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gain * x * self.weight[:, None, None]


def test_a_normaliser_of_the_user_keeps_what_it_shares_with_batch_norm() -> None:
    model = nn.Sequential(nn.Conv2d(1, 3, 1), nn.BatchNorm2d(3)).double().eval()
    nn.init.constant_(model[1].weight, 5)
    model[1].running_mean.fill_(7)
    convert_norm(model, f"{__name__}:Scaled")
    layer = model[1]
    assert (layer.replaced, layer.training, layer.gain.dtype) == ("BatchNorm2d", False, torch.float64)
    assert (layer.weight.tolist(), layer.running_mean.tolist()) == ([5] * 3, [7] * 3)
    assert roles(convert_norm(nn.Sequential(nn.BatchNorm2d(4)), "torch.nn:InstanceNorm2d")) == {}
    assert roles(model) == {
        "0.weight": "weights", "0.bias": "weights", "1.weight": "affine", "1.gain": "weights",
        "1.running_mean": "statistics",
    }  # fmt: skip


def test_an_entry_of_the_list_may_have_parameters_that_batch_norm_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    class Thresholded(nn.GroupNorm):
        def __init__(self, channels: int) -> None:
            super().__init__(2, channels)
            self.threshold = nn.Parameter(torch.full((channels,), 3.0))

    monkeypatch.setitem(NORMS, "new", "one more")
    monkeypatch.setitem(NORMALISERS, "new", Normaliser(lambda layer, *_: Thresholded(layer.num_features)))
    model = nn.Sequential(nn.BatchNorm2d(4))
    gamma = model[0].weight
    new: Any = convert_norm(model, "new")[0]  # type: ignore[index]
    assert new.weight is gamma
    assert new.threshold.tolist() == [3.0] * 4


@pytest.mark.parametrize(
    ("channels", "kind", "options", "message"),
    [
        (4, "builtins:str", {}, "returned a str; expected a torch.nn.Module"),
        (4, "torch.nn:GroupNorm", {}, r"failed: TypeError: .*missing 1 required positional argument: 'num_channels'"),
        (4, "torch.nn:BatchNorm4d", {}, "has no 'BatchNorm4d'; did you mean 'BatchNorm"),
        (4, "batchnorm", {}, "'batchnorm' is not a kind of normalisation; .* or module:callable for your own"),
        (4, "gnn", {}, r"model\.norm='gnn' is not a kind of normalisation; did you mean 'gn'\?"),
        (4, "gn", {"group": 2}, "no option 'group'; did you mean 'groups'"),
        (16, "gn", {"groups": 3}, r"1\.0 has 16 channels, which cannot be split into 3 equal groups"),
        (5, "gn", {}, r"1\.0 has 5 channels, which cannot be split into 2 equal groups"),
    ],
)
def test_a_wrong_normaliser_is_one_message(channels: int, kind: str, options: Any, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        convert_norm(nn.Sequential(nn.Identity(), nn.Sequential(nn.BatchNorm2d(channels))), kind, **options)


# --- computed weights ---

COMPUTED: list[Callable[[nn.Module], Any]] = [
    nn.utils.parametrizations.weight_norm,
    lambda layer: prune.l1_unstructured(layer, "weight", 1),
    lambda layer: prune.l1_unstructured(layer, "bias", 1),
]


@pytest.mark.parametrize("compute", COMPUTED)
@pytest.mark.parametrize(
    ("kind", "at"),
    [(kind, 1) for kind in ("gn", "ln", "in", "gn+ws", "sbn", "brn", "torch.nn:BatchNorm2d")]
    + [("won", 0), ("gn+ws", 0)],
)
def test_no_norm_keeps_a_computed_gamma_or_beta_or_standardises_a_computed_convolution(
    kind: str, at: int, compute: Callable[[nn.Module], Any]
) -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2))
    compute(model[at])
    words = rf"norm {re.escape(repr(kind))}: {at} computes its (weight|bias) from other"
    with pytest.raises(SettingsError, match=words):
        convert_norm(model, kind)


@pytest.mark.parametrize("compute", COMPUTED)
@pytest.mark.parametrize("kind", ["none", "won"])
def test_a_computed_gamma_may_go(kind: str, compute: Callable[[nn.Module], Any]) -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2))
    compute(model[1])
    assert convert_norm(model, kind)(torch.randn(3, 1, 3, 3)).shape == (3, 2)


@pytest.mark.parametrize("name", ["conv1", "layer1.0.conv1", "fc"])
def test_fixup_cannot_set_weights_that_are_computed(name: str) -> None:
    model = torchvision.models.resnet18(num_classes=3)
    prune.l1_unstructured(model.get_submodule(name), "weight", 1)
    if name == "conv1":  # the stem's, which fixup leaves as it is
        assert convert_norm(model, "fixup") is model
    else:
        with pytest.raises(SettingsError, match=f"norm 'fixup': {name} computes its weight"):
            convert_norm(model, "fixup")
