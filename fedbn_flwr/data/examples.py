"""The examples of a split, in memory, on a GPU, or in a file that is mapped into memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedbn_flwr.batch import Value, count, first, map_tensors, tensors

MASK = "mask"  # the entry of a dict of inputs that is true at real positions, bool [N, T]


def main_input(inputs: Value) -> Tensor:
    """The tensor that is normalised: in a dict the entry `inputs`, or the first that is not a mask."""
    return inputs[main_key(inputs)] if isinstance(inputs, Mapping) else inputs


def main_key(inputs: Mapping[str, Tensor]) -> str:
    return "inputs" if "inputs" in inputs else next(key for key in inputs if key != MASK)


@dataclass(frozen=True)
class Examples:
    """The examples of a split."""

    # float32 [N, features], [N, channels, ...]; uint8 [N, C, H, W] images; int64 [N, T] tokens; or a dict of tensors
    inputs: Value
    # int64 [N], a class each; uint8 [N, H, W], a class for each pixel (255: ignored); float32 [N] or [N, K]
    # values of a regression, or 0 and 1 of several labels; or a dict of tensors
    targets: Value
    sent_to: torch.device | None = None  # the device to which each batch is sent, if the examples stay where they are
    rows: Tensor | None = None  # int64 [N], the numbers of the examples in their table or split; always on the CPU

    def __len__(self) -> int:
        return count(self.targets)

    @property
    def labels(self) -> Tensor:
        """int64 [N]: the class of each example, or zeros where it has not one class."""
        targets = first(self.targets)
        if targets is self.targets and targets.ndim == 1 and not targets.is_floating_point():
            return targets
        return torch.zeros(len(self), dtype=torch.int64, device=targets.device)

    @property
    def numbers(self) -> Tensor:
        """float32 [N, K]: the regression targets of each example."""
        return first(self.targets).reshape(len(self), -1)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the inputs of one example: of an image channels, height and width."""
        return tuple(main_input(self.inputs).shape[1:])

    @property
    def device(self) -> torch.device:
        """That of the batches."""
        return self.sent_to or main_input(self.inputs).device

    @property
    def gaps(self) -> Tensor:
        """bool [N]: whether an input of the example is missing (NaN)."""
        return torch.stack([part.isnan().reshape(len(self), -1).any(1) for part in tensors(self.inputs)]).any(0)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (*tensors(self.inputs), *tensors(self.targets)))

    def batch(self, rows: Tensor) -> tuple[Value, Value]:
        """Inputs as they are stored, and targets (classes as int64), on the device."""
        # A blocking copy would wait for the previous step.
        here = rows.to(main_input(self.inputs).device, non_blocking=True)

        def taken(part: Tensor) -> Tensor:
            some = part.index_select(0, here)  # copies whole rows, in two thirds of the time of part[here]
            return some if self.sent_to is None else some.to(self.sent_to, non_blocking=True)

        inputs, targets = map_tensors(taken, self.inputs), map_tensors(taken, self.targets)
        return inputs, map_tensors(lambda part: part.long() if part.dtype is torch.uint8 else part, targets)

    def blank(self, number: int) -> Value:
        """Inputs of this form that are zero, to try a model; all positions are real."""
        return map_tensors(lambda part: _zeros(part, number), self.inputs)

    def select(self, rows: Tensor) -> Examples:
        """The examples with these numbers, or where a mask is true; no copy if they follow one another."""
        rows = (rows.nonzero()[:, 0] if rows.dtype is torch.bool else rows).cpu()
        start = int(rows[0]) if len(rows) else 0
        follow = rows.equal(torch.arange(start, start + len(rows)))
        here = slice(start, start + len(rows)) if follow else rows.to(main_input(self.inputs).device)

        inputs, targets = (map_tensors(lambda part: part[here], value) for value in (self.inputs, self.targets))
        return replace(self, inputs=inputs, targets=targets, rows=None if self.rows is None else self.rows[rows])

    def to(self, device: torch.device, most: float = math.inf) -> Examples:
        """On a device, as a whole if they have at most `most` bytes, or else batch by batch."""
        if device.type != "cpu" and self.nbytes > most:
            return replace(self, sent_to=device)
        inputs, targets = (map_tensors(lambda part: part.to(device), value) for value in (self.inputs, self.targets))
        return replace(self, inputs=inputs, targets=targets)


def _zeros(part: Tensor, number: int) -> Tensor:
    if part.dtype is torch.bool:
        return part.new_ones(number, *part.shape[1:])
    return part.new_zeros(number, *part.shape[1:], dtype=torch.float32 if part.dtype is torch.uint8 else part.dtype)
