"""A data set: its training and test images, its classes, and the groups that its images belong to."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from . import Moments, Size
from .images import BatchRequest, Images, Source, Stream

_MEASURED = 512  # images of a streamed set from which its mean and standard deviation are estimated


@dataclass(frozen=True)
class Groups:
    """The values of a column that groups the images by domain or by client."""

    column: str
    names: tuple[str, ...]
    train: Tensor  # int64 [N], an index into names; always on the CPU
    test: Tensor | None  # None if the test split has no such column


@dataclass(frozen=True)
class DataSet:
    name: str
    train: Source
    test: Source
    class_names: tuple[str, ...]
    domains: Groups | None = None
    natural: Groups | None = None  # by the column of a natural partition
    commit: str | None = None  # of the hub's repository that the images are from

    @property
    def classes(self) -> int:
        return len(self.class_names)

    @property
    def dense(self) -> bool:
        """Whether this is a segmentation data set."""
        return self.train.dense

    @property
    def channels(self) -> int:
        return self.train.shape[0]

    @property
    def size(self) -> Size:
        return self.train.shape[1:]

    @property
    def nbytes(self) -> int:
        """Bytes in memory; images on the disk take none."""
        values = (*vars(self.train).values(), *vars(self.test).values())
        return sum(value.nbytes for value in values if isinstance(value, Tensor))

    @cached_property
    def moments(self) -> Moments:
        """Mean and standard deviation of each channel over the training images; uint8 pixels count from 0 to 1.

        For a streamed set they are estimated from 512 evenly spaced images.
        """
        if isinstance(self.train, Images) and self.train.images.is_floating_point():
            found = [(part.double().mean(), part.double().std(correction=0)) for part in self.train.images.unbind(1)]
            return tuple(float(mean) for mean, _ in found), tuple(max(float(std), 1e-6) for _, std in found)
        rows = torch.arange(len(self.train.labels))
        if isinstance(self.train, Stream):
            rows = spread(len(rows), _MEASURED)
        # Histograms are exact and need no float copy of the data.
        counts = torch.zeros(self.channels, 256, dtype=torch.int64, device=self.train.device)
        for images, _, _ in self.train.batches(BatchRequest(some, None) for some in rows.split(1_024)):
            for count, channel in zip(counts, images.unbind(1), strict=True):
                count += torch.bincount(channel.reshape(-1), minlength=256)
        values = torch.arange(256, dtype=torch.float64) / 255
        means, deviations = [], []
        for count in counts.cpu():
            share = count.double() / count.sum()
            mean = float(share @ values)
            means.append(mean)
            deviations.append(max(float(share @ (values - mean) ** 2) ** 0.5, 1e-6))
        return tuple(means), tuple(deviations)

    def to(self, device: torch.device) -> DataSet:
        return replace(self, train=self.train.to(device), test=self.test.to(device))


def spread(count: int, most: int) -> Tensor:
    """Up to `most` evenly spaced row numbers of `count` rows, including the first and the last."""
    return torch.from_numpy(np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(np.int64)))
