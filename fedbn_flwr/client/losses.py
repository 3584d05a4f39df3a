"""The losses by name. Each is a mean over examples, so that the mean over a data set does not depend on its batches."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from fedbn_flwr.batch import Outputs
from fedbn_flwr.data import IGNORED
from fedbn_flwr.errors import SettingsError
from fedbn_flwr.tasks import Task

from .rule import Loss


def logits_of(outputs: Outputs) -> Outputs:
    """What the model returned or, as with Hugging Face's models, its attribute `logits`."""
    return getattr(outputs, "logits", outputs)


def form_of(value: object) -> str:
    return f"{list(value.shape)} of {value.dtype}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def cross_entropy(
    logits: Tensor, targets: Tensor, label_smoothing: float = 0.0, class_weights: Tensor | None = None
) -> Tensor:
    """The sum of (weighted) losses over a batch, divided by the number of examples.

    Examples with the label -100 don't count, as in PyTorch. For a segmentation model it is divided by the number of
    pixels whose label is not 255. In classification 255 is an ordinary class, since ImageNet has a thousand. Class
    numbers may have a channel of their own, [N, 1, ...].

    torch.nn.CrossEntropyLoss divides by the sum of the examples' weights instead. Then the weights of a batch with one
    class have no effect, and the mean over a data set depends on how it is divided into batches; FedTAN and evaluation
    need a loss whose mean does not.
    """
    logits, weight = logits_of(logits), class_weights
    fits = isinstance(logits, Tensor) and logits.ndim > 1 and logits.shape[1] > 1  # of one class it would be zero
    if fits and targets.is_floating_point():  # probabilities of the classes
        fits = logits.ndim == 2 and targets.shape == logits.shape
    elif fits:
        targets = without_channel(logits, targets)
        fits = targets.shape == logits.shape[:1] + logits.shape[2:]
    if not fits:
        raise SettingsError(
            f"the model returned {form_of(logits)} for targets {form_of(targets)}; the cross entropy needs a tensor of "
            "logits [N, C, ...] with two classes or more, or an object that has it as `logits`, and class numbers "
            '[N, ...] or [N, 1, ...]. For others set the task, task="binary" for one logit, task="regression" for '
            'numbers, task="multilabel" for several labels per example; or give a loss of your own'
        )
    dense = logits.ndim > 2
    if not (dense or label_smoothing) and weight is None:
        return F.cross_entropy(logits, targets)
    if weight is not None:
        weight = weight.to(logits.device, torch.promote_types(logits.dtype, torch.float32))
    ignored = IGNORED if dense else -100
    total = F.cross_entropy(
        logits, targets, weight, ignore_index=ignored, reduction="sum", label_smoothing=label_smoothing
    )
    # All pixels of a crop may be ignored. Probabilities leave no example out.
    return total / (len(targets) if targets.is_floating_point() else (targets != ignored).sum().clamp(min=1))


def without_channel(logits: Tensor, targets: Tensor) -> Tensor:
    """Class numbers [N, ...] for logits [N, C, ...]; they may be given as [N, 1, ...], as MONAI's masks are."""
    has_channel = targets.ndim == logits.ndim > 1 and targets.shape[1] == 1 and not targets.is_floating_point()
    return targets[:, 0] if has_channel else targets


def binary_cross_entropy(
    logits: Tensor, targets: Tensor, label_smoothing: float = 0.0, class_weights: Tensor | None = None
) -> Tensor:
    """The mean cross entropy over examples and labels, with one logit a label; the class weights are for 0 and 1.

    For one label it is `cross_entropy` of the logits (0, z).
    """
    logits, targets = aligned(logits, targets)
    yes = targets * (1 - label_smoothing) + label_smoothing / 2
    if class_weights is None:
        return F.binary_cross_entropy_with_logits(logits, yes)
    no_weight, yes_weight = class_weights.to(logits)
    losses: Tensor = yes_weight * yes * F.logsigmoid(logits) + no_weight * (1 - yes) * F.logsigmoid(-logits)
    return -losses.mean()


def _of_numbers(loss: Callable[..., Tensor], outputs: Tensor, targets: Tensor, **options: object) -> Tensor:
    return loss(*aligned(outputs, targets), **options)


def aligned(outputs: Outputs, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs and targets in one shape and one type of float; a model with one output may return [N, 1] for [N].

    PyTorch's losses subtract [N] from [N, 1] to [N, N].
    """
    outputs = logits_of(outputs)
    if not one_for_each(outputs, targets):
        raise ValueError(
            f"the model returned {form_of(outputs)} for targets {form_of(targets)}; expected a number for each target"
        )
    dtype = torch.promote_types(outputs.dtype, torch.float32)
    return outputs.reshape(targets.shape).to(dtype), targets.to(dtype)


def one_for_each(outputs: Tensor, targets: Tensor) -> bool:
    """Whether there is an output for each target, up to a dimension of size one."""
    one_each = outputs.shape[:1].numel() == outputs.numel() == targets.numel() == targets.shape[:1].numel()
    return outputs.shape == targets.shape or one_each


_LOSSES: dict[str, Loss] = {
    "cross_entropy": cross_entropy,
    "bce": binary_cross_entropy,
    "mse": partial(_of_numbers, F.mse_loss),
    "mae": partial(_of_numbers, F.l1_loss),
    "huber": partial(_of_numbers, F.huber_loss),
}


def make_loss(name: str, **options: object) -> Loss:
    """The loss with this name in `tasks.LOSSES`; `options` are arguments of the cross entropies above."""
    return partial(_LOSSES[name], **options) if options else _LOSSES[name]


def default_loss(task: Task | None) -> Loss:
    if task is not None and not task.losses:
        raise SettingsError(f"task {task.name!r} ({task.targets}) has no loss; expected one of your own")
    return cross_entropy if task is None else make_loss(task.losses[0])


def balanced_weights(labels: Tensor, classes: int) -> Tensor:
    """n / (K n_c) for each of the K classes among the n labels, so that the mean weight of the examples is one.

    Classes without an example have weight one, which matters only for label smoothing.
    """
    counts = torch.bincount(labels, minlength=classes)
    present = counts > 0
    weights = len(labels) / (present.sum() * counts.clamp(min=1).double())
    return torch.where(present, weights, 1.0)
