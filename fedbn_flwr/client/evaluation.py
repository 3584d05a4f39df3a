"""Loss and other figures of a model on batches."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedbn_flwr.batch import Value, count, each
from fedbn_flwr.data import IGNORED
from fedbn_flwr.tasks import CLASSIFICATION, SEGMENTATION, SEVERAL, Task
from fedbn_flwr.threads import map_batches

from .metrics import Counts, Measurement, Metric
from .training import Batch, Loss

# Of a batch: the sum of the losses over its examples, or over the pixels of a segmentation model, and their number;
# what the model returned, the targets, and counts of its predictions.
_Sums = tuple[Tensor, int, Any, Any, Counts | None]


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
    """The `loss` in evaluation mode over `num-examples` examples, the figures of the task, and the `metrics`.

    Without a task it is classification or segmentation if targets are whole numbers, else only the loss and functions
    of the user are reported. Of a segmentation model, whose logits are [N, C, H, W], the loss is a mean over the pixels
    whose label is not 255. A figure that the examples do not define is left out, and so are the task's if outputs or
    targets have another form (a tuple, one logit). The result does not depend on the number of threads, each of which
    has a batch in memory.
    """
    batches = iter(batches)
    if (first := next(batches, None)) is None:
        raise ValueError("there are no examples to evaluate on")
    own = task or _of_whole_numbers(first[1])
    measurement = Measurement(own, metrics)

    @torch.no_grad()  # a setting of the thread
    def sums_of(model: nn.Module, batch: Batch) -> _Sums:
        inputs, targets = (each(lambda tensor: tensor.to(device), part) for part in batch)
        outputs = model(inputs)
        loss, counts = loss_fn(outputs, targets).double(), measurement.counts(outputs, targets)
        number = count(targets) if counts is None or own.form != "classes" else counts[0]
        return loss * number, number, outputs, targets, counts

    was_training = model.training
    model.eval()
    total, numbers, examples = torch.zeros((), dtype=torch.float64, device=device), 0, 0
    for loss, number, outputs, targets, counts in map_batches(
        sums_of, model, itertools.chain([first], batches), threads
    ):
        total, numbers, examples = total + loss, numbers + number, examples + count(targets)
        measurement.add(outputs, targets, counts)
    model.train(was_training)
    if not numbers:
        raise ValueError(f"all pixels of the examples have the label {IGNORED}, which is left out")
    return {"loss": float(total) / numbers, "num-examples": examples} | measurement.values()


def _of_whole_numbers(targets: Value) -> Task:
    if isinstance(targets, Mapping) or targets.is_floating_point() or targets.dtype is torch.bool:
        return SEVERAL
    return SEGMENTATION if targets.ndim > 1 else CLASSIFICATION
