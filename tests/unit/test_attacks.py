"""The attacks behind docs/privacy.md, on digits and tiny networks."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from benchmarks.attacks import identify, reconstruct
from benchmarks.attacks.features import (
    Batch,
    contributions,
    features,
    frozen_layers,
    layers_of,
    vector,
    weight_gradient,
)
from fedbn_flwr.data.load import load
from fedbn_flwr.data.source import Source


def digits(count: int) -> Batch:
    train = load(Source(name="digits")).train
    return train.inputs[:count].double() / 255 - 0.5, train.labels[:count]  # type: ignore[union-attr]


def network() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(),
        nn.Linear(144, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20, 10),
    ).double()  # fmt: skip
    for norm in (model[1], model[5]):
        nn.init.uniform_(norm.weight, 0.5, 2)
        nn.init.normal_(norm.bias)
    return model


def some(batch: Batch, rows: slice | Tensor) -> Batch:
    return batch[0][rows], batch[1][rows]


@pytest.mark.parametrize("gradients", [False, True], ids=["moments", "with gradients"])
def test_a_contribution_is_the_mean_of_one_vector_per_image(gradients: bool) -> None:
    """The vectors of a batch are computed from the agreements, one image at a time."""
    model, batch = network(), digits(40)
    agreed = contributions(model, batch)
    sent = contributions(model, some(batch, slice(10, 18)), agreed)
    rows = [
        features(
            model, layers_of(agreed), *(some(batch, slice(i, i + 1)) if gradients else (batch[0][i : i + 1], None))
        )
        for i in range(10, 18)
    ]
    torch.testing.assert_close(
        torch.cat(rows).mean(0), vector(layers_of(sent), gradients=gradients), rtol=1e-10, atol=1e-12
    )


def test_frozen_layers_give_the_gradient_of_a_frozen_model() -> None:
    model, batch = network(), digits(12)
    model(digits(60)[0])  # its running statistics
    twin = copy.deepcopy(model).eval()
    nn.functional.cross_entropy(twin(batch[0]), batch[1]).backward()
    expected = torch.cat([parameter.grad.flatten() for parameter in twin.parameters()])
    torch.testing.assert_close(weight_gradient(model, frozen_layers(model), *batch), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_the_image_of_a_batch_of_one_is_ranked_first(seed: int) -> None:
    model, batch = network(), digits(700)
    chosen = torch.randperm(200, generator=torch.Generator().manual_seed(seed))[:5]
    agreed = contributions(model, some(batch, chosen))  # a cohort of five clients with one image each
    layers = layers_of(agreed)
    sent = vector(layers_of(contributions(model, some(batch, chosen[:1]), agreed)), gradients=True)
    rows = features(model, layers, *batch).detach()
    scores = identify.scores(sent, 1, rows[:200], rows[200:])
    assert int(scores.argmax()) == int(chosen[0])
    member, others = scores[chosen[:1]], scores[torch.arange(200) != chosen[0]]
    assert identify.top_one(member, others) == identify.auc(member, others) == 1.0
    # The agreement of all five clients is about each of them, but less.
    of_all = identify.scores(vector(layers, gradients=True), 5, rows[:200], rows[200:])
    outside = of_all[~torch.isin(torch.arange(200), chosen)]
    assert 0.5 < identify.auc(of_all[chosen], outside) <= 1.0


def test_a_list_with_all_images_of_a_batch_gives_the_batch() -> None:
    model, batch = network(), digits(120)
    chosen = [3, 17, 40, 41, 99]
    agreed = contributions(model, batch)
    sent = vector(layers_of(contributions(model, some(batch, torch.tensor(chosen)), agreed)), gradients=True)
    assert identify.solve(sent, features(model, layers_of(agreed), *batch).detach(), 5) == set(chosen)


def test_images_are_reconstructed_from_the_statistics_of_one() -> None:
    """Closer to the image than the mean of public images, the guess without an attack."""
    model, (images, labels) = network(), digits(600)
    images = images + 0.5
    prior, true = reconstruct.Prior.of(images[100:]), images[:1]
    layers = layers_of(contributions(model, (images[:5], labels[:5])))
    goal = features(model, layers, true, None).mean(0)

    def distance(found: Tensor) -> Tensor:
        return (features(model, layers, found, None, graph=True).mean(0) - goal).square().mean() * 100

    found = reconstruct.invert(distance, prior, 1, steps=100, seed=0)
    mean = images[100:].mean(0, keepdim=True)
    assert float(reconstruct.psnr(found, true)) > float(reconstruct.psnr(mean, true)) + 1


def test_measures_of_reconstructed_images() -> None:
    images = torch.rand(6, 1, 12, 12, generator=torch.Generator().manual_seed(0))
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    torch.testing.assert_close(reconstruct.matched(images[order], images), images)
    assert reconstruct.psnr(images + 0.1, images).tolist() == pytest.approx([20.0] * 6, abs=1e-3)
    assert reconstruct.ssim(images, images).tolist() == pytest.approx([1.0] * 6, abs=1e-4)
    assert float(reconstruct.ssim(1 - images, images).max()) < 0
    assert torch.equal(reconstruct.nearest(images[:2] + 0.01, images), images[:2])
