"""Fewer images of a data set, in the same proportions of classes and domains."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fedbn_flwr import seeding
from fedbn_flwr.errors import DataError

from .dataset import DataSet


def fewer(dataset: DataSet, images: int | None, test_images: int | None) -> DataSet:
    """The data set with this many training and test images; None keeps all.

    The draw is fixed: all runs and all seeds have the same images, and a smaller number has those of a larger one,
    up to rounding in each group.
    """
    groups = [each for each in (dataset.domains, dataset.natural) if each is not None]
    train = [dataset.train.labels, *(each.train for each in groups)]
    test = [dataset.test.labels, *(each.test for each in groups if each.test is not None)]
    rows: list[Tensor | None] = []
    for key, count, columns in (("images", images, train), ("test_images", test_images, test)):
        total = len(columns[0])
        if count is not None and count > total:
            words = "training" if key == "images" else "test"
            raise DataError(f"data.{key} is {count}, but {dataset.name!r} has {total} {words} images")
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
