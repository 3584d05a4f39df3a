"""Metrics beside loss and accuracy, from a confusion matrix or from the logits of all examples.

A metric that a set of examples does not define, such as the AUC of images of one class, is left out of the results.
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


def balanced_accuracy(matrix: Tensor) -> float:
    """The mean over classes of recall; a class without labels is left out."""
    return _mean(matrix.diag(), matrix.sum(1))


def macro_f1(matrix: Tensor) -> float:
    """The mean over classes of F1, 2 TP / (labels + predictions), which is also the Dice coefficient.

    A class that appears neither in the labels nor in the predictions is left out.
    """
    return _mean(2 * matrix.diag(), matrix.sum(0) + matrix.sum(1))


def mean_iou(matrix: Tensor) -> float:
    """The mean over classes of intersection over union.

    A class that appears neither in the labels nor in the predictions is left out.
    """
    return _mean(matrix.diag(), matrix.sum(0) + matrix.sum(1) - matrix.diag())


def _mean(parts: Tensor, wholes: Tensor) -> float:
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


_OF_MATRIX: Mapping[str, Callable[[Tensor], float]] = {
    "balanced_accuracy": balanced_accuracy,
    "macro_f1": macro_f1,
    "dice": macro_f1,
    "mean_iou": mean_iou,
}


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
        self.of_matrix = {key_of(m): _OF_MATRIX[m] for m in metrics if isinstance(m, str) and m in _OF_MATRIX}
        self.of_logits = {key_of(m): m if callable(m) else auc for m in metrics if m not in _OF_MATRIX}
        self.matrices: list[Tensor] = []
        self.logits: list[Tensor] = []
        self.targets: list[Tensor] = []

    def add(self, logits: Tensor, targets: Tensor, matrix: Tensor | None) -> None:
        """A batch, with its confusion matrix if that is known."""
        if self.of_matrix:
            self.matrices.append(confusion(logits, targets, ignored=None) if matrix is None else matrix)
        if self.of_logits:
            self.logits.append(logits.cpu())
            self.targets.append(targets.cpu())

    def values(self, *, strict: bool = False) -> dict[str, float]:
        """The values by their keys in messages, without those that are NaN.

        A function that fails is left out too, with a warning, since it may need examples of all classes, which this
        client does not have. With `strict` its error is raised.
        """
        found = {key: function(sum(self.matrices, start=torch.tensor(0))) for key, function in self.of_matrix.items()}
        for key, metric in self.of_logits.items():
            try:
                found[key] = _number(key, metric(torch.cat(self.logits), torch.cat(self.targets)))
            except Exception as error:
                if strict:
                    raise
                _warn_once(f"metric {key} is left out: {type(error).__name__}: {' '.join(str(error).split())[:200]}")
        return {key: value for key, value in found.items() if not math.isnan(value)}


def _number(key: str, value: object) -> float:
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise SettingsError(f"metric {key} returned a {type(value).__name__}; expected a number") from None


@functools.lru_cache(maxsize=64)
def _warn_once(text: str) -> None:
    log(WARNING, "%s", text)
