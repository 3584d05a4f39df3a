"""What a client says about its data in a survey: exact sums of its columns, and the numbers of examples of its classes.

It says nothing about fewer examples than `least`, not even by what is left over when everything else is known.
"""

from __future__ import annotations

import numpy as np

from fedbn_flwr.batch import first
from fedbn_flwr.messages.arrays import Arrays
from fedbn_flwr.tasks import REGRESSION

from .dataset import DataForm
from .examples import Examples
from .moments import ROWS, sums_of

HIDDEN = -1  # instead of a number of examples


def blank_answer(data: DataForm) -> Arrays:
    """Zeros in the form of an answer: sums of the columns and of regression targets; numbers of all and of classes."""
    counted = data.task.form in ("classes", "labels") and not data.dense
    targets = data.classes if data.task is REGRESSION else 0
    counts = np.zeros(1 + data.classes * counted, np.int64)
    return {"sums": np.zeros((ROWS, data.normalised + targets)), "counts": counts}


def answer(data: DataForm, examples: Examples, least: int) -> Arrays:
    found, total = blank_answer(data), len(examples)
    of_targets = [sums_of(examples.numbers)] if data.task is REGRESSION else []
    sums = np.concatenate([sums_of(examples.inputs), *of_targets], axis=1)
    # Missing values do not count; only tables have some.
    given = sums[0] if len(examples.shape) == 1 else np.full(sums.shape[1], total)
    found["sums"][:, given >= least] = sums[:, given >= least]
    found["counts"][0] = total
    if len(found["counts"]) > 1:
        found["counts"][1:] = _of_labels(data, examples, least)
    return found


def _of_labels(data: DataForm, examples: Examples, least: int) -> np.ndarray:
    """The number of examples of each class, or with each label."""
    if data.task.form == "labels":
        positive = (first(examples.targets) > 0).sum(0).cpu().numpy()
        fewer = np.minimum(positive, len(examples) - positive)
        return np.where((fewer > 0) & (fewer < least), HIDDEN, positive)
    counts = np.bincount(examples.labels.cpu().numpy(), minlength=data.classes)
    order = [place for place in np.argsort(counts, kind="stable") if counts[place]]
    hidden: list[int] = []
    for place in order:  # the smallest classes, until what is left over is large enough
        if counts[place] < least or 0 < counts[hidden].sum() < least:
            hidden.append(place)
    counts[hidden] = HIDDEN
    return counts
