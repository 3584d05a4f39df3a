"""Networks by name: sizes counted by hand or by their authors' code, stems, and networks of the user's own."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from torch import nn
from torch.nn import functional as F

from fedbn_flwr import build_model
from fedbn_flwr.errors import MissingPackage, SettingsError
from fedbn_flwr.experiment.file.layers import load_experiment
from fedbn_flwr.experiment.prepare import prepare
from fedbn_flwr.models import MODELS
from fedbn_flwr.models.networks import MaxOfQuarters
from fedbn_flwr.norms import NORMS
from tests.support.nets import parameters


def on_meta(name: str, classes: int = 10, **options: Any) -> nn.Module:
    """The network without memory for its weights."""
    with torch.device("meta"):
        return build_model(name, classes, **options)


def shape(model: nn.Module, *image: int) -> tuple[int, ...]:
    return tuple(model.eval()(torch.zeros(2, *image, device="meta")).shape)


# --- the papers' own ---------------------------------------------------------


PLAIN = {
    "resnet18": 11_689_512,
    "resnet50": 25_557_032,
    "mobilenet_v2": 3_504_872,
    "alexnet": 61_100_840,
    "densenet121": 7_978_856,
}
# The papers' networks with ten classes: weights and biases of convolutions and linear layers, and those of batch norms.
PAPERS = {
    "cnn": (9 * 16 + 9 * 16 * 32 + (128 * 10 + 10), 2 * (16 + 32)),
    "resnet20": (269_722 - 1_376, 1_376),
    "lenet": ((6 * 25 + 6) + (16 * 6 * 25 + 16) + (400 * 120 + 120) + (120 * 84 + 84) + (84 * 10 + 10), 2 * (6 + 16)),
    "digits_cnn": (
        (3 * 64 * 25 + 64) + (64 * 64 * 25 + 64) + (64 * 128 * 25 + 128)
        + (6_272 * 2_048 + 2_048) + (2_048 * 512 + 512) + (512 * 10 + 10),
        2 * (64 + 64 + 128 + 2_048 + 512),
    ),
    "alexnet_bn": (PLAIN["alexnet"] - 990 * (4_096 + 1), 2 * (64 + 192 + 384 + 256 + 256 + 4_096 + 4_096)),
    "fedbs_cifar": (
        (3 * 100 * 25 + 100) + (100 * 150 * 9 + 150) + (150 * 250 * 9 + 250) + (250 * 500 * 9 + 500)
        + (4_500 * 270 + 270) + (270 * 150 + 150) + (150 * 10 + 10),
        2 * (100 + 150 + 250 + 500),
    ),
    "fedbs_mnist": ((25 * 16 + 16) + (16 * 32 * 25 + 32) + (1_568 * 10 + 10), 2 * (16 + 32)),
}  # fmt: skip


@pytest.mark.parametrize("name", PAPERS)
def test_the_papers_networks_have_their_parameters(name: str) -> None:
    model, (others, norms) = on_meta(name), PAPERS[name]
    of_norms = sum(parameters(m) for m in model.modules() if isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d))
    assert (parameters(model) - of_norms, of_norms) == (others, norms)


@pytest.mark.parametrize("name", PLAIN)
def test_torchvision_s_networks_have_their_published_parameters(name: str) -> None:
    assert parameters(on_meta(name, 1_000, input_shape=(3, 224, 224))) == PLAIN[name]
    assert parameters(on_meta(name, 1_000)) == PLAIN[name]


@pytest.mark.parametrize("norm", [norm for norm in NORMS if norm not in ("bn", "fixup")])
@pytest.mark.parametrize("name", ["resnet20", "resnet18", "mobilenet_v2"])
def test_normalisers_replace_all_batch_norms(name: str, norm: str) -> None:
    plain, model = (on_meta(name, input_shape=(3, 32, 32), norm=each) for each in ("bn", norm))
    assert shape(model, 3, 32, 32) == (2, 10)
    assert not any(type(module) is nn.BatchNorm2d for module in model.modules())
    if norm in ("gn", "ln", "in", "gn+ws", "brn", "none"):
        of_norms = sum(parameters(m) for m in plain.modules() if isinstance(m, nn.BatchNorm2d))
        assert parameters(plain) - parameters(model) == (of_norms if norm == "none" else 0)


@pytest.mark.parametrize("size", [1, 2, 7, 8, 9, 28, 32])
@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last])
def test_cnn_s_pooling_is_torch_s_adaptive_one_bit_for_bit(size: int, format: torch.memory_format) -> None:
    images = torch.randn(3, 4, size, size + size // 8).relu().contiguous(memory_format=format)
    found, expected = (images.clone().requires_grad_() for _ in range(2))
    ours, theirs = MaxOfQuarters()(found), nn.AdaptiveMaxPool2d(2)(expected)
    weights = torch.randn_like(ours)
    for outputs in (ours, theirs):
        (outputs * weights).sum().backward()
    assert ours.equal(theirs)
    assert found.grad.equal(expected.grad)


@pytest.mark.slow
def test_cnn_exports_without_adaptive_pooling() -> None:
    """ONNX has no function for it."""
    exported = torch.export.export(build_model("cnn", 10).eval(), (torch.randn(2, 1, 8, 8),))
    operations = {str(node.target) for node in exported.graph.nodes if node.op == "call_function"}
    assert not any("adaptive" in name for name in operations)
    assert any("max_pool2d" in name for name in operations)


def test_resnet20_halves_pixels_and_doubles_channels_twice() -> None:
    model = build_model("resnet20", 10)
    x = torch.zeros(1, 16, 32, 32)
    shapes = []
    for block in model.stages:
        x = block(x)
        shapes.append(tuple(x.shape[1:]))
    assert shapes == [(16, 32, 32)] * 3 + [(32, 16, 16)] * 3 + [(64, 8, 8)] * 3
    assert sum(isinstance(module, nn.Conv2d | nn.Linear) for module in model.modules()) == 20


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


@pytest.mark.parametrize("name", ["lenet", "digits_cnn", "fedbs_mnist", "fedbs_cifar"])
def test_batch_norm_follows_every_convolution(name: str) -> None:
    layers = list(on_meta(name))
    found = [type(layers[i + 1]) for i, layer in enumerate(layers) if isinstance(layer, nn.Conv2d)]
    assert set(found) == {nn.BatchNorm2d}


@pytest.mark.parametrize(
    ("name", "image"),
    [
        ("mlp", (3, 20, 24)),
        ("cnn", (1, 8, 8)),
        ("cnn", (3, 32, 32)),
        ("resnet20", (1, 28, 28)),
        ("lenet", (3, 20, 40)),
        ("lenet", (1, 12, 12)),
        ("lenet", (3, 64, 64)),
        ("digits_cnn", (3, 32, 32)),
        ("digits_cnn", (1, 9, 15)),
        ("fedbs_cifar", (1, 28, 28)),
        ("fedbs_cifar", (3, 33, 2)),
        ("fedbs_mnist", (3, 32, 30)),
        ("alexnet_bn", (3, 256, 256)),
        ("alexnet_bn", (1, 64, 64)),
    ],
)
def test_networks_are_built_for_the_size_of_the_images(name: str, image: tuple[int, int, int]) -> None:
    model = on_meta(name, 7, input_shape=image)
    assert shape(model, *image) == (2, 7)


@pytest.mark.parametrize(("name", "size"), [("lenet", 11), ("digits_cnn", 3), ("fedbs_cifar", 1), ("fedbs_mnist", 3)])
def test_an_image_that_is_too_small_is_refused(name: str, size: int) -> None:
    with pytest.raises(
        SettingsError,
        match=rf"'{name}' needs images of at least {size + 1}x{size + 1} pixels; these have {size}x{size}",
    ):
        on_meta(name, input_shape=(3, size, size))
    on_meta(name, input_shape=(3, size + 1, size + 1))


# --- torchvision's -----------------------------------------------------------


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v2"])
def test_first_weights_are_torchvision_s_for_the_same_seed(name: str) -> None:
    theirs = getattr(torchvision.models, name)(weights=None, num_classes=10).state_dict()
    torch.manual_seed(0)
    ours = build_model(name, 10, input_shape=(3, 224, 224)).state_dict()
    assert list(ours) == list(theirs)
    assert all(value.equal(theirs[key]) for key, value in ours.items())


# Weights of the first convolution: (kernel of the small stem)^2 and of torchvision's, per filter and channel.
FIRST = {"resnet18": (9, 49, 64), "resnet50": (9, 49, 64), "mobilenet_v2": (9, 9, 32), "densenet121": (9, 49, 64)}


@pytest.mark.parametrize("name", FIRST)
@pytest.mark.parametrize("channels", [1, 3])
def test_the_small_stem_changes_only_the_first_convolution(name: str, channels: int) -> None:
    small, large, filters = FIRST[name]
    rest = PLAIN[name] - 3 * large * filters
    model = on_meta(name, 1_000, input_shape=(channels, 224, 224), stem="small")
    assert parameters(model) == rest + channels * small * filters
    assert (
        parameters(on_meta(name, 1_000, input_shape=(channels, 224, 224), stem="large"))
        == rest + channels * large * filters
    )


def last_pixels(name: str, size: int, **options: Any) -> int:
    """The side of the examples that the last convolution makes."""
    model = on_meta(name, input_shape=(3, size, size), **options).eval()
    sides: list[int] = []
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(lambda module, inputs, output: sides.append(output.shape[-1]))
    model(torch.zeros(2, 3, size, size, device="meta"))
    return sides[-1]


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v2", "densenet121"])
@pytest.mark.parametrize(
    ("size", "stem", "side"),
    [(32, "auto", 4), (64, "auto", 8), (64, "large", 2), (96, "auto", 3)],
)
def test_the_small_stem_keeps_an_eighth_of_each_side(name: str, size: int, stem: str, side: int) -> None:
    assert last_pixels(name, size, stem=stem) == side


def test_a_new_first_convolution_is_drawn_as_torchvision_draws_its_own() -> None:
    weight = build_model("resnet18", 10, input_shape=(3, 32, 32)).conv1.weight
    assert weight.shape == (64, 3, 3, 3)
    assert float(weight.detach().std()) == pytest.approx((2 / (64 * 9)) ** 0.5, rel=0.05)  # He, fan-out


# --- DeepLabV3+ --------------------------------------------------------------


@pytest.mark.parametrize("encoder", ["mobilenet_v2", "resnet50"])
def test_deeplab_has_logits_for_each_pixel(encoder: str) -> None:
    pytest.importorskip("segmentation_models_pytorch", reason="the extra `segmentation` is not installed")
    model, standardised = (on_meta(f"deeplabv3plus_{encoder}", 19, norm=norm) for norm in ("bn", "gn+ws"))
    assert parameters(model) == {"mobilenet_v2": 4_383_139, "resnet50": 26_682_211}[encoder]
    assert tuple(model(torch.zeros(2, 3, 64, 64, device="meta")).shape) == (2, 19, 64, 64)
    plain = [name for name, layer in standardised.named_modules() if type(layer) is nn.Conv2d]
    assert plain == ["segmentation_head.0"], "the last one keeps its weights"


@pytest.mark.parametrize("encoder", ["mobilenet_v2", "resnet50"])
def test_without_the_extra_deeplab_says_how_to_install_it(encoder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "segmentation_models_pytorch", None)  # as if it were not installed
    with pytest.raises(MissingPackage, match=r"needs the package .*_pytorch.*pip install 'PATH/TO/CLONE\[segment"):
        build_model(f"deeplabv3plus_{encoder}", 19)


# --- a network of the user's own ---------------------------------------------

OWN = """
import torch
from torch import nn

FIVE = 5

def loss_of_logits(logits, labels):
    return nn.functional.cross_entropy(logits, labels)

def loss_of_each(outputs, labels):
    if isinstance(outputs, tuple):
        return nn.functional.cross_entropy(outputs[0], labels, reduction="none")
    return nn.functional.cross_entropy(outputs, labels)

class Net(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.norm = nn.BatchNorm2d(3)
        self.classify = nn.Linear(3, num_classes)

    def forward(self, x):
        return self.classify(self.norm(x).mean((2, 3)))

class Nets:
    @staticmethod
    def nested(num_classes, in_channels, image_size):
        net = Net(num_classes)
        net.given = (in_channels, image_size)
        return net

def swallows(**options):
    net = Net(options["num_classes"])
    net.given = options
    return net

def text(num_classes):
    return "net"

def fails(num_classes):
    raise KeyError("weights")

def other(classes):
    return Net(classes)

def Twelve(num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12))

class Pair(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.layers = Twelve(num_classes)

    def forward(self, x):
        return self.layers(x), x

class PairInTraining(Pair):
    def forward(self, x):
        y = self.layers(x)[:, :10]
        return (y, x) if self.training else y

class Raises(Pair):
    def forward(self, x):
        raise KeyError("a layer")

def frozen(num_classes):
    return Net(num_classes).requires_grad_(False)

class Draws(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.norm, self.classify, self.calls = nn.BatchNorm2d(3), nn.Linear(3, num_classes), 0

    def forward(self, x):
        self.calls += self.training
        return self.classify(nn.functional.dropout(self.norm(x.expand(-1, 3, -1, -1)).mean((2, 3)), 0.5, self.training))

def lazy(num_classes):
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(num_classes))
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "own_nets.py").write_text(OWN)
    (tmp_path / "broken_nets.py").write_text("import a_package_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "own_nets"
    for name in ("own_nets", "broken_nets"):
        sys.modules.pop(name, None)


def test_a_network_of_the_user_s_own_is_called_with_what_it_names(own: str) -> None:
    options: dict[str, Any] = {"input_shape": (3, 8, 8)}
    assert build_model(f"{own}:Net", 7, **options).classify.out_features == 7
    assert build_model(f"{own}:Nets.nested", 7, **options).given == (3, (8, 8))
    assert build_model(f"{own}:swallows", 7, **options).given == {"num_classes": 7}
    assert isinstance(build_model(f"{own}:Net", 7, "gn", groups=3).norm, nn.GroupNorm)
    assert type(on_meta("torchvision.models:resnet34", norm="fixup", input_shape=(3, 224, 224))).__name__ == "ResNet"
    with pytest.raises(SettingsError, match=r"model\.stem is 'small', but 'own_nets:Net' has only one stem"):
        build_model(f"{own}:Net", 10, stem="small")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("resnet2", r"model\.name='resnet2' is not a model; did you mean 'resnet20'"),
        ("own_nets:", "expected module:callable"),
        (":Net", "expected module:callable"),
        ("no_such_nets:Net", "cannot import 'no_such_nets' .*PYTHONPATH"),
        ("broken_nets:Net", "cannot import 'broken_nets' .*a_package_that_is_not_there"),
        ("own_nets:Ne", "'own_nets' has no 'Ne'"),
        ("own_nets:FIVE", "is a int; expected a function"),
        ("own_nets:text", "returned a str; expected a torch.nn.Module"),
        ("own_nets:fails", "failed: KeyError: 'weights'"),
        ("own_nets:other", r"failed: TypeError: other\(\) .* argument 'num_classes'"),
        (
            "own_nets:lazy",
            r"'1' is a LazyLinear of unknown size; call the model on a batch .* torch.zeros\(2, \*input_shape\)",
        ),
    ],
)
def test_what_is_wrong_with_a_network_of_the_user_s_own_is_one_message(own: str, name: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        build_model(name, 10)


# --- all ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", sorted(MODELS.keys() - {"resnet50", "alexnet", "alexnet_bn", *(n for n in MODELS if "deeplab" in n)})
)
def test_weights_are_drawn_from_the_global_generator(name: str) -> None:
    def make() -> nn.Module:
        return build_model(name, 3, input_shape=(1, 28) if name == "cnn1d" else (1, 28, 28))

    torch.manual_seed(5)
    first = make().state_dict()
    torch.manual_seed(5)
    assert all(value.equal(first[key]) for key, value in make().state_dict().items())
    other = make().state_dict()
    assert not all(value.equal(first[key]) for key, value in other.items())


# --- in an experiment --------------------------------------------------------


def prepared(model: str) -> nn.Module:
    experiment = load_experiment(f"{{model: {model}, data: {{name: digits}}, clients: 2}}", ["engine.device=cpu"])
    return prepare(experiment)[0].model


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("{name: lenet}", "'lenet' needs images of at least 12x12 pixels; these have 8x8"),
        ("{name: alexnet}", r"'alexnet' does not take the 1x8x8 examples of 'digits': .*too small"),
        ("{name: resnet18, stem: tiny}", r"model\.stem is 'tiny': expected 'auto', 'small' or 'large'"),
        (
            "{name: cnn, norm: brn, brn: {warmup: 30000}}",
            r"model\.brn: d_steps \(25000\) is less than warmup \(30000\)",
        ),
        (
            "{name: cnn, norm: brn}, rounds: 4, train: {steps: 5}",
            r"batch norm in a client's first 5000 .*at most 20 steps",
        ),
        ("{name: cnn, norm: brn, brn: {rmax: 2}}", r"unknown key 'model\.brn\.rmax' .*did you mean 'r_max'"),
        ("{name: mobilenet_v2, norm: fixup}", "norm 'fixup': MobileNetV2 is not a residual network"),
        ("{name: 'own_nets:Twelve'}", r"returns shape \[2, 12\] for a batch of 2 examples; expected .*\[2, 10\]"),
        ("{name: 'own_nets:Pair'}", "returns a tuple for a batch of 2 examples; expected"),
        (
            "{name: 'own_nets:PairInTraining'}",
            "tuple in training mode for a batch of 2 examples; .* or a train.loss",
        ),
        (
            "{name: 'own_nets:PairInTraining'}, train: {loss: 'own_nets:loss_of_logits'}",
            r"^train\.loss='own_nets:loss_of_logits', given what model\.name=.*\(a tuple\).* failed: TypeError: ",
        ),
        (
            "{name: 'own_nets:PairInTraining'}, train: {loss: 'own_nets:loss_of_each'}",
            r"^train\.loss='own_nets:loss_of_each', given .* in training mode \(a tuple\).* returned .*; expected",
        ),
        ("{name: 'own_nets:Raises'}", "Raises' does not take the 1x8x8 examples of 'digits': KeyError: 'a layer'"),
        ("{name: 'own_nets:frozen'}", "own_nets:frozen' has no parameter with requires_grad; expected one to train"),
    ],
)
def test_a_model_that_does_not_fit_is_one_message_before_training(own: str, model: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message) as caught:
        prepared(model)
    assert "\n" not in str(caught.value)


def test_an_experiment_s_model_is_built_for_its_images_with_its_options() -> None:
    assert prepared("{name: mlp}").hidden.in_features == 64
    assert prepared("{name: resnet18}").conv1.kernel_size == (3, 3)
    assert prepared("{name: resnet18, stem: large}").conv1.kernel_size == (7, 7)
    norm = prepared("{name: cnn, norm: brn, brn: {r_max: 2, warmup: 10}}").bn1
    assert (norm.r_max, norm.d_max, norm.warmup, norm.r_steps) == (2, 5, 10, 40_000)
    assert prepared("{name: cnn, norm: gn+ws, groups: 4}").bn1.num_groups == 4


def test_trying_a_model_changes_neither_it_nor_random_draws(own: str) -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    model = prepared("{name: 'own_nets:Draws'}")
    assert torch.rand(3).equal(expected)
    assert (int(model.norm.num_batches_tracked), model.norm.running_var.tolist(), model.calls) == (0, [1.0] * 3, 0)
    assert not model.training


def test_options_are_arguments_of_the_network() -> None:
    model = build_model("mlp", 10, arguments={"hidden": 7})
    assert model.get_submodule("hidden").out_features == model.get_submodule("bn").num_features == 7


@pytest.mark.parametrize(
    ("name", "options", "problem"),
    [
        (
            "mlp",
            {"arguments": {"hiden": 7}},
            "model.options.hiden is not an argument of the network 'mlp'; did you mean 'hidden'? known: hidden",
        ),
        (
            "cnn",
            {"arguments": {"hiden": 7}},
            "of the network 'cnn'; it has no arguments but those that follow from the data",
        ),
        ("alexnet", {"stem": "small"}, "model.stem is 'small', but 'alexnet' has only one stem; "),
        ("resnet18", {"stem": "smal"}, "stem is 'smal'; expected 'auto', 'small' or 'large'"),
    ],
)
def test_an_option_that_a_network_does_not_have_is_named(name: str, options: Any, problem: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(problem)):
        build_model(name, 10, **options)
