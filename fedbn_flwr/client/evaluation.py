"""Loss and accuracy of a model on batches; mean IoU of one that has an output for each pixel."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from fedbn_flwr.data import IGNORED

from .training import Batch, Loss


@torch.no_grad()
def evaluate(model: nn.Module, batches: Iterable[Batch], loss_fn: Loss, device: torch.device) -> dict[str, float | int]:
    """`loss` and `accuracy` (a fraction), means over `num-examples` examples, in evaluation mode.

    Of a model with logits for each pixel, [N, C, H, W], they are means over the pixels that count (their label is not
    255), and there is `mean-iou` as well.
    """
    was_training = model.training
    model.eval()
    loss = torch.zeros((), device=device, dtype=torch.float64)
    correct = torch.zeros((), device=device, dtype=torch.int64)
    examples = 0
    pixels: torch.Tensor | None = None  # of a model with logits for each pixel: its confusion matrix
    for inputs, targets in batches:
        inputs, targets = inputs.to(device), targets.to(device)
        logits = model(inputs)
        if logits.ndim > 2:
            found = confusion(logits, targets)
            pixels = found if pixels is None else pixels + found
            loss += loss_fn(logits, targets).double() * found.sum()
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
        raise ValueError(f"no pixel of the examples has a label other than {IGNORED}")
    return {
        "loss": float(loss) / counted,
        "accuracy": int(pixels.trace()) / counted,
        "num-examples": examples,
        "mean-iou": mean_iou(pixels),
    }


def confusion(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """How often each class (row) was taken for each (column), among pixels whose label is not 255.

    logits [N, C, ...], targets [N, ...]; the answer is [C, C] and adds up over batches.
    """
    classes = logits.shape[1]
    counts = targets != IGNORED
    labels, predictions = targets[counts].long(), logits.argmax(1)[counts]
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        raise ValueError(
            f"labels of pixels run from {int(labels.min())} to {int(labels.max())}, the model has {classes} classes; "
            f"{IGNORED} is for pixels that do not count"
        )
    return torch.bincount(labels * classes + predictions, minlength=classes**2).view(classes, classes)


def mean_iou(matrix: torch.Tensor) -> float:
    """Mean over classes of intersection over union, from a confusion matrix.

    A class that is nowhere, neither in the labels nor in the predictions, has no union and is left out.
    """
    both = matrix.diag()
    union = matrix.sum(0) + matrix.sum(1) - both
    there = union > 0
    return float((both[there].double() / union[there]).mean())
