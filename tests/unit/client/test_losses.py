"""The losses by name, label smoothing and class weights, against PyTorch's sums."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sklearn.utils.class_weight import compute_class_weight
from torch import Tensor
from torch.nn import functional as F

from fedbn_flwr.client.losses import balanced_weights, cross_entropy, make_loss
from fedbn_flwr.data import IGNORED
from fedbn_flwr.errors import SettingsError
from fedbn_flwr.tasks import LOSSES

WEIGHTS = torch.tensor([0.5, 2.0, 1.0], dtype=torch.float64)


def batch(shape: tuple[int, ...] = ()) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(12, 3, *shape, generator=generator, dtype=torch.float64)
    return logits, torch.randint(0, 3, (12, *shape), generator=generator)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weights", [None, WEIGHTS])
@pytest.mark.parametrize("ignored", [0, 5])
def test_it_is_the_sum_of_weighted_losses_over_the_number_of_images(
    smoothing: float, weights: Tensor | None, ignored: int
) -> None:
    """Images with PyTorch's label -100 are in neither."""
    logits, labels = batch()
    labels[:ignored] = -100
    found = cross_entropy(logits, labels, smoothing, weights)
    total = F.cross_entropy(logits, labels, weights, label_smoothing=smoothing, reduction="sum")
    expected = total / (12 - ignored)
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize(
    ("outputs", "targets", "words"),
    [
        ({"out": torch.zeros(2, 3)}, torch.zeros(2, dtype=torch.int64), "the model returned a dict for .* as `logits`"),
        (torch.zeros(2, 3), torch.zeros(2), r"for targets \[2.*\] of torch.float32; .* class numbers"),
        (
            torch.zeros(2, 3, 4, 4), torch.zeros(2, 1, 8, 8, dtype=torch.int64),
            r"returned \[2, 3, 4, 4\] of .* for targets \[2, 8, 8\] of .* class numbers \[N, ...\] or \[N, 1, ...\]",
        ),
        (torch.zeros(2, 3), torch.zeros(2, 2, dtype=torch.int64), r"for targets \[2, 2\]"),
        (torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.int64), r"for targets \[2, 3\]"),
        (torch.zeros(2, 3, 4, 4), torch.zeros(2, 3, 4, 4), r"\[2, 3, 4, 4\] of torch.float32; .* set the task"),
        (torch.zeros(2, 3, 4), torch.zeros(2, 4), r"for targets \[2, 4\] of torch.float32"),
        # The cross entropy of one class is zero for any model.
        (torch.zeros(2, 1), torch.ones(2, 1), r'task="binary" for one logit, task="regression" for numbers'),
        (torch.zeros(2, 1), torch.zeros(2, dtype=torch.int64), r"two classes or more, .* task="),
        (torch.zeros(2), torch.ones(2), r"two classes or more, .* task="),
        (torch.zeros(2, 1, 4, 4), torch.zeros(2, 1, 4, 4, dtype=torch.int64), r"two classes or more, .* task="),
    ],
)  # fmt: skip
def test_what_it_cannot_compare_is_named(outputs: Any, targets: Tensor, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        cross_entropy(outputs, targets)
    assert cross_entropy(torch.zeros(2, 3), torch.full((2, 3), 1 / 3)) > 1  # probabilities of the classes


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_its_mean_does_not_depend_on_the_batches(smoothing: float) -> None:
    logits, labels = batch()
    loss = make_loss("cross_entropy", label_smoothing=smoothing, class_weights=WEIGHTS)
    parts = [float(loss(x, y)) * len(y) for x, y in zip(logits.split(5), labels.split(5), strict=True)]
    assert sum(parts) / 12 == pytest.approx(float(loss(logits, labels)), rel=1e-13)


def test_of_pixels_those_with_label_255_are_left_out() -> None:
    logits, labels = batch((2, 2))
    labels[:4] = IGNORED
    counted = labels[4:].flatten(), logits[4:].permute(0, 2, 3, 1).reshape(-1, 3)
    found = cross_entropy(logits, labels, 0.1, WEIGHTS)
    expected = F.cross_entropy(counted[1], counted[0], WEIGHTS, label_smoothing=0.1, reduction="sum") / len(counted[0])
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)
    plain = F.cross_entropy(counted[1], counted[0], reduction="sum") / len(counted[0])
    torch.testing.assert_close(cross_entropy(logits, labels), plain, rtol=1e-13, atol=0)


def test_weights_take_effect_in_a_batch_of_one_class_and_stay_exact_for_half_precision() -> None:
    logits, labels = batch()
    one = torch.ones(12, dtype=torch.long)
    torch.testing.assert_close(cross_entropy(logits, one, 0.0, WEIGHTS), 2 * F.cross_entropy(logits, one))
    weights = torch.tensor([1.001, 1.0, 1.0])
    with torch.autocast("cpu", torch.bfloat16):
        found = cross_entropy(logits.bfloat16(), labels, 0.0, weights)
    expected = cross_entropy(logits.bfloat16().float(), labels, 0.0, weights)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


def test_balanced_weights_are_scikit_learn_s_and_one_on_average() -> None:
    labels = torch.tensor([0] * 7 + [2] * 2 + [3])
    found = balanced_weights(labels, 5)
    present = torch.tensor([0, 2, 3])
    expected = compute_class_weight("balanced", classes=present.numpy(), y=labels.numpy())
    torch.testing.assert_close(found[present], torch.from_numpy(expected), rtol=1e-14, atol=0)
    assert found[labels].mean().item() == pytest.approx(1, rel=1e-14)
    assert found[1] == found[4] == 1, "classes without an image"


# --- of one logit for each label, and of numbers -----------------------------


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weights", [None, WEIGHTS[:2]])
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32])
def test_binary_cross_entropy_is_that_of_two_classes(
    smoothing: float, weights: Tensor | None, dtype: torch.dtype
) -> None:
    """z against the logits (0, z)."""
    z, labels = batch()[0][:, 0], batch()[1] % 2
    expected = cross_entropy(torch.stack([torch.zeros_like(z), z], 1), labels, smoothing, weights)
    for outputs in (z, z[:, None]):
        found = make_loss("bce", label_smoothing=smoothing, class_weights=weights)(outputs, labels.to(dtype))
        torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)
    assert make_loss("bce", label_smoothing=smoothing, class_weights=weights)(z * 1e3, labels.to(dtype)).isfinite()


NUMBERS = torch.randn(12, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
BY_HAND = {
    "bce": lambda x, y: y * torch.log1p(torch.exp(-x)) + (1 - y) * torch.log1p(torch.exp(x)),
    "mse": lambda x, y: (x - y) ** 2,
    "mae": lambda x, y: (x - y).abs(),
    "huber": lambda x, y: torch.where((x - y).abs() < 1, (x - y) ** 2 / 2, (x - y).abs() - 0.5),
}


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "cross_entropy"])
def test_losses_by_name_are_means_over_examples_whatever_the_batches(name: str) -> None:
    outputs, targets = batch()[0], (NUMBERS > 0).double() if name == "bce" else NUMBERS
    loss: Any = make_loss(name)
    expected = BY_HAND[name](outputs, targets).sum(1).mean() / 3
    torch.testing.assert_close(loss(outputs, targets), expected, rtol=1e-13, atol=0)
    parts = [float(loss(x, y)) * len(y) for x, y in zip(outputs.split(5), targets.split(5), strict=True)]
    assert sum(parts) / 12 == pytest.approx(float(expected), rel=1e-13)
    column = loss(outputs[:, :1], targets[:, 0]), loss(outputs[:, 0], targets[:, :1])
    assert column[0] == column[1] == loss(outputs[:, 0], targets[:, 0]), "never [N, 1] minus [N], which is [N, N]"
    assert loss(outputs.bfloat16(), targets).dtype == torch.float32
    if name == "huber":
        found = make_loss("huber", delta=0.25)(outputs, NUMBERS)
        torch.testing.assert_close(found, F.huber_loss(outputs, NUMBERS, delta=0.25), rtol=1e-14, atol=0)


@pytest.mark.parametrize(("outputs", "targets"), [((12, 3), (12,)), ((12, 3), (3, 12)), ((12, 1), (12, 3))])
def test_outputs_without_a_target_each_are_refused(outputs: tuple[int, ...], targets: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"returned \[.*\] of .* for targets \[.*\] of .*; expected a number for each"):
        make_loss("mse")(torch.zeros(outputs), torch.zeros(targets))
