"""Group norm with standardised weights, Fixup, batch renormalisation: against their papers' formulas in float64."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from flwr.app import Context, RecordDict
from timm.layers import BatchNormAct2d, StdConv2d
from torch import Tensor, nn
from torch.nn import functional as F

from fedbn_flwr import BNClient, Role, build_model, convert_norm
from fedbn_flwr.cli import main
from fedbn_flwr.client.evaluation import reestimate
from fedbn_flwr.errors import MessageError, SettingsError
from fedbn_flwr.exchange.step import Answer, LayerwiseStep
from fedbn_flwr.norms.convert import frozen_norm
from fedbn_flwr.norms.renorm import BatchRenorm
from fedbn_flwr.norms.roles import roles
from fedbn_flwr.norms.wsconv import StdConv2d as OurStdConv2d

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def small_net() -> nn.Module:
    net = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4, eps=1e-3),
        nn.ReLU(),
        nn.Conv2d(4, 6, 3, stride=2, groups=2),
        nn.BatchNorm2d(6),
        nn.Flatten(),
        nn.Linear(24, 3),
    ).double()
    for parameter in net.parameters():
        nn.init.normal_(parameter)
    return net


# --- group norm with standardised weights ------------------------------------


def test_gn_ws_equals_timm_s_convolution_and_torch_s_group_norm() -> None:
    net = small_net()
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


def test_a_standardised_filter_has_mean_zero_and_deviation_one() -> None:
    conv = OurStdConv2d(3, 4, 3, dtype=torch.float64)
    filters = conv.standardised().flatten(1)
    torch.testing.assert_close(filters.mean(1), torch.zeros(4, dtype=torch.float64), atol=1e-12, rtol=0)
    sigma2 = conv.weight.detach().flatten(1).var(1, correction=0)
    close(filters.detach().var(1, correction=0), sigma2 / (sigma2 + 1e-5))


def test_gn_ws_takes_its_groups() -> None:
    model = convert_norm(build_model("cnn", 10), "gn+ws", groups=8)
    assert [module.num_groups for module in model.modules() if isinstance(module, nn.GroupNorm)] == [8, 8]


def test_gn_ws_leaves_the_state_dict_and_the_weights_as_they_are() -> None:
    model = build_model("resnet20", 10)
    before = {key: value.clone() for key, value in model.state_dict().items() if roles(model)[key] is Role.WEIGHTS}
    after = convert_norm(model, "gn+ws").state_dict()
    assert parameters(model) == 269_722
    assert all(value.equal(after[key]) for key, value in before.items())
    assert all(type(m) is OurStdConv2d for m in model.modules() if isinstance(m, nn.Conv2d))


def test_a_last_convolution_without_norm_behind_it_keeps_its_weights() -> None:
    dense = convert_norm(nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1)), "gn+ws")
    assert [type(layer) for layer in dense] == [OurStdConv2d, nn.GroupNorm, nn.Conv2d]
    bare = convert_norm(nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4, affine=False)), "gn+ws")
    assert type(bare[0]) is OurStdConv2d


def test_gn_ws_without_a_norm_to_replace_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"norm 'gn\+ws': the model has no batch norm"):
        convert_norm(nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(4, 2)), "gn+ws")


def test_a_filter_of_one_weight_cannot_be_standardised() -> None:
    with pytest.raises(SettingsError, match=r"norm 'gn\+ws': a filter of 0 is a single weight"):
        convert_norm(nn.Sequential(nn.Conv2d(4, 4, 1, groups=4), nn.BatchNorm2d(4)), "gn+ws")


class Padded(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.pad(x, (1, 0, 1, 0)))


@pytest.mark.parametrize("kind", ["gn+ws", "won"])
def test_a_convolution_with_arithmetic_of_its_own_is_refused(kind: str) -> None:
    with pytest.raises(SettingsError, match="0 is a Padded, a convolution of another kind"):
        convert_norm(nn.Sequential(Padded(1, 4, 2), nn.BatchNorm2d(4)), kind)


# --- Fixup -------------------------------------------------------------------

RESNETS = {
    "resnet20": (lambda: build_model("resnet20", 5, in_channels=2), 2, 9, 2),
    "resnet18": (lambda: build_model("resnet18", 5, in_channels=2, image_size=8), 2, 8, 2),
    "resnet50": (lambda: build_model("resnet50", 5, in_channels=2, image_size=8), 2, 16, 3),
}


def blocks_of(model: nn.Module) -> list[tuple[str, Any]]:
    found = [(name, module) for name, module in model.named_modules() if hasattr(module, "conv2")]
    return [(f"{name}.", module) for name, module in found]


def scattered(model: nn.Module) -> nn.Module:
    """All zeros and scalars moved from where they began."""
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
        y = x
        for i in range(1, m + 1):
            weight = at[f"{name}conv{i}.weight"]
            strided = i == m - 1 if m == 3 else i == 1
            y = y + at[f"{name}conv{i}.input_bias"]
            y = F.conv2d(y, weight, stride=block.stride if strided else 1, padding=weight.shape[-1] // 2)
            if i < m:
                y = F.relu(y + at[f"{name}bn{i}.bias"])
        y = y * at[f"{name}bn{m}.weight"] + at[f"{name}bn{m}.bias"]
        if f"{name}downsample.0.weight" in at:
            x = x + at[f"{name}downsample.0.input_bias"]
            x = F.conv2d(x, at[f"{name}downsample.0.weight"], stride=block.stride)
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


@pytest.mark.parametrize(("name", "scalars"), [("resnet20", 9 * 5 + 2), ("resnet18", 8 * 5 + 3 + 2)])
def test_fixup_has_five_scalars_in_a_basic_block_one_on_a_shortcut_and_two_outside(name: str, scalars: int) -> None:
    make = RESNETS[name][0]
    assert parameters(convert_norm(make(), "fixup")) == parameters(convert_norm(make(), "none")) + scalars


def test_fixup_has_seven_scalars_in_a_bottleneck() -> None:
    make = RESNETS["resnet50"][0]
    assert parameters(convert_norm(make(), "fixup")) == parameters(convert_norm(make(), "none")) + 16 * 7 + 4 + 2


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


def other_classifier() -> nn.Module:
    model = torchvision.models.resnet18(weights=None)
    model.fc = nn.Sequential(nn.Dropout(), nn.Linear(512, 10))
    return model


def one_more_norm() -> nn.Module:
    model = build_model("resnet20", 10)
    model.stages[0].extra = nn.ModuleList([nn.BatchNorm2d(16)])
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: build_model("cnn", 10), "Sequential is not a residual network whose branches are known"),
        (lambda: build_model("mobilenet_v2", 10), "MobileNetV2 is not a residual network whose branches are known"),
        (lambda: build_model("resnet20", 10, "gn"), "bn is a GroupNorm, expected a batch norm"),
        (lambda: build_model("resnet20", 10, "fixup"), "bn is a ScalarBias, expected a batch norm"),
        (other_block, r"layer2\.1 is a Sequential, whose branch is not known"),
        (other_classifier, "fc is a Sequential, expected a linear layer"),
        (one_more_norm, r"stages\.0\.extra\.0 is a batch norm outside"),
    ],
)
def test_a_network_whose_branches_are_not_known_is_refused_by_name_and_left_alone(make: Any, message: str) -> None:
    model = make()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(SettingsError, match=f"norm 'fixup': {message}"):
        convert_norm(model, "fixup")
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(value.equal(after[key]) for key, value in before.items())


# --- batch renormalisation ---------------------------------------------------

OPEN: dict[str, Any] = {"r_max": 1e9, "d_max": 1e9, "warmup": 0, "r_steps": 0, "d_steps": 0}


def renorm(like: nn.BatchNorm2d | None = None, **options: Any) -> BatchRenorm:
    layer = nn.BatchNorm2d(4, eps=1e-3).double() if like is None else copy.deepcopy(like)
    nn.init.normal_(layer.weight)
    nn.init.normal_(layer.bias)
    found = convert_norm(layer, "brn", **options)
    assert type(found) is BatchRenorm
    return found


def images(n: int = 6) -> Tensor:
    return torch.randn(n, 4, 3, 3, dtype=torch.float64) * torch.tensor([1.0, 3, 0.2, 1]).view(1, 4, 1, 1) + 2


def by_algorithm_1(layer: BatchRenorm, x: Tensor, r_max: float, d_max: float) -> Tensor:
    """Ioffe 2017: y of a batch, from the layer's running statistics."""
    mu_b = x.mean((0, 2, 3))
    sigma_b = ((x - mu_b.view(1, -1, 1, 1)).square().mean((0, 2, 3)) + layer.eps).sqrt()
    sigma = (layer.running_var + layer.eps).sqrt()
    r = (sigma_b / sigma).detach().clamp(1 / r_max, r_max)
    d = ((mu_b - layer.running_mean) / sigma).detach().clamp(-d_max, d_max)
    mu_b, sigma_b, r, d, gamma, beta = (
        value.view(1, -1, 1, 1) for value in (mu_b, sigma_b, r, d, layer.weight, layer.bias)
    )
    return gamma * ((x - mu_b) / sigma_b * r + d) + beta


def test_every_step_of_renormalisation_is_algorithm_1_with_its_bounds_at_that_step() -> None:
    """Warm-up of 2, r_max 3 at step 6, d_max 5 at step 4: the bounds go up a quarter, and half, a step."""
    layer = renorm(r_max=3.0, d_max=5.0, warmup=2, r_steps=6, d_steps=4)
    bounds = [(1, 0), (1, 0), (1, 0), (1.5, 2.5), (2, 5), (2.5, 5), (3, 5), (3, 5)]
    clipped = 0
    for r_max, d_max in bounds:
        ours = images().requires_grad_()
        theirs = ours.detach().clone().requires_grad_()
        expected = by_algorithm_1(layer, theirs, r_max, d_max)
        weight = torch.randn_like(expected)
        (expected * weight).sum().backward()
        wanted = [layer.weight.grad.clone(), layer.bias.grad.clone()]
        layer.zero_grad()
        var, mean = torch.var_mean(theirs.detach(), dim=(0, 2, 3))  # unbiased
        statistics = [0.9 * layer.running_mean + 0.1 * mean, 0.9 * layer.running_var + 0.1 * var]
        ratio = ((var + layer.eps) / (layer.running_var + layer.eps)).sqrt()
        clipped += int(((ratio > r_max) | (ratio < 1 / r_max)).sum())
        found = layer(ours)
        (found * weight).sum().backward()
        close(found, expected)
        close(ours.grad, theirs.grad)
        for have, want in zip([layer.weight.grad, layer.bias.grad], wanted, strict=True):
            close(have, want)
        for have, want in zip([layer.running_mean, layer.running_var], statistics, strict=True):
            close(have, want)
        layer.zero_grad()
    assert int(layer.num_batches_tracked) == len(bounds)
    assert clipped >= 8  # the bounds mattered


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("options", [{}, {"r_max": 1.0, "d_max": 0.0, "warmup": 0, "r_steps": 0, "d_steps": 0}])
def test_renormalisation_with_r_one_and_d_zero_is_batch_norm(options: dict[str, Any], momentum: float | None) -> None:
    plain = nn.BatchNorm2d(4, momentum=momentum).double()
    layer = renorm(plain, **options)
    plain.load_state_dict(layer.state_dict())
    for _ in range(3):
        ours, theirs = (x := images()).clone().requires_grad_(), x.clone().requires_grad_()
        weight = torch.randn_like(x)
        (layer(ours) * weight).sum().backward()
        (plain(theirs) * weight).sum().backward()
        close(layer(ours), plain(theirs))
        close(ours.grad, theirs.grad)
        close(layer.weight.grad, plain.weight.grad)
    for key, value in plain.state_dict().items():
        close(layer.state_dict()[key], value)
    layer.eval()
    plain.eval()
    assert layer(x).equal(plain(x))


def test_training_within_the_bounds_gives_what_evaluation_gave_before_the_batch() -> None:
    layer = renorm(**OPEN)
    layer.running_mean.copy_(torch.tensor([1.0, -1, 2, 0]))
    layer.running_var.copy_(torch.tensor([4.0, 1, 0.1, 2]))
    x = images()
    before = layer.eval()(x)
    assert not torch.allclose(before, convert_norm(nn.BatchNorm2d(4).double(), "bn")(x))
    close(layer.train()(x), before)


def test_the_bounds_open_as_the_paper_says_by_default() -> None:
    layer = BatchRenorm(1)
    found = [
        (float(layer._opened(torch.tensor(n), 40_000)), float(layer._opened(torch.tensor(n), 25_000)))
        for n in (0, 5_000, 15_000, 22_500, 25_000, 40_000, 90_000)
    ]
    assert found == [
        (0, 0),
        (0, 0),
        (pytest.approx(2 / 7), 0.5),
        (0.5, 0.875),
        (pytest.approx(4 / 7), 1),
        (1, 1),
        (1, 1),
    ]
    assert (layer.r_max, layer.d_max) == (3, 5)


def test_renormalisation_has_batch_norm_s_state_and_roles() -> None:
    net = small_net()
    net[1].running_mean.fill_(3.0)
    net[1].num_batches_tracked.fill_(7)
    state, role_of = {key: value.clone() for key, value in net.state_dict().items()}, roles(net)
    convert_norm(net, "brn")
    assert roles(net) == role_of == roles(net.state_dict())
    assert all(value.equal(state[key]) for key, value in net.state_dict().items())


def test_renormalisation_keeps_mode_dtype_and_what_does_not_train() -> None:
    layer = nn.BatchNorm1d(3, affine=False).double().eval()
    found = convert_norm(layer, "brn")
    assert (found.running_mean.dtype, found.training, list(found.parameters())) == (torch.float64, False, [])
    x = torch.randn(5, 3, dtype=torch.float64)
    close(found.train()(x), layer.train()(x))
    net = convert_norm(small_net().requires_grad_(False), "brn")
    assert not any(parameter.requires_grad for parameter in net.parameters())


def test_frozen_statistics_of_renormalisation_normalise_and_stay() -> None:
    net = nn.Sequential(renorm(**OPEN))
    before = {key: value.clone() for key, value in net.state_dict().items()}
    x = images()
    expected = copy.deepcopy(net).eval()(x)
    with frozen_norm(net, frozenset({Role.STATISTICS})):
        close(net(x), expected)
    assert all(value.equal(before[key]) for key, value in net.state_dict().items())


def test_statistics_are_re_estimated_as_those_of_batch_norm() -> None:
    net = small_net()
    batches = [(torch.randn(4, 2, 5, 5, dtype=torch.float64) + i, torch.zeros(4)) for i in range(3)]
    expected, _ = reestimate(copy.deepcopy(net), batches, CPU)
    net = convert_norm(net, "brn", **OPEN)
    found, _ = reestimate(net, batches, CPU)
    assert list(found) == list(expected)
    for key, value in expected.items():
        close(found[key], value)
    assert int(net[1].num_batches_tracked) == 0


def test_a_client_counts_the_steps_of_its_own_warm_up_over_rounds() -> None:
    net = convert_norm(small_net(), "brn", warmup=3, r_steps=3, d_steps=3)
    data = [(torch.randn(4, 2, 5, 5, dtype=torch.float64) * (i + 1), torch.arange(4) % 3) for i in range(2)]
    context = Context(0, 0, {"partition-id": 0}, RecordDict(), {})
    arrays = {
        key: value.numpy().copy() for key, value in net.state_dict().items() if roles(net)[key] is not Role.COUNTER
    }
    for done in (2, 4):
        client = BNClient(copy.deepcopy(net), data, lr=0.01, context=context)
        sent = client.train_round(arrays, {}).arrays
        assert int(client.model[1].num_batches_tracked) == done
        assert set(sent) == set(arrays)
        assert not np.array_equal(sent["1.running_mean"], arrays["1.running_mean"])
        arrays = sent


def test_a_layer_wise_step_refuses_batch_norms_whose_arithmetic_it_would_lose() -> None:
    step = LayerwiseStep(lambda pending: Answer(pending.tensors, pending.images))
    x, y = torch.randn(4, 2, 5, 5, dtype=torch.float64), torch.arange(4) % 3
    with pytest.raises(MessageError, match="'1' is a BatchRenorm, whose own arithmetic would be lost"):
        step(convert_norm(small_net(), "brn"), x, y, F.cross_entropy)
    net = small_net()
    net[1] = BatchNormAct2d(4).double()
    with pytest.raises(MessageError, match="'1' is a BatchNormAct2d, whose own arithmetic would be lost"):
        step(net, x, y, F.cross_entropy)
    with frozen_norm(net, frozenset({Role.STATISTICS})):  # then it is left to itself
        step(net, x, y, F.cross_entropy)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"r_max": 0.5}, r"r_max \(0\.5\) must be at least 1"),
        ({"d_max": -1.0}, r"d_max \(-1\) at least 0"),
        ({"warmup": 30_000}, r"d_steps \(25000\) must be at least warmup \(30000\)"),
    ],
)
def test_bounds_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        convert_norm(small_net(), "brn", **options)


def test_renormalisation_needs_statistics() -> None:
    with pytest.raises(SettingsError, match="norm 'brn': 1 tracks no statistics"):
        convert_norm(nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2, track_running_stats=False)), "brn")
    with pytest.raises(SettingsError, match="norm 'brn': 1 tracks no statistics"):
        convert_norm(convert_norm(small_net(), "sbn"), "brn")


# --- what cannot be converted, and what can ----------------------------------

CHANGED = ["gn", "ln", "in", "none", "gn+ws", "won", "sbn", "brn"]


@pytest.mark.parametrize("kind", CHANGED)
def test_a_lazy_batch_norm_is_refused_until_it_knows_its_channels(kind: str) -> None:
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.LazyBatchNorm2d())
    with pytest.raises(SettingsError, match="1 is a LazyBatchNorm2d that does not know its channels"):
        convert_norm(net, kind)
    net(torch.randn(2, 1, 4, 4))
    assert not any(type(module) is nn.BatchNorm2d for module in convert_norm(net, kind).modules())


@pytest.mark.parametrize("kind", CHANGED)
def test_a_synchronised_batch_norm_is_converted_as_any(kind: str) -> None:
    plain = small_net()
    synchronised = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain))
    assert isinstance(synchronised[1], nn.SyncBatchNorm)
    x = torch.randn(3, 2, 5, 5, dtype=torch.float64)
    assert convert_norm(synchronised, kind)(x).equal(convert_norm(plain, kind)(x))


@pytest.mark.parametrize("kind", CHANGED)
def test_a_batch_norm_that_also_activates_is_refused(kind: str) -> None:
    with pytest.raises(SettingsError, match="1 is a BatchNormAct2d, more than batch norm alone"):
        convert_norm(nn.Sequential(nn.Conv2d(1, 4, 3), BatchNormAct2d(4), nn.Linear(1, 1)), kind)


@pytest.mark.parametrize("kind", ["gn", "none", "brn"])
def test_renormalisation_can_be_converted_in_turn(kind: str) -> None:
    x = torch.randn(3, 2, 5, 5, dtype=torch.float64)
    net = small_net()
    again = convert_norm(convert_norm(copy.deepcopy(net), "brn"), kind)
    assert again(x).equal(convert_norm(net, kind)(x))


def test_every_normaliser_is_listed_with_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "norms", "--json"]) == 0
    lines = json.loads(capsys.readouterr().out)
    assert {*CHANGED, "bn", "fixup"} == set(lines)
    assert all(10 < len(line) < 110 for line in lines.values())
