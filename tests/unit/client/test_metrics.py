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
from fedbn_flwr.client.evaluation import Measurement, count_predictions, evaluate
from fedbn_flwr.client.losses import make_loss
from fedbn_flwr.data import IGNORED
from fedbn_flwr.errors import SettingsError
from fedbn_flwr.tasks import BINARY, CLASSIFICATION, MULTILABEL, REGRESSION, TASKS, Task

CPU = torch.device("cpu")


def examples(labels: tuple[int, ...], classes: int = 4, count: int = 60) -> tuple[Tensor, Tensor]:
    """Logits that are better than chance, and labels drawn from `labels`."""
    generator = torch.Generator().manual_seed(len(labels))
    targets = torch.tensor(labels)[torch.randint(0, len(labels), (count,), generator=generator)]
    logits = torch.randn(count, classes, generator=generator, dtype=torch.float64)
    return logits + F.one_hot(targets, classes), targets


# --- in an evaluation --------------------------------------------------------


class Given(nn.Module):
    """The inputs are the logits."""

    def forward(self, x: Tensor) -> Tensor:
        return x


def test_after_an_error_in_an_evaluation_the_model_is_in_its_mode_again() -> None:
    model = Given().train()
    with pytest.raises(ValueError, match="batch_size"):
        evaluate(model, [examples((0, 1)), (torch.ones(2, 4), torch.ones(3).long())], F.cross_entropy, CPU)
    assert model.training


def test_labels_that_are_no_class_of_the_model_are_named() -> None:
    with pytest.raises(ValueError, match="labels run from -1 to 3, the model has 3 classes; expected 0 to 2"):
        count_predictions(CLASSIFICATION, torch.zeros(3, 3), torch.tensor([-1, 0, 3]))


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


@pytest.mark.parametrize("classes", [2, 5])
def test_outputs_that_are_nan_are_no_answer(classes: int) -> None:
    of_labels = torch.full((8, classes), math.nan), torch.zeros(8, classes)
    assert evaluate(Given(), [of_labels], lambda x, y: x.mean(), CPU, task=MULTILABEL)["accuracy"] == 0
    of_label = torch.full((8, 1), math.nan), torch.zeros(8)
    assert evaluate(Given(), [of_label], lambda x, y: x.mean(), CPU, task=BINARY)["accuracy"] == 0
    logits, targets = torch.randn(60, classes, generator=torch.Generator().manual_seed(0)), torch.arange(60) % classes
    found = evaluate(Given(), [(logits * math.nan, targets)], F.cross_entropy, CPU, ["auc", "balanced_accuracy"])
    assert (found["accuracy"], found["balanced-accuracy"], "auc" in found) == (0, 0, False)
    logits[targets == 0] = math.nan
    found = evaluate(Given(), [(logits, targets)], F.cross_entropy, CPU, ["balanced_accuracy"])
    logits[targets == 0, 1:] = 0.0  # one NaN is enough
    hits = (logits.argmax(1) == targets)[targets > 0]
    assert found["accuracy"] == pytest.approx(int(hits.sum()) / 60, rel=1e-12)
    assert found["balanced-accuracy"] == pytest.approx(found["accuracy"], rel=1e-12), "as many of each class"


def test_a_pixel_whose_outputs_are_nan_is_no_hit() -> None:
    outputs, masks = torch.zeros(1, 3, 2, 2), torch.zeros(1, 2, 2, dtype=torch.int64)
    outputs[:, 0], outputs[0, 2, 0, 0], masks[0, 1, 1] = 1.0, math.nan, IGNORED
    found = evaluate(Given(), [(outputs, masks)], lambda x, y: x.nanmean(), CPU, ["mean_iou"])
    assert (found["accuracy"], found["mean-iou"]) == pytest.approx((2 / 3, 2 / 3))


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
        measurement = Measurement(CLASSIFICATION, [metric])
        measurement.add(*examples((0, 1)))
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


def called(name: str) -> Callable[[Tensor, Tensor], float]:
    def metric(logits: Tensor, labels: Tensor) -> float:
        return 0.0

    metric.__name__ = name
    return metric


# --- of other tasks ----------------------------------------------------------

# Outputs, targets and the loss of each, in float64; the numbers of a batch are not equal.
NOISE = torch.randn(60, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
LABELS = (NOISE.roll(1, 0) > torch.tensor([-0.5, 0.0, 1.2])).double()
NUMBERS = 1e6 + 3 * NOISE.roll(1, 0)  # far from zero, where sums of squares would cancel


def class_figures(logits: Tensor, y: Tensor) -> dict[str, float]:
    """Of the classes that are present; of AUC as the fraction of pairs in order, of which many may be equal."""
    predicted, scores, present, areas = logits.argmax(1), logits.softmax(1), y.unique(), []
    for label in present:
        positive, negative = scores[y == label, label], scores[y != label, label]
        above, equal = (positive[:, None] > negative).double(), (positive[:, None] == negative).double()
        areas.append(float((above + equal / 2).mean()))
    if len(present) == 2 == logits.shape[1]:
        assert np.mean(areas) == pytest.approx(theirs.roc_auc_score(y, scores[:, 1]), rel=1e-12)
    return {
        "accuracy": theirs.accuracy_score(y, predicted),
        "macro-f1": theirs.f1_score(y, predicted, average="macro"),
        "balanced-accuracy": theirs.recall_score(y, predicted, labels=present, average="macro"),
        "mean-iou": theirs.jaccard_score(y, predicted, average="macro"),
        "dice": theirs.f1_score(y, predicted, average="macro"),
        "auc": float(np.mean(areas)),
    }


def logit_figures(z: Tensor, y: Tensor) -> dict[str, float]:
    predicted = (z > 0).double()
    return {
        "accuracy": theirs.accuracy_score(y, predicted),
        "macro-f1": theirs.f1_score(y, predicted, average="macro"),
        "balanced-accuracy": theirs.balanced_accuracy_score(y, predicted),
        "mean-iou": theirs.jaccard_score(y, predicted, average="macro"),
        "dice": theirs.f1_score(y, predicted, average="macro"),
        "auc": theirs.roc_auc_score(y, z),
    }


def label_figures(z: Tensor, y: Tensor) -> dict[str, float]:
    predicted = (z > 0).double()
    return {
        "accuracy": np.mean([theirs.accuracy_score(y[:, k], predicted[:, k]) for k in range(3)]),
        "macro-f1": theirs.f1_score(y, predicted, average="macro"),
        "balanced-accuracy": np.mean([theirs.balanced_accuracy_score(y[:, k], predicted[:, k]) for k in range(3)]),
        "mean-iou": theirs.jaccard_score(y, predicted, average="macro"),
        "dice": theirs.f1_score(y, predicted, average="macro"),
        "auc": theirs.roc_auc_score(y, z, average="macro"),
    }


def number_figures(outputs: Tensor, y: Tensor) -> dict[str, float]:
    return {
        "rmse": theirs.root_mean_squared_error(y, outputs),
        "mae": theirs.mean_absolute_error(y, outputs),
        "r2": theirs.r2_score(y, outputs),
    }


# Four classes of four, those of clients that have two or three of them, and two of two.
CLASSES = [examples((0, 1, 2, 3)), examples((1, 3)), examples((0, 2, 3)), examples((0, 1), classes=2)]


@pytest.mark.parametrize("size", [1, 7, 60])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    ("task", "outputs", "targets", "expected"),
    [
        *((CLASSIFICATION, logits.round(decimals=n), y, class_figures) for logits, y in CLASSES for n in (9, 0)),
        (BINARY, NOISE[:, 0] + LABELS[:, 0], LABELS[:, 0], logit_figures),
        (BINARY, NOISE[:, :1] + LABELS[:, :1], LABELS[:, 0].bool(), logit_figures),
        (BINARY, NOISE[:, :1] + LABELS[:, :1], LABELS[:, 0].long(), logit_figures),
        (MULTILABEL, NOISE + LABELS, LABELS, label_figures),
        (MULTILABEL, NOISE + LABELS, LABELS.bool(), label_figures),
        (REGRESSION, NUMBERS + NOISE, NUMBERS, number_figures),
        (REGRESSION, NUMBERS[:, :1] + 1, NUMBERS[:, 0], number_figures),
    ],
)
def test_figures_are_scikit_learn_s_for_any_batches_and_threads(
    task: Task, outputs: Tensor, targets: Tensor, expected: Any, size: int, threads: int
) -> None:
    loss = make_loss(task.losses[0])
    batches = list(zip(outputs.split(size), targets.split(size), strict=True))
    found = evaluate(Given(), batches, loss, CPU, task.metrics, task=task, threads=threads)
    assert found.pop("num-examples") == 60
    assert found.pop("loss") == pytest.approx(float(loss(outputs, targets)), rel=1e-13)
    assert found == pytest.approx(expected(outputs, targets), rel=1e-12)
    whole = evaluate(Given(), [(outputs, targets)], loss, CPU, task.metrics, task=task)
    assert {key: whole[key] for key in found} == found, "to the last bit"


@pytest.mark.parametrize("own_loss", [False, True])
@pytest.mark.parametrize("shape", [(4, 3), (4,), ()])
def test_class_numbers_with_a_channel_of_their_own_are_those_without(shape: tuple[int, ...], own_loss: bool) -> None:
    """MONAI's masks are [N, 1, H, W], and MedMNIST's labels [N, 1]; a loss of the user gets them as they are."""

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        assert targets.shape == (6, 1, *shape)
        return F.cross_entropy(logits, targets[:, 0])

    logits = torch.randn(6, 3, *shape, generator=torch.Generator().manual_seed(0))
    masks = torch.arange(6 * math.prod(shape)).reshape(6, *shape) % 3
    plain = BNClient(Given(), [], [(logits, masks)], metrics=["dice"]).evaluate_round({}, {})
    batch = (logits, masks[:, None])
    for task in ("segmentation" if shape else "classification", None):
        client = BNClient(Given(), [], [batch], metrics=["dice"], task=task, loss=loss if own_loss else None)
        assert client.evaluate_round({}, {}) == pytest.approx(plain, rel=1e-6)
    if not shape:
        assert plain["dice"] == pytest.approx(theirs.f1_score(masks, logits.argmax(1), average="macro"), rel=1e-12)


PIXELS = torch.zeros(2, 4, 4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("task", "outputs", "targets", "words"),
    [
        (
            "segmentation", torch.zeros(2, 3, 4, 4), torch.zeros(2, 1, 4, 4),
            r"metric 'dice' cannot be computed: the model returned \[2, 3, 4, 4\] of torch.float32, and the targets "
            r"are \[2, 1, 4, 4\] of torch.float32; expected logits .* and whole numbers \[N, ...\] or \[N, 1, ...\]",
        ),
        ("segmentation", torch.zeros(2, 1, 4, 4), PIXELS, r"returned \[2, 1, 4, 4\].* at least two classes"),
        ("segmentation", (torch.zeros(2, 3, 4, 4),), PIXELS, "returned a tuple"),
        ("binary", torch.zeros(2, 1, 4, 4), torch.zeros(2, 1, 4, 4), "one logit and one target for each example"),
        ("multilabel", torch.zeros(2, 3), torch.zeros(2, 4), "a number for each target"),
        (None, torch.zeros(2), torch.zeros(2), "expected a task, such as binary"),
    ],
)  # fmt: skip
def test_a_named_metric_that_cannot_be_computed_is_an_error(
    task: str | None, outputs: Any, targets: Tensor, words: str
) -> None:
    class Fixed(nn.Module):
        def forward(self, inputs: Tensor) -> Any:
            return outputs

    def loss(outputs: Any, targets: Tensor) -> Tensor:
        return torch.zeros(())

    for metric in ("dice", "accuracy"):
        client = BNClient(Fixed(), [], [(targets, targets)], task=task, loss=loss, metrics=[metric])
        with pytest.raises(SettingsError, match=words.replace("dice", metric)):
            client.evaluate_round({}, {})
    without = BNClient(Fixed(), [], [(targets, targets)], task=task, loss=loss)
    assert without.evaluate_round({}, {}) == {"loss": 0, "num-examples": 2}, "no metric was asked for"


def test_without_metrics_a_task_has_its_own_figures() -> None:
    cases: dict[str, tuple[Tensor, Tensor]] = {
        "binary": (NOISE[:, 0], LABELS[:, 0]), "multilabel": (NOISE, LABELS), "regression": (NOISE, NUMBERS),
        "classification": (NOISE, torch.arange(60) % 3),
    }  # fmt: skip
    for name, batch in cases.items():
        found = evaluate(Given(), [batch], make_loss(TASKS[name].losses[0]), CPU, task=TASKS[name])
        assert found.keys() == {"loss", "num-examples", *(each.replace("_", "-") for each in TASKS[name].reported)}


def test_what_is_not_defined_is_left_out() -> None:
    """A label that all examples have has no AUC, equal targets have no variance."""
    labels = LABELS.clone()
    labels[:, 0] = 1
    found = evaluate(Given(), [(NOISE, labels)], make_loss("bce"), CPU, ["auc"], task=MULTILABEL)
    assert found["auc"] == pytest.approx(theirs.roc_auc_score(labels[:, 1:], NOISE[:, 1:], average="macro"), rel=1e-12)
    numbers = NUMBERS.clone()
    numbers[:, 0] = 0.1
    found = evaluate(Given(), [(NUMBERS + NOISE, numbers)], make_loss("mse"), CPU, task=REGRESSION)
    expected = theirs.r2_score(numbers[:, 1:], (NUMBERS + NOISE)[:, 1:])
    assert found["r2"] == pytest.approx(expected, rel=1e-12)
    found = evaluate(Given(), [(NOISE[:1], NUMBERS[:1])], make_loss("mse"), CPU, task=REGRESSION)
    assert found.keys() == {"loss", "num-examples", "rmse", "mae"}, "one example has no variance"


def test_several_targets_have_the_user_s_figures_only() -> None:
    class Two(nn.Module):
        def forward(self, x: dict[str, Tensor]) -> dict[str, Tensor]:
            return {"age": x["a"], "kind": x["b"]}

    def loss(outputs: dict[str, Tensor], targets: dict[str, Tensor]) -> Tensor:
        return F.mse_loss(outputs["age"], targets["age"]) + F.cross_entropy(outputs["kind"], targets["kind"])

    def age_error(outputs: dict[str, Tensor], targets: dict[str, Tensor]) -> float:
        return float((outputs["age"] - targets["age"]).abs().mean())

    inputs = {"a": NOISE[:, 0], "b": NOISE}
    targets = {"age": NUMBERS[:, 0], "kind": torch.arange(60) % 3}
    parts = [({k: v[rows] for k, v in inputs.items()}, {k: v[rows] for k, v in targets.items()})
             for rows in (slice(0, 50), slice(50, 60))]  # fmt: skip
    found = evaluate(Two(), parts, loss, CPU, [age_error])  # type: ignore[arg-type]
    assert found == {
        "loss": pytest.approx(float(loss(Two()(inputs), targets)), rel=1e-13),
        "num-examples": 60,
        "age-error": pytest.approx(age_error(Two()(inputs), targets), rel=1e-13),
    }
    client = BNClient(Two(), parts, parts, task="several", loss=loss, metrics=[age_error])  # type: ignore[arg-type]
    assert client.evaluate_round({}, {}) == found


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"metrics": ["f1"]}, "metric 'f1' is unknown; did you mean 'macro_f1'"),
        ({"metrics": ["macro f1"]}, "did you mean 'macro_f1'"),
        ({"metrics": [lambda logits, labels: 0.0]}, "has no name to report it by"),
        *(
            ({"metrics": [called(name)]}, f"a function is called '{name}'.* to my_{name}")
            for name in ("loss", "num_examples", "auc")
        ),
        (
            {"task": "regression", "metrics": ["auc"]},
            r"metric 'auc' is not defined for regression \(numbers\); expected any of rmse, mae, r2, or a",
        ),
        (
            {"task": "segmentation", "metrics": ["auc"]},
            "is not defined for segmentation .* expected any of accuracy, balanced_accuracy, macro_f1",
        ),
        ({"task": "classification", "metrics": ["rmse"]}, "metric 'rmse' is not defined for classification"),
        (
            {"task": "several", "metrics": ["accuracy"], "loss": F.mse_loss},
            r"is not defined for several \(several targets per example\); expected a function",
        ),
        ({"task": "several"}, r"task 'several' .* has no loss; expected one of your own"),
        ({"task": "clasification"}, "task 'clasification' is unknown; did you mean 'classification'"),
    ],
)
def test_a_client_refuses_a_metric_that_is_unknown_or_does_not_suit_its_task(
    options: dict[str, Any], words: str
) -> None:
    with pytest.raises(SettingsError, match=words):
        BNClient(Given(), [], **options)


def test_a_client_reports_metrics_for_each_of_its_sets() -> None:
    batch, one_class = examples((0, 1, 2, 3)), examples((2,))
    client = BNClient(nn.Sequential(Given()), [batch], {"": [batch], "own": [one_class]}, metrics=["auc", "macro_f1"])
    metrics = client.evaluate_round({}, {})
    assert {"auc", "macro-f1", "own-macro-f1"} < set(metrics)
    assert "own-auc" not in metrics
