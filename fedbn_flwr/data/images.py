"""The images of a split in memory, and how batches of them are requested; decoding.py has those that stay on disk.

Both return the same bytes for the same requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import torch
from torch import Tensor

from .augment import Window, crop, crop_and_resize

Tag = TypeVar("Tag")


@dataclass(frozen=True)
class BatchRequest(Generic[Tag]):
    """A requested batch: row indices, crops, and a tag that is returned with the batch."""

    rows: Tensor  # int64 [n], on the CPU
    tag: Tag
    window: Window | None = None  # None: whole images


@dataclass(frozen=True)
class Images:
    """Images in the memory of the host or of a GPU."""

    images: Tensor  # uint8 [N, C, H, W], or float32 if a data set of the user has such images
    targets: Tensor  # int64 [N], the class of each; or uint8 [N, H, W], that of each pixel, 255 for ignored ones

    @property
    def dense(self) -> bool:
        """Whether this is segmentation data."""
        return self.targets.ndim > 1

    @property
    def labels(self) -> Tensor:
        """int64 [N]: the class of each image, or zeros for segmentation."""
        return self.targets.new_zeros(len(self.targets), dtype=torch.int64) if self.dense else self.targets

    @property
    def shape(self) -> tuple[int, ...]:
        """Channels, height and width of a whole image."""
        return tuple(self.images.shape[1:])

    @property
    def device(self) -> torch.device:
        return self.images.device

    def batches(self, plan: Iterable[BatchRequest[Tag]]) -> Iterator[tuple[Tensor, Tensor, Tag]]:
        """Images uint8 (or float32) [n, C, h, w], labels int64 [n] (or [n, h, w]), and the tag, on the device."""
        for request in plan:
            rows = request.rows.to(self.device, non_blocking=True)  # otherwise the host waits for the previous step
            images, targets = self.images[rows], self.targets[rows]
            if request.window is not None:
                boxes = request.window.boxes(*self.shape[1:])
                if request.window.cut is None:
                    images = crop_and_resize(images, boxes, self.shape[1:])
                else:
                    images = crop(images, boxes)
                    targets = crop(targets, boxes) if self.dense else targets
            yield images, targets.long(), request.tag

    def sample(self) -> Tensor:
        """The images from which mean and standard deviation are measured: all of them."""
        return self.images

    def coloured(self, channels: int) -> Images:
        """With the channel of greyscale images repeated."""
        return replace(self, images=self.images.expand(-1, channels, -1, -1).contiguous())

    def select(self, rows: Tensor) -> Images:
        here = rows.to(self.device)
        return Images(self.images[here], self.targets[here])

    def to(self, device: torch.device) -> Images:
        return Images(self.images.to(device), self.targets.to(device))
