"""Loss and accuracy of a model on batches, and the mean IoU of a segmentation model."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from fedbn_flwr.data import IGNORED

from .training import Batch, Loss


@torch.no_grad()
def evaluate(model: nn.Module, batches: Iterable[Batch], loss_fn: Loss, device: torch.device) -> dict[str, float | int]:
    """`loss` and `accuracy` (a fraction) in evaluation mode, means over `num-examples` examples.

    For a segmentation model, whose logits are [N, C, H, W], they are means over the pixels whose label is not 255, and
    the result includes `mean-iou`.
    """
    was_training = model.training
    model.eval()
    loss = torch.zeros((), device=device, dtype=torch.float64)
    correct = torch.zeros((), device=device, dtype=torch.int64)
    examples = 0
    pixels: torch.Tensor | None = None  # the confusion matrix of a segmentation model
    for inputs, targets in batches:
        inputs, targets = inputs.to(device), targets.to(device)
        logits = model(inputs)
        if logits.ndim > 2:
            matrix = confusion(logits, targets)
            pixels = matrix if pixels is None else pixels + matrix
            loss += loss_fn(logits, targets).double() * matrix.sum()
        else:
            loss += loss_fn(logits, targets).double() * len(targets)
            correct += (logits.argmax(1) == targets).sum()
        examples += len(targets)
    model.train(was_training)
    if not examples:
        raise ValueError("there are no examples to evaluate on")
    if pixels is None:
        return {"loss": float(loss) / examples, "accuracy": int(correct) / examples, "num-examples": examples}
    if not (counted := int(pixels.sum())):
        raise ValueError(f"all pixels of the examples have the label {IGNORED}, which is left out")
    return {
        "loss": float(loss) / counted,
        "accuracy": int(pixels.trace()) / counted,
        "num-examples": examples,
        "mean-iou": mean_iou(pixels),
    }


def confusion(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The number of pixels by label (row) and predicted class (column), without pixels whose label is 255.

    logits [N, C, ...], targets [N, ...]; the result is [C, C], and the sum over batches is the matrix of all.
    """
    classes = logits.shape[1]
    counts = targets != IGNORED
    labels, predictions = targets[counts].long(), logits.argmax(1)[counts]
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        raise ValueError(
            f"labels of pixels run from {int(labels.min())} to {int(labels.max())}, the model has {classes} classes; "
            f"expected 0 to {classes - 1}, or {IGNORED} for pixels to leave out"
        )
    return torch.bincount(labels * classes + predictions, minlength=classes**2).view(classes, classes)


def mean_iou(matrix: torch.Tensor) -> float:
    """The mean over classes of intersection over union, from a confusion matrix.

    A class that appears neither in the labels nor in the predictions is left out.
    """
    intersection = matrix.diag()
    union = matrix.sum(0) + matrix.sum(1) - intersection
    present = union > 0
    return float((intersection[present].double() / union[present]).mean())
