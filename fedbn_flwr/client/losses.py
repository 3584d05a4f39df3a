"""The losses by name. Each is a mean over examples, so that the mean over a data set does not depend on its batches."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fedbn_flwr.data import IGNORED
from fedbn_flwr.errors import SettingsError
from fedbn_flwr.tasks import Task

from .training import Loss


def logits_of(outputs: Any) -> Any:
    """What the model returned, or its attribute `logits`, which the outputs of Hugging Face's models have."""
    return outputs if isinstance(outputs, Tensor) else getattr(outputs, "logits", outputs)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean cross entropy over examples or, for a segmentation model, over the pixels whose label is not 255.

    For examples, 255 is an ordinary class: ImageNet has a thousand.
    """
    logits = logits_of(logits)
    if logits.ndim <= 2:
        return F.cross_entropy(logits, targets)
    total = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
    return total / (targets != IGNORED).sum().clamp(min=1)  # all pixels of a crop may be ignored


class CrossEntropy:
    """The sum of weighted losses over a batch, divided by the number of examples (or of pixels that are not 255).

    torch.nn.CrossEntropyLoss divides by the sum of the examples' weights instead. Then the weights of a batch with
    one class have no effect, and the mean over a data set depends on how it is divided into batches; FedTAN and
    evaluation need a loss whose mean does not.
    """

    def __init__(self, label_smoothing: float = 0.0, class_weights: Tensor | None = None) -> None:
        self.label_smoothing = label_smoothing
        self.class_weights = class_weights

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        logits, weight = logits_of(logits), self.class_weights
        if weight is not None:
            weight = weight.to(logits.device, torch.promote_types(logits.dtype, torch.float32))
        dense = logits.ndim > 2
        total = F.cross_entropy(
            logits,
            targets,
            weight,
            ignore_index=IGNORED if dense else -100,
            reduction="sum",
            label_smoothing=self.label_smoothing,
        )
        return total / ((targets != IGNORED).sum().clamp(min=1) if dense else len(targets))


class BinaryCrossEntropy:
    """The mean cross entropy of one logit for each label, over examples and labels; weights are those of 0 and 1.

    For one label it is `CrossEntropy` of the logits (0, z).
    """

    def __init__(self, label_smoothing: float = 0.0, class_weights: Tensor | None = None) -> None:
        self.label_smoothing = label_smoothing
        self.class_weights = class_weights

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        logits, targets = aligned(logits, targets)
        yes = targets * (1 - self.label_smoothing) + self.label_smoothing / 2
        if self.class_weights is None:
            return F.binary_cross_entropy_with_logits(logits, yes)
        no_weight, yes_weight = self.class_weights.to(logits)
        losses: Tensor = yes_weight * yes * F.logsigmoid(logits) + no_weight * (1 - yes) * F.logsigmoid(-logits)
        return -losses.mean()


def mse(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.mse_loss(*aligned(outputs, targets))


def mae(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.l1_loss(*aligned(outputs, targets))


def huber(outputs: Tensor, targets: Tensor, delta: float = 1.0) -> Tensor:
    return F.huber_loss(*aligned(outputs, targets), delta=delta)


def aligned(outputs: Any, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs and targets in one shape and one type of float; a model with one output may return [N, 1] for [N].

    PyTorch's losses subtract [N] from [N, 1] to [N, N].
    """
    outputs = logits_of(outputs)
    if not fit(outputs, targets):
        raise ValueError(
            f"the model returned {list(outputs.shape)} for targets {list(targets.shape)}; expected a number for each "
            "target"
        )
    dtype = torch.promote_types(outputs.dtype, torch.float32)
    return outputs.reshape(targets.shape).to(dtype), targets.to(dtype)


def fit(outputs: Tensor, targets: Tensor) -> bool:
    """Whether there is an output for each target, up to a dimension of size one."""
    one_each = outputs.shape[:1].numel() == outputs.numel() == targets.numel() == targets.shape[:1].numel()
    return outputs.shape == targets.shape or one_each


_OTHERS = {"mse": mse, "mae": mae, "huber": huber}


def make_loss(name: str, label_smoothing: float = 0.0, class_weights: Tensor | None = None, **options: Any) -> Loss:
    """A loss by a name of `tasks.LOSSES`."""
    if name == "bce":
        return BinaryCrossEntropy(label_smoothing, class_weights)
    if name in _OTHERS:
        return partial(_OTHERS[name], **options) if options else _OTHERS[name]
    plain = not label_smoothing and class_weights is None
    return cross_entropy if plain else CrossEntropy(label_smoothing, class_weights)


def default_loss(task: Task | None) -> Loss:
    if task is None:
        return cross_entropy
    if not task.losses:
        raise SettingsError(f"task {task.name!r} ({task.targets}) has no loss; expected one of your own")
    return make_loss(task.losses[0])


def balanced_weights(labels: Tensor, classes: int) -> Tensor:
    """n / (K n_c) for each of the K classes among the n labels, so that the mean weight of the examples is one.

    Classes without an example have weight one, which matters only for label smoothing.
    """
    counts = torch.bincount(labels, minlength=classes)
    present = counts > 0
    weights = len(labels) / (present.sum() * counts.clamp(min=1).double())
    return torch.where(present, weights, 1.0)
