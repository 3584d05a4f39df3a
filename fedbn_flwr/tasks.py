"""Tasks: what a model is trained for. A task decides the loss, the form of the outputs, and the metrics.

This module also says which metrics are better when lower, and which are shown in percent. The choice of the best round
and all reports follow it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from .errors import SettingsError, did_you_mean

# Metrics by name. The first line has those between 0 and 1, which are shown in percent.
SHARES = ("accuracy", "balanced_accuracy", "macro_f1", "auc", "dice", "mean_iou")
METRICS = (*SHARES, "rmse", "mae", "r2")
ROUNDING = 1e-6  # a mean of float32 may be above 1

_RANGES = {
    **dict.fromkeys(SHARES, (0, 1)),
    **dict.fromkeys(("rmse", "mae"), (0, math.inf)),
    "r2": (-math.inf, 1),
    **dict.fromkeys(("loss", "train_loss"), (-math.inf, math.inf)),
}
_OF_TEST_SET = re.compile("^(own|validation)(@[^-]*)?[-_]")

_TITLES = {"macro_f1": "macro F1", "auc": "AUC", "mean_iou": "mean IoU", "rmse": "RMSE", "mae": "MAE", "r2": "R²"}

# Words in the names of metrics that are better when lower, a user's `relative_error` included.
_LOWER = {"loss", "error", "mae", "mse", "rmse"}

# The losses by name, with their options. Label smoothing and class weights are separate settings.
LOSSES: Mapping[str, tuple[str, ...]] = {"cross_entropy": (), "bce": (), "mse": (), "mae": (), "huber": ("delta",)}


def title_of(name: str) -> str:
    """The name of a metric in words."""
    return _TITLES.get(name, name.replace("_", " "))


def is_lower_better(key: str) -> bool:
    """Whether lower values of a metric are better; `key` may also name models and examples: `clients_own_loss`."""
    return not _LOWER.isdisjoint(key.split("_"))


def range_of(key: str) -> tuple[float, float] | None:
    """The range of a metric in a reply, which may be about a test set: `accuracy`, `own-accuracy`, `own@sea-accuracy`.

    Without one it may be a percentage, as in Flower apps of other people. None if it is not a metric of this library,
    and may have any form.
    """
    name = _OF_TEST_SET.sub("", key)
    return (0, 100) if name == key in SHARES else _RANGES.get(name.replace("-", "_"))


def goodness(key: str, value: float) -> float:
    """A number that is higher for a better value, and the lowest of all for NaN."""
    return -math.inf if math.isnan(value) else -value if is_lower_better(key) else value


@dataclass(frozen=True)
class Task:
    name: str
    targets: str  # the targets in words
    form: Literal["classes", "labels", "numbers", ""]  # how outputs and targets are compared
    losses: tuple[str, ...]  # suitable losses; the first is the default
    reported: tuple[str, ...]  # metrics of an evaluation, along with the loss; the first one compares runs
    metrics: tuple[str, ...]  # suitable metrics, including `reported`
    options: tuple[str, ...] = ()  # settings of the loss: label_smoothing, class_weights

    def __reduce__(self) -> tuple[object, ...]:  # so that `is` also works after a copy from another process
        return task_named, (self.name,)

    @property
    def main(self) -> str:
        """The name of the metric that rounds and runs are compared by."""
        return self.reported[0] if self.reported else "loss"

    def outputs(self, count: int) -> int:
        """The number of a model's outputs for `count` classes, labels or numbers; a binary task needs one logit."""
        return 1 if self.name == "binary" else count


_BOTH = ("label_smoothing", "class_weights")
_OF_PIXELS = tuple(name for name in SHARES if name != "auc")  # AUC ranks examples, not pixels

CLASSIFICATION = Task(
    "classification", "one class per example", "classes", ("cross_entropy",), ("accuracy",), SHARES, _BOTH
)
SEGMENTATION = Task(
    "segmentation", "one class per pixel", "classes", ("cross_entropy",), ("mean_iou", "accuracy"), _OF_PIXELS, _BOTH
)
BINARY = Task("binary", "yes or no per example", "classes", ("bce",), ("accuracy",), SHARES, _BOTH)
MULTILABEL = Task(
    "multilabel", "several labels per example", "labels", ("bce",), ("macro_f1", "accuracy"), SHARES, _BOTH[:1]
)
REGRESSION = Task(
    "regression", "numbers", "numbers", ("mse", "mae", "huber"), ("rmse", "mae", "r2"), ("rmse", "mae", "r2")
)
# Targets of several kinds at once. The user provides their loss and metrics.
SEVERAL = Task("several", "several targets per example", "", (), (), ())

TASKS = {task.name: task for task in (CLASSIFICATION, BINARY, MULTILABEL, REGRESSION, SEGMENTATION, SEVERAL)}
MAINS = tuple(dict.fromkeys(task.main for task in TASKS.values()))


def task_named(name: str) -> Task:
    if name not in TASKS:
        raise SettingsError(f"task {name!r} is unknown; {did_you_mean(name, TASKS)}")
    return TASKS[name]
