"""What a site tells the server about its data: one rule, whichever question the server asks.

Nothing about fewer than `least` examples, in sums before training as in surveys:

- A site with fewer training examples answers no question about them.
- The sums of a column are zeros, as if it had no values, if it has fewer values, or if they tell about a small group.
  From the number of values, their sum and the sum of their squares follow sums over the examples that have neither of
  two known values. So these examples must be enough where two values prevail, and with up to three values each of them.
- Of classes, and of the categories of a column, the smallest ones are hidden until those hidden are enough together:
  their number follows from the others.
- Names of classes and domains are values: a site tells those that enough of its examples have.

Errors tell the reason; numbers, rows and values stay in the site's log (`errors.UserError`, `private`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from fedbn_flwr.batch import Value, first
from fedbn_flwr.errors import DataError, error_if
from fedbn_flwr.tasks import REGRESSION

from .dataset import DataForm, DataSet
from .examples import MASK, Examples, main_input
from .moments import ROWS, Sums, sums_of

HIDDEN = -1  # instead of a number of examples

Groups = Sequence[Sequence[int]]  # the columns of the categories of a column


def check_number(examples: Examples, least: int) -> None:
    """Raise an error if the sums of so few examples would reveal them."""
    error_if(
        len(examples) < least,
        "it has fewer training examples than its min-batch, and doesn't send their sums, which would reveal them; "
        "use more examples, or lower min-batch in this node's config",
        f": it has {len(examples)}, and min-batch is {least}",
    )


def check_names(data: DataSet, least: int) -> None:
    """Raise an error if the names of the classes are values that few examples have."""
    counts = data.train.labels.bincount(minlength=data.classes)
    if least > 1 and data.names_from_rows and int(counts.min()) < least:
        raise DataError(
            "a class has fewer training examples than this node's min-batch, and a site doesn't tell the names of such "
            "classes; list all classes in data.class_names",
            f": {data.class_names[int(counts.argmin())]!r} has {int(counts.min())}, and min-batch is {least}",
        )


def blank_answer(data: DataForm, *, survey: bool = True, scaled: bool = False) -> dict[str, np.ndarray]:
    """Zeros in the form of an answer.

    It has the sums of the columns or channels and, in a survey or if targets are `scaled`, of the regression targets.
    In a survey it also has the number of examples of each class, or with each label.
    """
    targets = data.classes if data.task is REGRESSION and (survey or scaled) else 0
    sums = {"sums": np.zeros((ROWS, data.normalised + targets))}
    is_counted = data.task.form in ("classes", "labels") and not data.dense
    return sums | ({"counts": np.zeros(data.classes * is_counted, np.int64)} if survey else {})


def answer(
    data: DataForm, examples: Examples, least: int, groups: Groups = (), *, survey: bool = True, scaled: bool = False
) -> dict[str, np.ndarray]:
    """What a site tells: zeros for sums, and HIDDEN for numbers, that stay there."""
    check_number(examples, least)
    found, some = blank_answer(data, survey=survey, scaled=scaled), [(examples.inputs, groups)]
    some += [(examples.numbers, ())] if found["sums"].shape[1] > data.normalised else []
    found["sums"] = np.concatenate([_told(values, least, own) for values, own in some], axis=1)
    if survey and found["counts"].size:
        found["counts"] = _counts(data, examples, least)
    return found


def _told(values: Value, least: int, groups: Groups) -> Sums:
    sums = sums_of(values)
    if least > 1 and sums.size:
        sums[:, _withheld(values, least, groups)] = 0
    return sums


def _withheld(values: Value, least: int, groups: Groups) -> np.ndarray:
    """Which columns or channels would tell about fewer than `least` examples."""
    low, high = _ends(values)
    found = np.array([_tells_of_few(*ends, least) for ends in zip(low.T, high.T, strict=True)])
    for group in groups:
        counts = np.nansum(low[:, group], axis=0)
        found[np.array(group)[_hidden(counts, least)]] = True
    return found


def _tells_of_few(low: np.ndarray, high: np.ndarray, least: int) -> bool:
    given = ~np.isnan(low)
    number = int(given.sum())
    counts = np.sort(np.unique(low[given & (low == high)], return_counts=True)[1])
    if number and len(counts) < 4 and counts.sum() == number:  # which follow from number, sum and squares
        return bool(counts[0] < least)
    rest = number - int(counts[-2:].sum())
    return number < least or rest < min(least, number / 2)


def _ends(values: Value) -> np.ndarray:
    """The smallest and the largest value of each example in each column or channel, [2, N, C]; NaN if it has none."""
    whole: Any = main_input(values)
    if whole.ndim == 2:
        return np.stack([whole.cpu().numpy()] * 2)
    low = high = whole
    if isinstance(values, Mapping) and MASK in values:
        real = values[MASK].view(len(whole), *[1] * (whole.ndim - 2), -1).expand(whole.shape)
        low, high = whole.where(real, torch.inf), whole.where(real, -torch.inf)
    return np.stack([low.flatten(2).amin(2).cpu().numpy(), high.flatten(2).amax(2).cpu().numpy()])


def _counts(data: DataForm, examples: Examples, least: int) -> np.ndarray:
    if data.task.form == "labels":
        counts = (first(examples.targets) > 0).sum(0).cpu().numpy()
        fewer = np.minimum(counts, len(examples) - counts)
        return np.where((fewer > 0) & (fewer < least), HIDDEN, counts)
    counts = np.bincount(examples.labels.cpu().numpy(), minlength=data.classes)
    counts[_hidden(counts, least)] = HIDDEN
    return counts


def _hidden(counts: np.ndarray, least: int) -> list[int]:
    """The smallest groups, until those hidden are large enough together."""
    hidden: list[int] = []
    for place in np.argsort(counts, kind="stable"):
        if counts[place] and (counts[place] < least or 0 < counts[hidden].sum() < least):
            hidden.append(int(place))
    return hidden
