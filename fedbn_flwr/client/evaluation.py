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

# Of a batch: sums over its examples, or over the pixels of a segmentation model: their number, the losses, the correct
# ones (not if the outputs are not logits of classes), and the confusion matrix of such a model. Logits and targets.
_Sums = tuple[dict[str, Any], Any, Tensor]


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
    those of a classifier (a regression, several labels per example, one logit), there is no accuracy. The result does
    not depend on the number of threads, each of which has a batch in memory.
    """

    @torch.no_grad()  # a setting of the thread
    def sums_of(model: nn.Module, batch: Batch) -> _Sums:
        inputs, targets = (tensor.to(device) for tensor in batch)
        outputs = model(inputs)
        loss, logits = loss_fn(outputs, targets).double(), logits_of(outputs)
        sums: dict[str, Any] = {"number": len(targets)}
        if _has_classes(logits, targets):
            if logits.ndim > 2:
                sums["matrix"] = matrix = confusion(logits, targets)
                sums |= {"number": matrix.sum(), "correct": matrix.trace()}
            else:
                sums["correct"] = (logits.argmax(1) == targets).sum()
        return {"loss": loss * sums["number"], **sums}, logits, targets

    was_training = model.training
    model.eval()
    examples, others, sums = 0, Measurement(metrics), dict[str, Any]()
    for more, logits, targets in map_batches(sums_of, model, batches, threads):
        # Without those that another batch does not have.
        sums = {key: sums[key] + more[key] for key in sums if key in more} if examples else more
        others.add(logits, targets, more.get("matrix"))
        examples += len(targets)
    model.train(was_training)
    if not examples:
        raise ValueError("there are no examples to evaluate on")
    if not (number := int(sums["number"])):
        raise ValueError(f"all pixels of the examples have the label {IGNORED}, which is left out")
    figures = {"loss": float(sums["loss"]) / number, "num-examples": examples}
    if "correct" in sums:
        figures["accuracy"] = int(sums["correct"]) / number
    if "matrix" in sums:
        figures["mean-iou"] = of_matrix("mean_iou", sums["matrix"])
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
