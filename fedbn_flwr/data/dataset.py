"""A data set: its training and test examples, its classes, and the groups that its examples belong to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Union

import numpy as np
import torch
from torch import Tensor

from fedbn_flwr import seeding
from fedbn_flwr.errors import DataError, did_you_mean
from fedbn_flwr.tasks import CLASSIFICATION, SEGMENTATION, Task

from . import Moments, Size
from .images import Images

if TYPE_CHECKING:  # decoding needs packages of the extra `data`
    from .decoding import Stream

Examples = Union[Images, "Stream"]  # of a split


@dataclass(frozen=True)
class Groups:
    """The values of a column that groups the examples by domain or by client."""

    names: tuple[str, ...]
    train: Tensor  # int64 [N], an index into names, -1 for another value; always on the CPU
    test: Tensor | None  # None if the test split has no such column

    @classmethod
    def of(cls, name: str, values: Mapping[str, Sequence[Any]], wanted: Sequence[str] = ()) -> Groups:
        """Groups by the values of the splits as texts: those that are wanted, in this order, or all, sorted."""
        texts = {part: list(map(str, some)) for part, some in values.items()}
        known = sorted({text for some in texts.values() for text in some})
        if unknown := [name for name in wanted if name not in known]:
            hint = did_you_mean(unknown[0], known)
            raise DataError(f"data.domains: {unknown[0]!r} is not a domain of {name!r}; {hint}")
        names = tuple(wanted) or tuple(known)
        found = {part: numbers(some, names) for part, some in texts.items()}
        return cls(names, found["train"], found.get("test"))

    def select(self, train: Tensor | None, test: Tensor | None) -> Groups:
        kept = self.test if test is None or self.test is None else self.test[test]
        return replace(self, train=self.train if train is None else self.train[train], test=kept)


def numbers(values: Sequence[str], names: Sequence[str]) -> Tensor:
    """The place of each value among the names; -1 for one that is none of them."""
    place = {name: i for i, name in enumerate(names)}
    return torch.tensor([place.get(value, -1) for value in values], dtype=torch.int64)


@dataclass(frozen=True)
class DataSet:
    name: str
    train: Examples
    test: Examples
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
    def task(self) -> Task:
        return SEGMENTATION if self.dense else CLASSIFICATION

    @property
    def channels(self) -> int:
        return self.train.shape[0]

    @property
    def size(self) -> Size:
        return self.train.shape[1:]  # type: ignore[return-value]

    @property
    def nbytes(self) -> int:
        """Bytes in memory; examples on the disk take none."""
        values = (*vars(self.train).values(), *vars(self.test).values())
        return sum(value.nbytes for value in values if isinstance(value, Tensor))

    @cached_property
    def moments(self) -> Moments:
        """Mean and standard deviation of each channel over the training images; uint8 pixels count from 0 to 1.

        For a streamed set they are estimated from 512 evenly spaced images.
        """
        images = self.train.sample()
        if images.is_floating_point():
            found = [(part.double().mean(), part.double().std(correction=0)) for part in images.unbind(1)]
            return tuple(float(mean) for mean, _ in found), tuple(max(float(std), 1e-6) for _, std in found)
        # Histograms are exact and need no float copy of the data.
        counts = torch.zeros(self.channels, 256, dtype=torch.int64, device=images.device)
        for some in images.split(1_024):
            for count, channel in zip(counts, some.unbind(1), strict=True):
                count += torch.bincount(channel.reshape(-1), minlength=256)
        values = torch.arange(256, dtype=torch.float64) / 255
        shares = [count.double() / count.sum() for count in counts.cpu()]
        means = [float(share @ values) for share in shares]
        variances = [float(share @ (values - mean) ** 2) for share, mean in zip(shares, means, strict=True)]
        return tuple(means), tuple(max(variance**0.5, 1e-6) for variance in variances)

    def select(self, train: Tensor | None, test: Tensor | None) -> DataSet:
        """With these rows of its splits; None keeps all."""
        return replace(
            self,
            train=self.train if train is None else self.train.select(train),
            test=self.test if test is None else self.test.select(test),
            domains=self.domains and self.domains.select(train, test),
            natural=self.natural and self.natural.select(train, test),
        )

    def wanted(self) -> DataSet:
        """Without the examples of unwanted classes and domains, whose numbers are -1; DataError if none is left."""
        rows: list[Tensor | None] = []
        domains = (None, None) if self.domains is None else (self.domains.train, self.domains.test)
        for part, split, group in zip(("training", "test"), (self.train, self.test), domains, strict=True):
            keep = split.labels >= 0
            if group is not None:
                keep &= group >= 0
            if not keep.any():
                of = f" of {', '.join(self.domains.names)}" if self.domains is not None else ""
                raise DataError(f"{self.name!r} has no {part} examples{of}")
            rows.append(None if keep.all() else keep)
        return self.select(*rows)

    def alike(self) -> DataSet:
        """With images of one shape: greyscale becomes RGB if the other split has colour."""
        train, test = self.train.shape, self.test.shape
        if train == test:
            return self
        if train[1:] != test[1:] or min(train[0], test[0]) > 1:
            raise DataError(
                f"data.name={self.name!r}: training images are {train}, test images {test} (channels, height, width); "
                "set data.size to resize them"
            )
        channels = max(train[0], test[0])
        return replace(self, train=self.train.coloured(channels), test=self.test.coloured(channels))

    def to(self, device: torch.device) -> DataSet:
        return replace(self, train=self.train.to(device), test=self.test.to(device))


# --- fewer examples ------------------------------------------------------------


def fewer(dataset: DataSet, examples: int | None, test_examples: int | None) -> DataSet:
    """The data set with this many training and test examples, in the same proportions of classes and domains.

    None keeps all.

    The draw is fixed: all runs and all seeds have the same examples, and a smaller number has those of a larger one,
    up to rounding in each group.
    """
    groups = [each for each in (dataset.domains, dataset.natural) if each is not None]
    train = [dataset.train.labels, *(each.train for each in groups)]
    test = [dataset.test.labels, *(each.test for each in groups if each.test is not None)]
    rows: list[Tensor | None] = []
    for key, count, columns in (("examples", examples, train), ("test_examples", test_examples, test)):
        total = len(columns[0])
        if count is not None and count > total:
            words = "training" if key == "examples" else "test"
            raise DataError(f"data.{key} is {count}, but {dataset.name!r} has {total} {words} examples")
        rows.append(None if count in (None, total) else draw(count, columns))
    return dataset.select(*rows)


def draw(count: int, columns: Sequence[Tensor]) -> Tensor:
    """`count` rows, ascending: of each combination of the columns' values its share, by largest remainders."""
    values = np.stack([column.cpu().numpy() for column in columns])
    _, group, sizes = np.unique(values, axis=1, return_inverse=True, return_counts=True)
    group = group.reshape(-1)
    counts, remainders = np.divmod(sizes * count, len(group))
    # Among equal remainders the first groups would always win, which are those of the first classes.
    tie = np.random.default_rng(seeding.seed_for(0, "fewer images, remainders")).permutation(len(sizes))
    counts[np.lexsort((tie, -remainders))[: count - counts.sum()]] += 1
    order = np.random.default_rng(seeding.seed_for(0, "fewer images")).permutation(len(group))
    shuffled = group[order]
    kept = [order[shuffled == number][:some] for number, some in enumerate(counts)]
    return torch.from_numpy(np.sort(np.concatenate(kept)))
