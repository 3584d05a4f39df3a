"""Segmentation models: their loss, and mean intersection over union."""

from __future__ import annotations

import copy
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedbn_flwr import BNClient
from fedbn_flwr.client.evaluation import count_predictions, evaluate, ratio
from fedbn_flwr.client.losses import cross_entropy
from fedbn_flwr.tasks import SEGMENTATION
from tests.support.federations import near
from tests.support.twins import sgd

CPU = torch.device("cpu")
IGNORED = 255


def logits_for(classes: Tensor, count: int) -> Tensor:
    """Logits [N, C, H, W] whose largest is that of the given class."""
    return F.one_hot(classes, count).movedim(-1, 1).float()


# --- mean IoU ----------------------------------------------------------------


def test_mean_iou_by_hand() -> None:
    """Class 0: 2 of 3 pixels. Class 1: 1 of 2. Class 2: 1 of 1. The pixel labelled 255 does not count."""
    labels = torch.tensor([[[0, 0, 1], [1, 2, 255]]])
    predictions = torch.tensor([[[0, 0, 1], [0, 2, 2]]])
    answered, correct, by_class = count_predictions(SEGMENTATION, logits_for(predictions, 3), labels)
    assert (answered, int(correct), by_class.tolist()) == (5, 4, [[2, 1, 1], [2, 2, 1], [3, 1, 1]])
    assert ratio("mean_iou", by_class) == pytest.approx((2 / 3 + 1 / 2 + 1) / 3)


def test_an_absent_class_is_left_out_and_a_predicted_one_is_zero() -> None:
    labels, predictions = torch.tensor([[[0, 0]]]), torch.tensor([[[0, 0]]])
    assert ratio("mean_iou", count_predictions(SEGMENTATION, logits_for(predictions, 4), labels)[2]) == 1.0
    predictions = torch.tensor([[[0, 3]]])
    assert ratio("mean_iou", count_predictions(SEGMENTATION, logits_for(predictions, 4), labels)[2]) == pytest.approx(
        (1 / 2 + 0) / 2
    )


def by_loops(labels: np.ndarray, predictions: np.ndarray, classes: int) -> float:
    found = []
    for c in range(classes):
        intersection = union = 0
        for label, prediction in zip(labels.flat, predictions.flat, strict=True):
            if label == IGNORED:
                continue
            intersection += int(label == c and prediction == c)
            union += int(label == c or prediction == c)
        if union:
            found.append(intersection / union)
    return float(np.mean(found))


class Pixels(nn.Module):
    """A 1x1 convolution with batch norm: logits of each pixel."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, classes, 1)
        self.bn = nn.BatchNorm2d(classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.conv(x))


def batches(sizes: tuple[int, ...], classes: int) -> list[tuple[Tensor, Tensor]]:
    found = []
    for size in sizes:
        labels = torch.randint(0, classes, (size, 5, 4))
        labels[torch.rand(labels.shape) < 0.2] = IGNORED
        found.append((torch.randn(size, 2, 5, 4, dtype=torch.float64), labels))
    return found


def test_evaluation_of_pixels_equals_loops_over_the_whole_set() -> None:
    """Not the mean of the batches' figures: they hold different classes, and pixels that do not count."""
    model = Pixels(4).double()
    data = batches((3, 1, 2), classes=4)
    found = evaluate(model, data, cross_entropy, CPU)
    model.eval()
    logits = torch.cat([model(inputs) for inputs, _ in data]).detach().numpy()
    labels = torch.cat([targets for _, targets in data]).numpy()
    counts = labels != IGNORED
    log = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    losses = [-log[n, labels[n, i, j], i, j] for n, i, j in zip(*np.nonzero(counts), strict=True)]
    assert found["mean-iou"] == pytest.approx(by_loops(labels, logits.argmax(1), 4), rel=1e-12)
    assert found["accuracy"] == pytest.approx((logits.argmax(1) == labels)[counts].mean(), rel=1e-12)
    assert found["loss"] == pytest.approx(np.mean(losses), rel=1e-12)
    assert found["num-examples"] == 6
    per_batch = [evaluate(model, [batch], cross_entropy, CPU)["mean-iou"] for batch in data]
    assert found["mean-iou"] != pytest.approx(np.mean(per_batch), rel=1e-3)


def test_classification_has_no_mean_iou() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    found = evaluate(model, [(torch.zeros(2, 1, 2, 2), torch.tensor([0, 1]))], cross_entropy, CPU)
    assert set(found) == {"loss", "accuracy", "num-examples"}


@pytest.mark.parametrize("wrong", [4, 254, -1])
def test_a_label_that_is_no_class_is_refused(wrong: int) -> None:
    labels = torch.zeros(1, 2, 2, dtype=torch.int64)
    labels[0, 0, 0] = wrong
    with pytest.raises(ValueError, match=rf"run from {min(wrong, 0)} to {max(wrong, 0)}, the model has 4 classes"):
        count_predictions(SEGMENTATION, torch.zeros(1, 4, 2, 2), labels)


def test_a_set_without_a_pixel_that_counts_is_refused() -> None:
    labels = torch.full((1, 5, 4), IGNORED)
    with pytest.raises(ValueError, match="all pixels of the examples have the label 255"):
        evaluate(Pixels(4), [(torch.zeros(1, 2, 5, 4), labels)], cross_entropy, CPU)


# --- the loss ----------------------------------------------------------------


def test_a_crop_without_a_pixel_that_counts_has_no_loss_and_no_gradient() -> None:
    logits = torch.randn(1, 3, 2, 2, requires_grad=True)
    loss = cross_entropy(logits, torch.full((1, 2, 2), IGNORED))
    loss.backward()
    assert loss.item() == 0
    assert not logits.grad.any()


def test_label_255_of_an_image_is_a_class_like_the_others() -> None:
    logits, labels = torch.randn(4, 1_000), torch.tensor([255, 3, 255, 999])
    assert cross_entropy(logits, labels).equal(F.cross_entropy(logits, labels))


def test_a_client_trains_and_evaluates_a_model_of_pixels() -> None:
    data = batches((3, 2), classes=2)
    model = Pixels(2).double()
    client = BNClient(copy.deepcopy(model), data, data, lr=0.5, epochs=5)
    update = client.train_round({key: value.numpy() for key, value in model.state_dict().items()}, {})
    expected = sgd(model, data * 5, partial(F.cross_entropy, ignore_index=IGNORED), lr=0.5)
    near(update.arrays, expected, rtol=1e-10, atol=1e-12)
    metrics = client.evaluate_round(update.arrays, {})
    assert metrics == pytest.approx(evaluate(model, data, cross_entropy, CPU), rel=1e-10)
