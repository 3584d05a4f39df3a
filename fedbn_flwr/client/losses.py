"""Cross entropy with label smoothing and class weights."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fedbn_flwr.data import IGNORED

from .training import logits_of


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


def balanced_weights(labels: Tensor, classes: int) -> Tensor:
    """n / (K n_c) for each of the K classes among the n labels, so that the mean weight of the examples is one.

    Classes without an example have weight one, which matters only for label smoothing.
    """
    counts = torch.bincount(labels, minlength=classes)
    present = counts > 0
    weights = len(labels) / (present.sum() * counts.clamp(min=1).double())
    return torch.where(present, weights, 1.0)
