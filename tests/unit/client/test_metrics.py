"""Metrics against scikit-learn's, and what a set of examples does not define."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import sklearn.metrics as theirs
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedbn_flwr import BNClient
from fedbn_flwr.client.evaluation import evaluate
from fedbn_flwr.client.metrics import Measurement, Metric, auc, confusion, of_matrix
from fedbn_flwr.data import IGNORED
from fedbn_flwr.errors import SettingsError

CPU = torch.device("cpu")
ALL: list[Metric] = ["balanced_accuracy", "macro_f1", "auc", "dice", "mean_iou"]


def examples(labels: tuple[int, ...], classes: int = 4, count: int = 60) -> tuple[Tensor, Tensor]:
    """Logits that are better than chance, and labels drawn from `labels`."""
    generator = torch.Generator().manual_seed(len(labels))
    targets = torch.tensor(labels)[torch.randint(0, len(labels), (count,), generator=generator)]
    logits = torch.randn(count, classes, generator=generator, dtype=torch.float64)
    return logits + F.one_hot(targets, classes), targets


# Four classes of four, and of a client that has two or three of them.
SETS = [(0, 1, 2, 3), (1, 3), (0, 2, 3)]


@pytest.mark.parametrize("labels", SETS)
def test_metrics_of_the_confusion_matrix_are_scikit_learn_s(labels: tuple[int, ...]) -> None:
    logits, targets = examples(labels)
    predictions = logits.argmax(1)
    matrix = confusion(logits, targets, ignored=None)
    np.testing.assert_array_equal(matrix, theirs.confusion_matrix(targets, predictions, labels=range(4)))
    assert of_matrix("macro_f1", matrix) == pytest.approx(
        theirs.f1_score(targets, predictions, average="macro"), rel=1e-12
    )
    assert of_matrix("mean_iou", matrix) == pytest.approx(
        theirs.jaccard_score(targets, predictions, average="macro"), rel=1e-12
    )
    recall = theirs.recall_score(targets, predictions, labels=list(labels), average="macro")
    assert of_matrix("balanced_accuracy", matrix) == pytest.approx(recall, rel=1e-12)


@pytest.mark.parametrize("labels", SETS)
@pytest.mark.parametrize("digits", [3, 0])
def test_auc_is_the_fraction_of_pairs_in_order_over_the_classes_that_are_present(
    labels: tuple[int, ...], digits: int
) -> None:
    """With logits rounded to whole numbers, many scores are equal."""
    logits, targets = examples(labels)
    logits = logits.round(decimals=digits)
    scores = logits.softmax(1)
    areas = []
    for label in labels:
        positive, negative = scores[targets == label, label], scores[targets != label, label]
        above, equal = (positive[:, None] > negative).double(), (positive[:, None] == negative).double()
        areas.append(float((above + equal / 2).mean()))
    assert auc(logits, targets) == pytest.approx(float(np.mean(areas)), rel=1e-12)


def test_of_two_classes_auc_is_that_of_either() -> None:
    logits, targets = examples((0, 1), classes=2)
    expected = theirs.roc_auc_score(targets, logits.softmax(1)[:, 1])
    assert auc(logits, targets) == pytest.approx(expected, rel=1e-12)


# --- in an evaluation --------------------------------------------------------


class Given(nn.Module):
    """The inputs are the logits."""

    def forward(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize("size", [7, 60])
def test_an_evaluation_reports_them_over_all_batches(size: int) -> None:
    logits, targets = examples((0, 1, 2, 3))
    batches = list(zip(logits.split(size), targets.split(size), strict=True))
    found = evaluate(Given(), batches, F.cross_entropy, CPU, ALL)
    matrix = confusion(logits, targets, ignored=None)
    assert found["macro-f1"] == found["dice"] == pytest.approx(of_matrix("macro_f1", matrix), rel=1e-12)
    assert found["balanced-accuracy"] == pytest.approx(of_matrix("balanced_accuracy", matrix), rel=1e-12)
    assert found["mean-iou"] == pytest.approx(of_matrix("mean_iou", matrix), rel=1e-12)
    assert found["auc"] == pytest.approx(auc(logits, targets), rel=1e-12)
    assert set(found) == {
        "loss",
        "accuracy",
        "num-examples",
        "balanced-accuracy",
        "macro-f1",
        "auc",
        "dice",
        "mean-iou",
    }


def test_label_255_of_an_image_is_a_class_and_of_a_pixel_none() -> None:
    logits = torch.randn(300, 300, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(300)
    found = evaluate(Given(), [(logits, labels)], F.cross_entropy, CPU, ["balanced_accuracy"])
    assert found["balanced-accuracy"] == found["accuracy"], "one image of each class"
    pixels = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    masks = torch.randint(0, 3, (2, 4, 4), generator=torch.Generator().manual_seed(1))
    masks[0] = IGNORED
    found = evaluate(Given(), [(pixels, masks)], lambda x, y: x.mean(), CPU, ["dice", "balanced_accuracy"])
    flat, counted = pixels.argmax(1)[1].flatten(), masks[1].flatten()
    assert found["dice"] == pytest.approx(theirs.f1_score(counted, flat, average="macro"), rel=1e-12)
    assert found["balanced-accuracy"] == pytest.approx(theirs.balanced_accuracy_score(counted, flat), rel=1e-12)


def test_the_auc_of_one_class_is_left_out() -> None:
    logits, targets = examples((2,))
    found = evaluate(Given(), [(logits, targets)], F.cross_entropy, CPU, ["auc", "balanced_accuracy"])
    assert "auc" not in found
    assert found["balanced-accuracy"] == found["accuracy"]


# --- of the user -------------------------------------------------------------


def top_2(logits: Tensor, labels: Tensor) -> float:
    hits: Tensor = (logits.topk(2, dim=1).indices == labels[:, None]).any(1)
    return float(hits.double().mean())


def undefined(logits: Tensor, labels: Tensor) -> float:
    return math.nan


def listed(logits: Tensor, labels: Tensor) -> list[float]:
    return [0.0]


def test_a_function_is_given_all_examples_and_reported_by_its_name() -> None:
    logits, targets = examples((0, 1, 2, 3))
    batches = list(zip(logits.split(7), targets.split(7), strict=True))
    found = evaluate(Given(), batches, F.cross_entropy, CPU, [top_2, undefined])
    assert found["top-2"] == top_2(logits, targets)
    assert "undefined" not in found, "NaN is left out"


def failing(logits: Tensor, labels: Tensor) -> float:
    raise ValueError("it needs examples of all classes")


def test_a_function_that_fails_is_left_out_and_named(flower_log: Any) -> None:
    metrics: Any = [listed, failing, top_2]
    found = evaluate(Given(), [examples((0, 1))], F.cross_entropy, CPU, metrics)
    assert found.keys() == {"loss", "accuracy", "num-examples", "top-2"}
    logged = [record.getMessage() for record in flower_log.records]
    assert (
        "metric listed is left out: TypeError: float() argument must be a string or a real number, not 'list'" in logged
    )
    assert "metric failing is left out: ValueError: it needs examples of all classes" in logged
    for metric in metrics[:2]:
        measurement = Measurement([metric])
        measurement.add(*examples((0, 1)), None)
        with pytest.raises((TypeError, ValueError), match=r"not 'list'|all classes"):
            measurement.values(strict=True)


@pytest.mark.parametrize(
    ("outputs", "targets"),
    [
        (torch.zeros(4, 1), torch.tensor([[0.0], [1.0], [1.0], [1.0]])),  # one logit
        (torch.zeros(4), torch.zeros(4)),
        (torch.zeros(4, 3), torch.ones(4, 3)),  # several labels
        (torch.zeros(4, 3), torch.ones(4, 3, dtype=torch.int64)),
        ({"logits": torch.zeros(4, 3)}, torch.zeros(4, dtype=torch.int64)),
    ],
    ids=["one logit", "a number", "several labels", "several integer labels", "a dict"],
)
def test_without_classes_there_is_a_loss_and_no_accuracy(outputs: Any, targets: Tensor) -> None:
    def loss(found: Any, given: Tensor) -> Tensor:
        assert found is outputs
        return given.double().mean() + 1

    class Fixed(nn.Module):
        def forward(self, inputs: Tensor) -> Any:
            return outputs

    batch = (torch.zeros(4, 2), targets)
    found = evaluate(Fixed(), [batch, batch], loss, CPU)
    assert found == {"loss": float(targets.double().mean()) + 1, "num-examples": 8}


@pytest.mark.parametrize(
    ("metric", "words"),
    [
        ("f1", "metric 'f1' is unknown; known: auc, balanced_accuracy, dice, macro_f1, mean_iou, or a function"),
        ("macro f1", "did you mean 'macro_f1'"),
        (lambda logits, labels: 0.0, "has no name to report it by"),
    ],
)
def test_a_client_refuses_an_unknown_metric(metric: str | Callable[[Tensor, Tensor], float], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        BNClient(Given(), [], metrics=[metric])


def test_a_client_reports_metrics_for_each_of_its_sets() -> None:
    batch, one_class = examples((0, 1, 2, 3)), examples((2,))
    client = BNClient(nn.Sequential(Given()), [batch], {"": [batch], "own": [one_class]}, metrics=["auc", "macro_f1"])
    metrics = client.evaluate_round({}, {})
    assert {"auc", "macro-f1", "own-macro-f1"} < set(metrics)
    assert "own-auc" not in metrics
