"""Re-estimated statistics are those of the batches, and re-estimation does not change the model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedbn_flwr import build_model
from fedbn_flwr.norms.statistics import reestimate
from tests.support.nets import net, some_batches, two_norms

CPU = torch.device("cpu")


@pytest.mark.parametrize("norm", ["bn", "sbn"])
def test_reestimated_statistics_are_the_mean_of_the_batches_own(norm: str) -> None:
    """Of three batches of 5, 5 and 3 examples each counts alike; variances are unbiased."""
    model, batches = net(norm), some_batches()
    found, count = reestimate(model, batches, CPU)
    inputs = [model[0](x).detach() for x, _ in batches]
    means = torch.stack([y.mean((0, 2, 3)) for y in inputs]).mean(0)
    variances = torch.stack([y.var((0, 2, 3)) for y in inputs]).mean(0)
    assert count == 3
    assert list(found) == ["1.running_mean", "1.running_var"]
    torch.testing.assert_close(found["1.running_mean"], means, rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(found["1.running_var"], variances, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("norm", ["bn", "sbn"])
@pytest.mark.parametrize("size", [1, 2, 5, 12, 13])
def test_pooled_statistics_are_those_of_all_values_whatever_the_batches(norm: str, size: int) -> None:
    """A last batch of one image, as 12 + 1, counts by its size."""
    model = net(norm)
    images = torch.cat([x for x, _ in some_batches()])
    batches = [(x, torch.zeros(len(x))) for x in images.split(size)]
    found, count = reestimate(model, batches, CPU, pooled=True)
    inputs = model[0](images).detach()
    assert count == len(batches)
    torch.testing.assert_close(found["1.running_mean"], inputs.mean((0, 2, 3)), rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(found["1.running_var"], inputs.var((0, 2, 3)), rtol=1e-13, atol=1e-14)


def test_pooled_statistics_of_later_layers_hardly_notice_a_small_last_batch() -> None:
    """With batches of 32 and 1 the mean over batches gives the last image half of the weight."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = two_norms()
        images = torch.randn(33, 2, 6, 6, dtype=torch.float64)

    def statistics(sizes: list[int], *, pooled: bool) -> Tensor:
        batches = [(x, torch.zeros(len(x))) for x in images.split(sizes)]
        found, _ = reestimate(model, batches, CPU, pooled=pooled)
        return torch.cat([found["4.running_mean"], found["4.running_var"]])

    whole = statistics([33], pooled=True)
    torch.testing.assert_close(whole, statistics([33], pooled=False), rtol=1e-12, atol=1e-14)
    pooled, mean = (float((statistics([32, 1], pooled=pooled) - whole).norm()) for pooled in (True, False))
    assert 0 < pooled < mean / 3


def test_in_a_deep_network_they_equal_torch_s_cumulative_mean() -> None:
    """Earlier layers normalise with the batch's own statistics, as in training."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build_model("resnet20", 3, input_shape=(2, 32, 32)).double()
    twin = copy.deepcopy(model).train()
    for module in twin.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None
    batches = some_batches()
    with torch.no_grad():
        for inputs, _ in batches:
            twin(inputs)
    found, _ = reestimate(model, batches, CPU)
    expected = {key: value for key, value in twin.state_dict().items() if "running" in key}
    assert set(found) == set(expected)
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-11, atol=1e-13)


class Twice(nn.Module):
    """One batch norm, passed twice and known by two names, and one that is never passed."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.BatchNorm2d(2, dtype=torch.float64)
        self.again = self.first
        self.unused = nn.BatchNorm2d(2, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.again(2 * self.first(x) + 1)
        return y


def test_a_layer_used_twice_has_the_mean_over_both_uses() -> None:
    batches = some_batches()
    found, _ = reestimate(Twice(), batches, CPU)
    assert set(found) == {f"{name}.running_{what}" for name in ("first", "again") for what in ("mean", "var")}
    means = [y.mean((0, 2, 3)) for x, _ in batches for y in (x, 2 * F.batch_norm(x, None, None, training=True) + 1)]
    for name in ("first", "again"):
        torch.testing.assert_close(found[f"{name}.running_mean"], torch.stack(means).mean(0), rtol=1e-12, atol=1e-14)


def snapshot(model: nn.Module) -> Any:
    state = {key: value.numpy().tobytes() for key, value in model.state_dict().items()}
    modes = [(m.training, getattr(m, "momentum", 0), getattr(m, "track_running_stats", 0)) for m in model.modules()]
    return state, modes, [len(module._forward_pre_hooks) for module in model.modules()]


@pytest.mark.parametrize("norm", ["bn", "sbn"])
@pytest.mark.parametrize("training", [True, False])
def test_reestimating_leaves_the_model_as_it_was(norm: str, training: bool) -> None:
    model = net(norm).train(training)
    model[1].train(not training)  # as a frozen batch norm is
    before = snapshot(model)
    reestimate(model, some_batches(), CPU)
    assert snapshot(model) == before
    with pytest.raises(RuntimeError):
        reestimate(model, [*some_batches(), (torch.zeros(2, 7, 4, 4, dtype=torch.float64), torch.zeros(2))], CPU)
    assert snapshot(model) == before, "also where a batch does not fit"


def test_no_batch_is_an_error() -> None:
    with pytest.raises(ValueError, match="no examples"):
        reestimate(net(), [], CPU)
