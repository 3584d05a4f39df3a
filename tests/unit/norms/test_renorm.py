"""Batch renormalisation, against its paper's formulas in float64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedbn_flwr import Role, convert_norm
from fedbn_flwr.errors import SettingsError
from fedbn_flwr.norms.roles import roles
from fedbn_flwr.norms.statistics import frozen_norm, reestimate
from fedbn_flwr.norms.variants import BatchRenorm
from tests.support.nets import close, two_norms

CPU = torch.device("cpu")

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


def test_every_step_equals_algorithm_1_with_the_bounds_of_that_step() -> None:
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


def test_training_within_the_bounds_equals_evaluation() -> None:
    layer = renorm(**OPEN)
    layer.running_mean.copy_(torch.tensor([1.0, -1, 2, 0]))
    layer.running_var.copy_(torch.tensor([4.0, 1, 0.1, 2]))
    x = images()
    before = layer.eval()(x)
    assert not torch.allclose(before, convert_norm(nn.BatchNorm2d(4).double(), "bn")(x))
    close(layer.train()(x), before)


def test_the_bounds_open_as_the_paper_says_by_default() -> None:
    """From step 5,000 on, r_max goes from 1 to 3 at step 40,000, and d_max from 0 to 5 at step 25,000."""
    opened = {  # the shares of the ways of r_max and d_max
        0: (0, 0),
        5_000: (0, 0),
        15_000: (2 / 7, 1 / 2),
        22_500: (1 / 2, 7 / 8),
        25_000: (4 / 7, 1),
        40_000: (1, 1),
        90_000: (1, 1),
    }
    x = 100 * images()  # so far from the running statistics that both bounds apply to every channel
    for steps, (r, d) in opened.items():
        layer = renorm()
        assert layer.num_batches_tracked is not None
        layer.num_batches_tracked.fill_(steps)
        expected = by_algorithm_1(layer, x, 1 + 2 * r, 5 * d)
        close(layer.train()(x), expected)


def test_renormalisation_has_batch_norm_s_state_and_roles() -> None:
    net = two_norms()
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
    net = convert_norm(two_norms().requires_grad_(False), "brn")
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
    net = two_norms()
    batches = [(torch.randn(4, 2, 5, 5, dtype=torch.float64) + i, torch.zeros(4)) for i in range(3)]
    expected, _ = reestimate(copy.deepcopy(net), batches, CPU)
    net = convert_norm(net, "brn", **OPEN)
    found, _ = reestimate(net, batches, CPU)
    assert list(found) == list(expected)
    for key, value in expected.items():
        close(found[key], value)
    assert int(net[1].num_batches_tracked) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"r_max": 0.5}, r"r_max is 0\.5; expected a number >= 1"),
        ({"d_max": -1.0}, r"d_max is -1.0; expected a number >= 0"),
        ({"warmup": 30_000}, r"d_steps is 25000; expected at least warmup \(30000\)"),
    ],
)
def test_bounds_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        convert_norm(two_norms(), "brn", **options)


def test_renormalisation_tracks_statistics_where_batch_norm_did_not() -> None:
    untracked = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2, track_running_stats=False))
    for net, count in ((untracked, 1), (convert_norm(two_norms(), "sbn"), 2)):
        assert [key.endswith("running_mean") for key in convert_norm(net, "brn").state_dict()].count(True) == count
