"""The images of a split: `Images` keeps them in memory, `Stream` decodes them on request.

Both return the same bytes for the same requests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from fedbn_flwr.errors import DataError

from .augment import Window, crop, crop_and_resize
from .decoding import Files, coloured

Tag = TypeVar("Tag")


@dataclass(frozen=True)
class BatchRequest(Generic[Tag]):
    """A requested batch: row indices, crops, and a tag that is returned with the batch."""

    rows: Tensor  # int64 [n], on the CPU
    tag: Tag
    window: Window | None = None  # None: whole images


class Source(Protocol):
    """The images and labels of a split, in memory or on disk."""

    @property
    def labels(self) -> Tensor:
        """int64 [N]: the class of each image, or zeros for segmentation."""

    @property
    def dense(self) -> bool:
        """Whether this is segmentation data."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of a whole image."""

    @property
    def device(self) -> torch.device: ...

    def batches(self, plan: Iterable[BatchRequest[Tag]]) -> Iterator[tuple[Tensor, Tensor, Tag]]:
        """Images uint8 (or float32) [n, C, h, w], labels int64 [n] (or [n, h, w]), and the tag, on the device."""

    def to(self, device: torch.device) -> Source: ...


@dataclass(frozen=True)
class Images:
    """Images in the memory of the host or of a GPU."""

    images: Tensor  # uint8 [N, C, H, W], or float32 if a data set of the user has such images
    labels: Tensor  # int64 [N]
    masks: Tensor | None = None  # uint8 [N, H, W], for segmentation; pixels with 255 are ignored

    @property
    def dense(self) -> bool:
        return self.masks is not None

    @property
    def shape(self) -> tuple[int, int, int]:
        _, channels, height, width = self.images.shape
        return channels, height, width

    @property
    def device(self) -> torch.device:
        return self.images.device

    def batches(self, plan: Iterable[BatchRequest[Tag]]) -> Iterator[tuple[Tensor, Tensor, Tag]]:
        for request in plan:
            rows = request.rows.to(self.device, non_blocking=True)  # otherwise the host waits for the previous step
            images = self.images[rows]
            targets = self.labels[rows] if self.masks is None else self.masks[rows]
            if request.window is not None:
                boxes = request.window.boxes(*self.shape[1:])
                if request.window.cut is None:
                    images = crop_and_resize(images, boxes, self.shape[1:])
                else:
                    images = crop(images, boxes)
                    targets = targets if self.masks is None else crop(targets, boxes)
            yield images, targets.long(), request.tag

    def to(self, device: torch.device) -> Images:
        masks = None if self.masks is None else self.masks.to(device)
        return Images(self.images.to(device), self.labels.to(device), masks)


@dataclass(frozen=True)
class Stream:
    """Images on disk, decoded by a few threads ahead of training.

    Decoding releases the interpreter lock. The threads end after each pass over a plan, so that no forked process
    inherits them. At most two batches (or two images per thread) are decoded ahead.
    """

    files: Files
    labels: Tensor
    shape: tuple[int, int, int]
    readers: int = 2
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def dense(self) -> bool:
        return self.files.masks is not None

    def batches(self, plan: Iterable[BatchRequest[Tag]]) -> Iterator[tuple[Tensor, Tensor, Tag]]:
        waiting: deque[tuple[BatchRequest[Tag], list[Future[tuple[np.ndarray, np.ndarray | None]]]]] = deque()
        todo = iter(plan)
        # One PyTorch thread in each: a forked process has no thread pool and would wait for it.
        pool = ThreadPoolExecutor(self.readers, "reader", initializer=torch.set_num_threads, initargs=(1,))
        try:
            while True:
                while sum(len(futures) for _, futures in waiting) < 2 * self.readers or len(waiting) < 2:
                    request = next(todo, None)
                    if request is None:
                        break
                    rows = enumerate(request.rows.tolist())
                    waiting.append((request, [pool.submit(self._read, row, i, request.window) for i, row in rows]))
                if not waiting:
                    return
                request, futures = waiting.popleft()
                read = [future.result() for future in futures]
                images = torch.from_numpy(np.stack([pixels for pixels, _ in read]))
                if self.dense:
                    targets = torch.from_numpy(np.stack([mask for _, mask in read if mask is not None])).long()
                else:
                    targets = self.labels[request.rows]
                yield self._sent(images), self._sent(targets), request.tag
        finally:  # also if a round ends before the plan
            pool.shutdown(wait=True, cancel_futures=True)

    def _read(self, row: int, number: int, window: Window | None) -> tuple[np.ndarray, np.ndarray | None]:
        mask = None
        if self.dense:
            pixels, mask = self.files.pair(row)
        elif window is not None and window.cut is None:
            pixels = self.files.window(row, window, number, self.shape[1:])
        else:
            pixels = self.files.pixels(row)
        self._check(pixels, row)
        if window is not None and window.cut is not None:
            top, left, tall, wide = window.box(number, *pixels.shape[1:])
            pixels = pixels[:, top : top + tall, left : left + wide]
            mask = None if mask is None else mask[top : top + tall, left : left + wide]
        return coloured(pixels, self.shape[0]), mask

    def _check(self, pixels: np.ndarray, row: int) -> None:
        channels, height, width = self.shape
        if pixels.shape[1:] != (height, width):
            raise DataError(
                f"{self.files.name!r}: the image in row {row} has {pixels.shape[1]}x{pixels.shape[2]} pixels, others "
                f"{height}x{width}; set data.size to resize them"
            )
        if len(pixels) > channels:
            raise DataError(
                f"{self.files.name!r}: the image in row {row} has colour, but those checked before training "
                "are greyscale; set data.stream to false to check all images"
            )

    def _sent(self, values: Tensor) -> Tensor:
        if self.device.type == "cpu":
            return values
        return values.pin_memory().to(self.device, non_blocking=True)

    def to(self, device: torch.device) -> Stream:
        return replace(self, device=device)
