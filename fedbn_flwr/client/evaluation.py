"""Loss, accuracy and other metrics of a model on batches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedbn_flwr.data import IGNORED
from fedbn_flwr.threads import map_batches

from .metrics import Measurement, Metric, confusion, of_matrix
from .training import Batch, Loss, logits_of

# Of a batch: the loss and the number of correct examples (None if the outputs are not logits of classes), added up over
# its examples, or over the pixels of a segmentation model; the confusion matrix of such a model; outputs and targets.
_Sums = tuple[Tensor, Tensor | None, Tensor | None, Any, Tensor]


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Iterable[Batch],
    loss_fn: Loss,
    device: torch.device,
    metrics: Sequence[Metric] = (),
    *,
    threads: int = 1,
) -> dict[str, float | int]:
    """`loss` and `accuracy` (a fraction) in evaluation mode, means over `num-examples` examples, and the `metrics`.

    For a segmentation model, whose logits are [N, C, H, W], they are means over the pixels whose label is not 255, and
    the result includes `mean-iou`. A metric that the examples do not define is left out. If outputs or targets are not
    those of a classifier (a regression, several labels per image, one logit), there is no accuracy. The result does
    not depend on the number of threads, each of which has a batch in memory.
    """

    @torch.no_grad()  # a setting of the thread
    def sums_of(model: nn.Module, batch: Batch) -> _Sums:
        inputs, targets = (tensor.to(device) for tensor in batch)
        outputs = model(inputs)
        loss, logits = loss_fn(outputs, targets).double(), logits_of(outputs)
        if not _has_classes(logits, targets):
            return loss * len(targets), None, None, logits, targets
        if logits.ndim > 2:
            matrix = confusion(logits, targets)
            return loss * matrix.sum(), matrix.trace(), matrix, logits, targets
        return loss * len(targets), (logits.argmax(1) == targets).sum(), None, logits, targets

    was_training = model.training
    model.eval()
    total = torch.zeros((), device=device, dtype=torch.float64)
    correct: Tensor | None = torch.zeros((), device=device, dtype=torch.int64)
    pixels: Tensor | None = None
    examples, others = 0, Measurement(metrics)
    for loss, hits, matrix, logits, targets in map_batches(sums_of, model, batches, threads):
        total += loss
        correct = None if correct is None or hits is None else correct + hits
        if matrix is not None:
            pixels = matrix if pixels is None else pixels + matrix
        others.add(logits, targets, matrix)
        examples += len(targets)
    model.train(was_training)
    if not examples:
        raise ValueError("there are no examples to evaluate on")
    counted = examples if pixels is None else int(pixels.sum())
    if not counted:
        raise ValueError(f"all pixels of the examples have the label {IGNORED}, which is left out")
    figures = {"loss": float(total) / counted, "num-examples": examples}
    if correct is not None:
        figures["accuracy"] = int(correct) / counted
    if pixels is not None:
        figures["mean-iou"] = of_matrix("mean_iou", pixels)
    return figures | others.values()


def _has_classes(logits: object, targets: torch.Tensor) -> bool:
    """Whether they are logits [N, C, ...] of two or more classes, and their numbers [N, ...]."""
    return (
        isinstance(logits, torch.Tensor)
        and logits.ndim >= 2
        and logits.shape[1] > 1
        and not targets.is_floating_point()
        and targets.shape == logits.shape[:1] + logits.shape[2:]
    )
