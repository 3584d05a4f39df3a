"""Metrics beside loss and accuracy, from a confusion matrix or from the logits of all examples.

A metric that a set of examples does not define, such as the AUC if all have one class, is left out of the results.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from logging import WARNING

import torch
from flwr.common import log
from torch import Tensor

from fedbn_flwr.data import IGNORED
from fedbn_flwr.errors import SettingsError, did_you_mean
from fedbn_flwr.messages import protocol

# A function of the logits [N, C, ...] and labels [N, ...] of all examples, on the CPU.
MetricFunction = Callable[[Tensor, Tensor], float]
Metric = str | MetricFunction


def confusion(logits: Tensor, targets: Tensor, *, ignored: int | None = IGNORED) -> Tensor:
    """The number of pixels by label (row) and predicted class (column), without those whose label is `ignored`.

    logits [N, C, ...], targets [N, ...]; the result is [C, C], and the sum over batches is the matrix of all.
    """
    classes = logits.shape[1]
    labels, predictions = targets.long().reshape(-1), logits.argmax(1).reshape(-1)
    if ignored is not None:
        labels, predictions = labels[labels != ignored], predictions[labels != ignored]
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        raise ValueError(
            f"labels of pixels run from {int(labels.min())} to {int(labels.max())}, the model has {classes} classes; "
            f"expected 0 to {classes - 1}, or {IGNORED} for pixels to leave out"
        )
    return torch.bincount(labels * classes + predictions, minlength=classes**2).view(classes, classes)


# For each class, the two numbers whose ratio is the metric: from the correct predictions, labels and predictions of it.
# Recall; F1, which is also the Dice coefficient; intersection over union.
_RATIOS: Mapping[str, Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "balanced_accuracy": lambda correct, labels, predictions: (correct, labels),
    "macro_f1": lambda correct, labels, predictions: (2 * correct, labels + predictions),
    "dice": lambda correct, labels, predictions: (2 * correct, labels + predictions),
    "mean_iou": lambda correct, labels, predictions: (correct, labels + predictions - correct),
}


def of_matrix(name: str, matrix: Tensor) -> float:
    """A metric of a confusion matrix, which is a mean over classes; a class without any of the whole is left out."""
    parts, wholes = _RATIOS[name](matrix.diag(), matrix.sum(1), matrix.sum(0))
    return float((parts.double() / wholes)[wholes > 0].mean())


def auc(logits: Tensor, targets: Tensor) -> float:
    """The mean over classes of the area under the ROC curve of the class against all others, by softmax.

    A class that no example has, or all, is left out.
    """
    scores, counts = logits.double().softmax(1), torch.bincount(targets, minlength=logits.shape[1])
    present = [label for label, count in enumerate(counts.tolist()) if 0 < count < len(targets)]
    areas = [_area(scores[targets == label, label], scores[targets != label, label]) for label in present]
    return sum(areas) / len(areas) if areas else math.nan


def _area(own: Tensor, others: Tensor) -> float:
    """The probability that an own score is above another one; equal scores count half (Mann and Whitney 1947)."""
    others = others.sort().values
    ranks = torch.searchsorted(others, own) + torch.searchsorted(others, own, right=True)
    return float(ranks.double().mean()) / (2 * len(others))


def name_of(metric: Metric) -> str:
    """The name of a metric, in snake case as in the history."""
    name = metric if isinstance(metric, str) else getattr(metric, "__name__", "")
    if isinstance(metric, str) and metric not in protocol.METRICS:
        raise SettingsError(f"metric {metric!r} is unknown; {did_you_mean(metric, protocol.METRICS)}, or a function")
    if not name.isidentifier():
        raise SettingsError(f"metric {metric!r} has no name to report it by; expected a function")
    return name


def key_of(metric: Metric) -> str:
    """Its key in messages."""
    return name_of(metric).replace("_", "-")


class Measurement:
    """The values of `metrics` over batches."""

    def __init__(self, metrics: Sequence[Metric]) -> None:
        self.metrics = {key_of(metric): metric for metric in metrics}
        self.matrix: Tensor = torch.tensor(0)
        self.batches: list[tuple[Tensor, Tensor]] = []

    def add(self, logits: Tensor, targets: Tensor, matrix: Tensor | None) -> None:
        """A batch, with its confusion matrix if that is known."""
        needs_matrix = [metric in _RATIOS for metric in self.metrics.values()]
        if any(needs_matrix):
            self.matrix = self.matrix + (confusion(logits, targets, ignored=None) if matrix is None else matrix)
        if not all(needs_matrix):
            self.batches.append((logits.cpu(), targets.cpu()))

    def values(self, *, strict: bool = False) -> dict[str, float]:
        """The values by their keys in messages, without those that are NaN.

        A function that fails is left out too, with a warning, since it may need examples of all classes, which this
        client does not have. With `strict` its error is raised.
        """
        found = {}
        for key, metric in self.metrics.items():
            try:
                if metric in _RATIOS:
                    found[key] = of_matrix(str(metric), self.matrix)
                else:
                    function = metric if callable(metric) else auc
                    found[key] = float(function(*map(torch.cat, zip(*self.batches, strict=True))))
            except Exception as error:
                if strict:
                    raise
                _warn_once(f"metric {key} is left out: {type(error).__name__}: {' '.join(str(error).split())[:200]}")
        return {key: value for key, value in found.items() if not math.isnan(value)}


@functools.lru_cache(maxsize=64)
def _warn_once(text: str) -> None:
    log(WARNING, "%s", text)
