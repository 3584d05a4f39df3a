"""Loss and metrics of a model on batches, from counts of predictions or from the outputs for all examples.

Metrics that are undefined on the examples, such as the AUC if all have one class, are left out of the results.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from fedbn_flwr.batch import Outputs, Targets, Value, count, map_batches, map_tensors
from fedbn_flwr.data import IGNORED
from fedbn_flwr.errors import SettingsError, did_you_mean, log_once
from fedbn_flwr.named import in_a_line
from fedbn_flwr.tasks import CLASSIFICATION, METRICS, SEGMENTATION, SEVERAL, Task

from .losses import aligned, form_of, logits_of, one_for_each, without_channel
from .rule import Batch, Loss

# A name, or a function of the model's outputs and the targets of all examples, on the CPU.
Metric = str | Callable[[Outputs, Targets], float]


def metric_inputs(task: Task, outputs: Outputs, targets: Value) -> tuple[Tensor, Tensor] | None:
    """Outputs and targets as the task's metrics need them; None if they have another form.

    For classes these are logits [N, C, ...] and class numbers [N, ...], which may be given as [N, 1, ...]. The one
    logit z of a binary task becomes (0, z). For labels and numbers both are [N, K].
    """
    outputs = logits_of(outputs)
    if not (isinstance(outputs, Tensor) and isinstance(targets, Tensor) and task.form):
        return None
    if task.form == "classes" and task.name != "binary":
        targets = without_channel(outputs, targets)
        of_classes = outputs.ndim >= 2 and outputs.shape[1] > 1 and not targets.is_floating_point()
        return (outputs, targets) if of_classes and targets.shape == outputs.shape[:1] + outputs.shape[2:] else None
    if not one_for_each(outputs, targets):
        return None
    outputs, targets = (tensor.reshape(len(tensor), -1) for tensor in aligned(outputs, targets))
    if task.name == "binary":
        if outputs.shape[1] != 1:  # a yes or no for each pixel has no metrics
            return None
        return torch.cat([torch.zeros_like(outputs), outputs], 1), targets[:, 0].long()
    return outputs, targets


# The outputs and targets that metrics need, in words, by the form of the task.
_NEEDED = {
    "classes": "logits [N, C, ...] of at least two classes, and whole numbers [N, ...] or [N, 1, ...]; in a binary "
    "task one logit and one target for each example",
    "labels": "a number for each target",
    "numbers": "a number for each target",
    "": "a task, such as binary, multilabel or regression, since targets that are not whole numbers do not show it",
}


# --- from counts ---

# Counts that can be added over batches: the number of predictions, the number of correct ones, and a tensor [3, C] with
# the correct predictions, the examples and the predictions of each class or label.
Counts = tuple[int, Tensor, Tensor]


def count_predictions(task: Task, outputs: Tensor, targets: Tensor, *, by_class: bool = True) -> Counts:
    """Count predictions as `metric_inputs` returns them, perhaps by class; pixels with the label 255 do not count."""
    if task.form == "labels":
        predicted, true = outputs > 0, targets > 0.5
        parts = torch.stack([(predicted & true).sum(0), true.sum(0), predicted.sum(0)])
        return true.numel(), ((predicted == true) & ~outputs.isnan()).sum(), parts
    classes, (highest, predicted) = outputs.shape[1], outputs.max(1)
    # `max` takes NaN for the highest value; such an example has no prediction.
    labels, predictions = targets.long().reshape(-1), predicted.where(~highest.isnan(), classes).reshape(-1)
    if outputs.ndim > 2:
        labels, predictions = labels[labels != IGNORED], predictions[labels != IGNORED]
    if (by_class or outputs.ndim > 2) and len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        raise ValueError(
            f"labels run from {int(labels.min())} to {int(labels.max())}, the model has {classes} classes; expected 0 "
            f"to {classes - 1}, or {IGNORED} for pixels to leave out"
        )
    hits = labels == predictions
    # Counting by class makes the host wait for a GPU.
    counted = (labels[hits], labels, predictions[predictions < classes]) if by_class else ()
    counts = [torch.bincount(part, minlength=classes) for part in counted]
    return len(labels), hits.sum(), torch.stack(counts) if by_class else torch.zeros(3, 0)


# Metrics that are a ratio for each class: recall, F1 (also called Dice) and intersection over union. The functions take
# the numbers of its correct predictions, of its examples and of its predictions; they return the ratio's two numbers.
_RATIOS: Mapping[str, Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "balanced_accuracy": lambda correct, labels, predictions: (correct, labels),
    "macro_f1": lambda correct, labels, predictions: (2 * correct, labels + predictions),
    "dice": lambda correct, labels, predictions: (2 * correct, labels + predictions),
    "mean_iou": lambda correct, labels, predictions: (correct, labels + predictions - correct),
}


def ratio(name: str, by_class: Tensor) -> float:
    """The mean of a metric's ratio over the classes or labels whose denominator is not zero."""
    parts, wholes = _RATIOS[name](*by_class)
    return float((parts.double() / wholes)[wholes > 0].mean())


# --- from the outputs for all examples ---


def auc(outputs: Tensor, targets: Tensor) -> float:
    """The mean area under the ROC curves of each class against all others (by softmax), or of each label.

    Classes and labels that no example has, or all have, are left out. With a score that is NaN, the area is NaN too.
    """
    if outputs.isnan().any():
        return math.nan
    scores, own = outputs.double(), targets > 0.5
    if targets.ndim == 1:
        scores, own = scores.softmax(1), targets[:, None] == torch.arange(outputs.shape[1])
    areas = [
        _area(scores[own[:, label], label], scores[~own[:, label], label])
        for label, count in enumerate(own.sum(0).tolist())
        if 0 < count < len(targets)
    ]
    return sum(areas) / len(areas) if areas else math.nan


def _area(own: Tensor, others: Tensor) -> float:
    """The probability that an own score is above another one; equal scores count half (Mann and Whitney 1947)."""
    others = others.sort().values
    ranks = torch.searchsorted(others, own) + torch.searchsorted(others, own, right=True)
    return float(ranks.double().mean()) / (2 * len(others))


def mae(outputs: Tensor, targets: Tensor) -> float:
    return float((outputs.double() - targets.double()).abs().mean())


def rmse(outputs: Tensor, targets: Tensor) -> float:
    """The root mean square error of each of an example's numbers, averaged over them."""
    return float((outputs.double() - targets.double()).square().mean(0).sqrt().mean())


def r2(outputs: Tensor, targets: Tensor) -> float:
    """The share of variance explained, averaged over an example's numbers; those without variance are left out."""
    outputs, targets = outputs.double(), targets.double()
    varies = targets.amax(0) > targets.amin(0)
    rest, whole = (targets - outputs).square().sum(0), (targets - targets.mean(0)).square().sum(0)
    return float((1 - rest / whole)[varies].mean())


_OF_ALL = {"auc": auc, "mae": mae, "rmse": rmse, "r2": r2}


# --- in an evaluation ---


def name_of(metric: Metric) -> str:
    """The name of a metric, in snake case as in the history."""
    # A functools.partial has the name of its function.
    name = str(getattr(getattr(metric, "func", metric), "__name__", metric))
    if not callable(metric) and metric not in METRICS:
        raise SettingsError(f"metric {metric!r} is unknown; {did_you_mean(metric, METRICS)}, or a function")
    if not name.isidentifier():
        raise SettingsError(f"metric {metric!r} has no name to report it by; expected a function that `def` defines")
    return name


def check_metrics(
    task: Task | None, metrics: Sequence[Metric], is_taken: Callable[[str], bool] = lambda name: False
) -> None:
    """Raise SettingsError if a metric is unknown or does not suit the task, or a function has another one's name."""
    for metric in metrics:
        name = name_of(metric)
        if callable(metric) and (name in (*METRICS, "loss", "num_examples", "partition_id") or is_taken(name)):
            raise SettingsError(
                f"a function is called {name!r}, and a run reports another metric under this name; rename the "
                f"function, for instance to my_{name}"
            )
        if task is not None and not callable(metric) and metric not in task.metrics:
            suited = f"any of {', '.join(task.metrics)}, or " if task.metrics else ""
            raise SettingsError(
                f"metric {metric!r} is not defined for {task.name} ({task.targets}); expected {suited}a function"
            )


class Measurement:
    """Computes the metrics of a task, and the given `metrics`, over batches."""

    def __init__(self, task: Task, metrics: Sequence[Metric]) -> None:
        self.task = task
        self.metrics: dict[str, Metric] = {  # by their keys in messages
            name_of(metric).replace("_", "-"): metric for metric in (*task.reported, *metrics)
        }
        self._named = [metric for metric in metrics if not callable(metric)]
        self._by_class = not _RATIOS.keys().isdisjoint(self.metrics.values())
        self._needs_all = any(callable(metric) or metric in _OF_ALL for metric in self.metrics.values())
        self._counts: list[Counts | None] = []
        self._examples: list[tuple[Outputs, Value]] = []

    def add(self, outputs: Outputs, targets: Value) -> Counts | None:
        """Add a batch, and return its counts, or None if its outputs and targets cannot be counted.

        Without counts the task's metrics are left out, and a metric that was asked for by name raises an error.
        """
        pair = metric_inputs(self.task, outputs, targets)
        if pair is None and self._named:
            raise SettingsError(
                f"metric {self._named[0]!r} cannot be computed: the model returned {form_of(logits_of(outputs))}, and "
                f"the targets are {form_of(targets)}; expected {_NEEDED[self.task.form]}; or give a function as metric"
            )
        countable = pair if self.task.form != "numbers" else None
        self._counts.append(countable and count_predictions(self.task, *countable, by_class=self._by_class))
        if self._needs_all:
            self._examples.append((_on_cpu(logits_of(outputs)), _on_cpu(targets)))
        return self._counts[-1]

    def values(self, *, strict: bool = False) -> dict[str, float]:
        """The values by their keys in messages, without those that are NaN.

        A function that fails is left out too, with a warning, since it may need examples of all classes, which this
        client does not have. With `strict` its error is raised.
        """
        values: dict[str, float] = {}
        examples = tuple(map(_concatenate, zip(*self._examples, strict=True)))
        for key, metric in self.metrics.items():
            try:
                values[key] = float(metric(*examples)) if callable(metric) else self._value_of(metric, examples)
            except Exception as error:
                if strict:
                    raise
                log_once(f"metric {key} is left out: {in_a_line(error)}")
        return {key: value for key, value in values.items() if not math.isnan(value)}

    def _value_of(self, name: str, examples: tuple[Outputs, ...]) -> float:
        if name in _OF_ALL:
            pair = metric_inputs(self.task, *examples)
            return math.nan if pair is None else _OF_ALL[name](*pair)
        if None in self._counts:  # a batch had outputs or targets of another form
            return math.nan
        answered, correct, by_class = (sum(parts) for parts in zip(*filter(None, self._counts), strict=True))
        if name == "accuracy":
            return int(correct) / answered if answered else math.nan
        if name == "balanced_accuracy" and self.task.form == "labels":  # "no" is a class, too
            true, yes, predicted = by_class
            examples = answered // max(1, len(yes))
            no = torch.stack([examples - yes - predicted + true, examples - yes, examples - predicted])
            by_class = torch.cat([by_class, no], 1)
        return ratio(name, by_class)


def _on_cpu(value: Outputs) -> Outputs:
    return tuple(map(_on_cpu, value)) if isinstance(value, list | tuple) else map_tensors(Tensor.cpu, value)


def _concatenate(parts: Sequence[Outputs]) -> Outputs:
    if isinstance(parts[0], tuple):
        return tuple(map(_concatenate, zip(*parts, strict=True)))
    if isinstance(parts[0], Mapping):
        return {key: _concatenate([part[key] for part in parts]) for key in parts[0]}
    return torch.cat(list(parts)).contiguous()  # a function may use `view`


# --- the evaluation ---

_FEW = 20  # examples whose logits may all lie between 0 and 1 by chance


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Iterable[Batch],
    loss_fn: Loss,
    device: torch.device,
    metrics: Sequence[Metric] = (),
    *,
    task: Task | None = None,
    threads: int = 1,
) -> dict[str, float | int]:
    """Evaluate the model: its `loss`, `num-examples`, the metrics of the task and the given `metrics`.

    Without a task, targets that are whole numbers mean classification or segmentation; with other targets only the loss
    and the user's functions are reported. For segmentation, with logits [N, C, H, W], the loss is a mean over the
    pixels whose label is not 255. Metrics that are undefined on the examples are left out. If outputs or targets have
    another form (a tuple, one logit), the task's metrics are left out too, and a name in `metrics` raises
    SettingsError. Each thread evaluates one batch at a time; the result does not depend on the number of threads.
    """
    batches = iter(batches)
    if (first := next(batches, None)) is None:
        raise ValueError("there are no examples to evaluate on")
    own = task or _task_from_targets(first[1])
    measurement = Measurement(own, metrics)

    @torch.no_grad()  # each thread has its own setting
    def outputs_of(model: nn.Module, batch: Batch) -> tuple[Outputs, Value]:
        inputs, targets = (map_tensors(lambda tensor: tensor.to(device), part) for part in batch)
        return model(inputs), targets

    was_training = model.training
    model.eval()
    total, numbers, examples = torch.zeros((), dtype=torch.float64, device=device), 0, 0
    are_shares = own.losses[:1] == ("bce",)
    try:
        for outputs, targets in map_batches(outputs_of, model, itertools.chain([first], batches), threads):
            counts = measurement.add(outputs, targets)
            are_shares = are_shares and is_share(logits_of(outputs))
            number = count(targets) if counts is None or own.form != "classes" else counts[0]
            if number:  # else the loss may be NaN, as PyTorch's mean over no pixel is
                total += loss_fn(outputs, targets).double() * number
            numbers, examples = numbers + number, examples + count(targets)
    finally:
        model.train(was_training)
    if not numbers:
        ignored = f"all pixels of the examples have the label {IGNORED}, which is left out"
        raise ValueError(ignored if examples else "there are no examples to evaluate on")
    if are_shares and examples > _FEW:
        log_once(
            f"all outputs of the model lie between 0 and 1, as if it ended in a sigmoid, and task {own.name!r} takes "
            "them for logits: if it does, remove the sigmoid, or give a loss of your own instead of the task"
        )
    return {"loss": float(total) / numbers, "num-examples": examples} | measurement.values()


def is_share(outputs: Outputs) -> bool:
    """Whether all of a model's outputs lie between 0 and 1."""
    return isinstance(outputs, Tensor) and bool(((outputs >= 0) & (outputs <= 1)).all())


def _task_from_targets(targets: Value) -> Task:
    if isinstance(targets, Mapping) or targets.is_floating_point() or targets.dtype is torch.bool:
        return SEVERAL
    return SEGMENTATION if targets.shape[1:].numel() > 1 else CLASSIFICATION
