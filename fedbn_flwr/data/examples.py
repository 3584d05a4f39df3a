"""The examples of a split in memory, and how batches of them are requested; decoding.py has images that stay on disk.

Both return the same bytes for the same requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from fedbn_flwr.batch import Value, count, each, first, tensors

from .augment import Window, crop, crop_and_resize

Tag = TypeVar("Tag")
MASK = "mask"  # the entry of a dict of inputs that is true at real positions, bool [N, T]


def main(inputs: Value) -> Tensor:
    """The tensor that is normalised: all, or in a dict the entry `inputs`, or the first that is no mask."""
    if isinstance(inputs, Tensor):
        return inputs
    return inputs[main_key(inputs)]


def main_key(inputs: Mapping[str, Tensor]) -> str:
    return "inputs" if "inputs" in inputs else next(key for key in inputs if key != MASK)


@dataclass(frozen=True)
class BatchRequest(Generic[Tag]):
    """A requested batch: row indices, crops, and a tag that is returned with the batch."""

    rows: Tensor  # int64 [n], on the CPU
    tag: Tag
    window: Window | None = None  # None: whole images


class Labelled:
    """The examples of a split."""

    # int64 [N] the class of each; uint8 [N, H, W] that of each pixel, 255 for ignored ones; float32 [N] or [N, K]
    # values of a regression, or 0 and 1 of several labels; or a dict of tensors
    targets: Value

    def __len__(self) -> int:
        return count(self.targets)

    @property
    def labels(self) -> Tensor:
        """int64 [N]: the class of each example, or zeros where it has not one class."""
        targets = first(self.targets)
        if targets is self.targets and targets.ndim == 1 and not targets.is_floating_point():
            return targets
        return torch.zeros(len(self), dtype=torch.int64, device=targets.device)


@dataclass(frozen=True)
class InMemory(Labelled):
    """Examples in the memory of the host or of a GPU."""

    # float32 [N, features], [N, channels, ...]; uint8 [N, C, H, W] images; int64 [N, T] tokens; or a dict of tensors
    inputs: Value
    targets: Value

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the inputs of one example: of an image channels, height and width."""
        return tuple(main(self.inputs).shape[1:])

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (*tensors(self.inputs), *tensors(self.targets)))

    @property
    def device(self) -> torch.device:
        return main(self.inputs).device

    def batches(self, plan: Iterable[BatchRequest[Tag]]) -> Iterator[tuple[Value, Value, Tag]]:
        """Inputs as they are stored, targets (classes as int64), and the tag, on the device."""
        for request in plan:
            rows = request.rows.to(self.device, non_blocking=True)  # otherwise the host waits for the previous step
            inputs, targets = _at(rows, self.inputs), _at(rows, self.targets)
            if request.window is not None:
                boxes = request.window.boxes(*self.shape[1:])
                if request.window.cut is None:
                    inputs = crop_and_resize(inputs, boxes, self.shape[1:])
                else:  # of images and masks
                    inputs, targets = crop(inputs, boxes), crop(targets, boxes)
            yield inputs, each(lambda part: part.long() if part.dtype is torch.uint8 else part, targets), request.tag

    def sample(self) -> Value:
        """The inputs from which mean and standard deviation are measured: all of them."""
        return self.inputs

    def blank(self, number: int) -> Value:
        """Inputs of this form that are zero, to try a model; all positions are real."""
        inputs: Value = each(lambda part: _zeros(part, number), self.inputs)
        return inputs

    def coloured(self, channels: int) -> InMemory:
        """With the channel of greyscale images repeated."""
        return replace(self, inputs=main(self.inputs).expand(-1, channels, -1, -1).contiguous())

    def select(self, rows: Tensor) -> InMemory:
        here = rows.to(self.device)
        return InMemory(_at(here, self.inputs), _at(here, self.targets))

    def to(self, device: torch.device) -> InMemory:
        return InMemory(*(each(lambda part: part.to(device), part) for part in (self.inputs, self.targets)))


def _at(rows: Tensor, value: Value) -> Any:
    return each(lambda part: part[rows], value)


def _zeros(part: Tensor, number: int) -> Tensor:
    if part.dtype is torch.bool:
        return part.new_ones(number, *part.shape[1:])
    return part.new_zeros(number, *part.shape[1:], dtype=torch.float32 if part.dtype is torch.uint8 else part.dtype)
