"""Fewer images of a data set, in the same proportions of classes and domains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fedbn_flwr import seeding
from fedbn_flwr.errors import DataError

from .dataset import DataSet, Groups
from .images import Images, Source, Stream


def fewer(dataset: DataSet, images: int | None, test_images: int | None) -> DataSet:
    """The data set with this many training and test images; None keeps all.

    The draw is fixed: all runs and all seeds have the same images, and a smaller number has those of a larger one,
    up to rounding in each group.
    """
    groups = [each for each in (dataset.domains, dataset.natural) if each is not None]
    train = _rows(dataset, "images", dataset.train, images, [each.train for each in groups])
    test_groups = [each.test for each in groups if each.test is not None]
    test = _rows(dataset, "test_images", dataset.test, test_images, test_groups)
    return replace(
        dataset,
        train=_subset(dataset.train, train),
        test=_subset(dataset.test, test),
        domains=_subset_of_groups(dataset.domains, train, test),
        natural=_subset_of_groups(dataset.natural, train, test),
    )


def _rows(dataset: DataSet, key: str, source: Source, count: int | None, groups: Sequence[Tensor]) -> Tensor | None:
    """The rows to keep; None for all."""
    if count is None or count == (total := len(source.labels)):
        return None
    if count > total:
        words = "training" if source is dataset.train else "test"
        raise DataError(f"data.{key} is {count}, but {dataset.name!r} has {total} {words} images")
    return draw(count, [source.labels.cpu(), *groups])


def draw(count: int, columns: Sequence[Tensor]) -> Tensor:
    """`count` rows, ascending: of each combination of the columns' values its share, by largest remainders."""
    values = np.stack([column.numpy() for column in columns])
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


def _subset_of_groups(groups: Groups | None, train: Tensor | None, test: Tensor | None) -> Groups | None:
    if groups is None:
        return None
    return replace(
        groups,
        train=groups.train if train is None else groups.train[train],
        test=groups.test if test is None or groups.test is None else groups.test[test],
    )


def _subset(source: Source, rows: Tensor | None) -> Source:
    if rows is None:
        return source
    if isinstance(source, Stream):
        files = replace(source.files, split=source.files.split.select(rows.numpy()))
        return replace(source, files=files, labels=source.labels[rows])
    assert isinstance(source, Images)
    here = rows.to(source.device)
    masks = None if source.masks is None else source.masks[here]
    return Images(source.images[here], source.labels[here], masks)
