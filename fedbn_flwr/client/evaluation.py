"""Loss, accuracy and other metrics of a model on batches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from fedbn_flwr.data import IGNORED

from .metrics import Measurement, Metric, confusion, mean_iou
from .training import Batch, Loss


@torch.no_grad()
def evaluate(
    model: nn.Module, batches: Iterable[Batch], loss_fn: Loss, device: torch.device, metrics: Sequence[Metric] = ()
) -> dict[str, float | int]:
    """`loss` and `accuracy` (a fraction) in evaluation mode, means over `num-examples` examples, and the `metrics`.

    For a segmentation model, whose logits are [N, C, H, W], they are means over the pixels whose label is not 255, and
    the result includes `mean-iou`. A metric that the examples do not define is left out.
    """
    was_training = model.training
    model.eval()
    loss = torch.zeros((), device=device, dtype=torch.float64)
    correct = torch.zeros((), device=device, dtype=torch.int64)
    examples = 0
    pixels: torch.Tensor | None = None  # the confusion matrix of a segmentation model
    others = Measurement(metrics)
    for inputs, targets in batches:
        inputs, targets = inputs.to(device), targets.to(device)
        logits = model(inputs)
        matrix: torch.Tensor | None = None
        if logits.ndim > 2:
            matrix = confusion(logits, targets)
            pixels = matrix if pixels is None else pixels + matrix
            loss += loss_fn(logits, targets).double() * matrix.sum()
        else:
            loss += loss_fn(logits, targets).double() * len(targets)
            correct += (logits.argmax(1) == targets).sum()
        others.add(logits, targets, matrix)
        examples += len(targets)
    model.train(was_training)
    if not examples:
        raise ValueError("there are no examples to evaluate on")
    if pixels is None:
        figures = {"loss": float(loss) / examples, "accuracy": int(correct) / examples, "num-examples": examples}
        return figures | others.values()
    if not (counted := int(pixels.sum())):
        raise ValueError(f"all pixels of the examples have the label {IGNORED}, which is left out")
    figures = {
        "loss": float(loss) / counted,
        "accuracy": int(pixels.trace()) / counted,
        "num-examples": examples,
        "mean-iou": mean_iou(pixels),
    }
    return figures | others.values()


def evaluate_sets(
    model: nn.Module,
    sets: Mapping[str, Iterable[Batch]],
    loss_fn: Loss,
    device: torch.device,
    metrics: Sequence[Metric],
    names: object,
) -> dict[str, float | int]:
    """The figures of each test set, or of those whose `names` are given with commas between them.

    The keys of all sets but the first begin with the name of the set.
    """
    first = next(iter(sets), "")
    found: dict[str, float | int] = {}
    for name, batches in sets.items():
        if names is None or name in str(names).split(","):
            figures = evaluate(model, batches, loss_fn, device, metrics)
            found |= {key if name == first else f"{name}-{key}": value for key, value in figures.items()}
    return found
