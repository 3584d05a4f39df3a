"""A data set: its training and test examples, its classes, and the groups that its examples belong to."""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from decimal import Decimal, InvalidOperation
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbn_flwr import seeding
from fedbn_flwr.batch import Value, tensors
from fedbn_flwr.errors import DataError, error_if, log_once
from fedbn_flwr.messages import protocol
from fedbn_flwr.tasks import CLASSIFICATION, MULTILABEL, REGRESSION, SEGMENTATION, Task

from . import Moments, Size
from .examples import Examples, main_input
from .moments import moments_from, sums_of
from .source import HeldOut

_MOST = 2**28  # bytes of an array that its checksum reads

Schema = Mapping[str, list[str]]  # names and types of the inputs, names of the labels and of the classes


def agreed_names(schema: Schema) -> dict[str, list[str]]:
    """The names of columns and of classes that all clients' data must have, by the keys of messages.

    Inputs that are one array or image for each example have no such names.
    """
    kinds = schema.get("types", [])
    is_one = len(kinds) < 2 and any(kind == "array" or kind[:1].isupper() for kind in kinds)
    inputs = [] if is_one else [*schema.get("inputs", ())]
    return {protocol.INPUTS: inputs, protocol.CLASSES: [*schema.get("classes", ())]}


BINS = 10  # of regression targets, where examples are drawn or divided in proportion to their targets


@dataclass(frozen=True)
class Groups:
    """What groups the examples: a column of domains, or of sites, patients or users; or their targets (`strata`)."""

    names: tuple[str, ...]
    train: Tensor  # int64 [N], an index into names, -1 for another value; always on the CPU
    test: Tensor | None  # None if the test split has no such column

    def select(self, train: Tensor, test: Tensor) -> Groups:
        return replace(self, train=self.train[train], test=None if self.test is None else self.test[test])


def in_order(texts: Collection[str]) -> list[str]:
    """Numbers by their value; other texts as a person sorts them, `site2` before `site10`."""
    with suppress(InvalidOperation):  # one of them is not a number
        return sorted(texts, key=lambda text: (Decimal(text), text))

    def parts(text: str) -> list[tuple[int, str] | str]:
        words = re.split(r"(\d+)", text)  # digits at the odd places; a longer number is a greater one
        return [(len(word.lstrip("0")), word.lstrip("0")) if i % 2 else word for i, word in enumerate(words)]

    return sorted(texts, key=lambda text: (parts(text), text))


def numbers(values: Sequence[str], names: Sequence[str]) -> Tensor:
    """The index of each value among the names; -1 for other values."""
    place = {name: i for i, name in enumerate(names)}
    return torch.tensor([place.get(value, -1) for value in values], dtype=torch.int64)


class DataForm:
    """The properties of examples that a model depends on, from a data set or from the settings."""

    classes: int  # the number of classes, of labels, or of regression targets
    shape: tuple[int, ...]  # of the inputs of one example
    task: Task
    tokens: int | None

    @property
    def outputs(self) -> int:
        """The number of the model's outputs."""
        return self.task.outputs(self.classes)

    @property
    def dense(self) -> bool:
        """Whether labels are per pixel."""
        return self.task is SEGMENTATION

    @property
    def channels(self) -> int:
        return self.shape[0] if self.shape else 0

    @property
    def normalised(self) -> int:
        """The number of features or channels that are normalised; none of tokens."""
        return 0 if self.tokens is not None else self.channels

    @property
    def size(self) -> Size:
        return self.shape[1:]  # type: ignore[return-value]

    @property
    def is_image(self) -> bool:
        return len(self.shape) == 3 and isinstance(self.blank(0), Tensor)

    def blank(self, number: int) -> Value:
        """Inputs of this form that are zero, to try a model."""
        raise NotImplementedError


@dataclass(frozen=True)
class DataSet(DataForm):
    name: str
    train: Examples
    test: Examples
    class_names: tuple[str, ...]  # or the names of labels, or of regression targets
    domains: Groups | None = None
    groups: Groups | None = None  # sites, patients, users: the clients of a natural partition
    # What a split keeps on one side: the examples with one value of data.test.by or data.test.time, or of one series.
    apart: Groups | None = None
    commit: str | None = None  # of the hub's repository that the examples are from
    task: Task = CLASSIFICATION
    input_names: tuple[str, ...] = ()  # of the features
    columns: Mapping[str, str] = field(default_factory=dict)  # what each is for, or why it is not an input
    given_tokens: int | None = None  # data.tokens, on which sites agree
    types: Mapping[str, str] = field(default_factory=dict)  # of the columns of inputs, in the model's order
    labels: tuple[str, ...] = ()  # columns
    names_from_rows: bool = False  # the names of the classes are values of the column of labels

    @property
    def classes(self) -> int:  # type: ignore[override]
        return len(self.class_names)

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.train.shape

    @cached_property  # a client builds its model for each message
    def tokens(self) -> int | None:  # type: ignore[override]
        """The number of tokens, where the inputs are whole numbers."""
        parts = [main_input(part.inputs) for part in (self.train, self.test)]
        if parts[0].dtype is not torch.int64:
            return None
        return self.given_tokens or 1 + max(int(part.max()) for part in parts)

    @property
    def nbytes(self) -> int:
        return self.train.nbytes + self.test.nbytes

    @property
    def groupings(self) -> list[Groups]:
        """The columns by which the examples are grouped, if there are any."""
        return [grouping for grouping in (self.domains, self.groups) if grouping is not None]

    @property
    def schema(self) -> Schema:
        """On what the data of all clients must agree, and what model.json keeps for new data."""
        return {
            "inputs": [*self.types],
            "types": [*self.types.values()],
            "label": [*self.labels],
            "classes": [*self.class_names],
        }

    def blank(self, number: int) -> Value:
        return self.train.blank(number)

    @cached_property
    def moments(self) -> Moments:
        """Mean and standard deviation of each feature or channel over the training examples; see moments.py."""
        return moments_from([sums_of(self.train.inputs)], self.input_names)

    @cached_property
    def units(self) -> Moments:
        """The same of the regression targets."""
        return moments_from([sums_of(self.train.numbers)], self.class_names)

    @cached_property  # the runs of an experiment share it
    def checksum(self) -> str:
        """A checksum of the examples and their groups, equal on all machines; it samples large arrays."""
        values = [value for part in (self.train, self.test) for value in (part.inputs, part.targets)]
        parts = [
            *(part for value in values for part in tensors(value)),
            *(grouping.train for grouping in self.groupings),
        ]
        parts += [grouping.test for grouping in self.groupings if grouping.test is not None]
        found = zlib.crc32(repr((self.class_names, *(grouping.names for grouping in self.groupings))).encode())
        for part in parts:
            found = zlib.crc32(part[:: 1 + part.nbytes // _MOST].cpu().contiguous().numpy().data, found)
        return f"{found:08x}"

    def strata(self) -> Groups:
        """Classes, combinations of labels, or ten ranges of the (first) number with equally many examples."""
        train, test = self.train.labels.cpu(), self.test.labels.cpu()
        targets: list[Any] = [self.train.targets, self.test.targets]
        if self.task is REGRESSION:
            values = [some.cpu().double().reshape(len(some), -1)[:, 0].contiguous() for some in targets]
            edges = torch.from_numpy(np.quantile(values[0].numpy(), np.linspace(0, 1, BINS + 1)[1:-1])).unique()
            train, test = (torch.bucketize(some, edges, right=True) for some in values)
            starts = [f"from {edge:g}" for edge in edges.tolist()]
            return Groups((f"below {edges[0]:g}", *starts), train, test)
        if self.task is MULTILABEL:
            rows = torch.cat([some.cpu() > 0 for some in targets])
            kinds, places = rows.unique(dim=0, return_inverse=True)
            names = ["+".join(np.array(self.class_names)[kind.numpy()]) or "none" for kind in kinds]
            return Groups(tuple(names), places[: len(train)], places[len(train) :])
        classes = ("examples",) if self.dense else self.class_names  # labels of pixels are not counted
        return Groups(classes, train, test)

    def select(self, train: Tensor, test: Tensor) -> DataSet:
        """The data set with only these rows of its splits."""
        groups = {key: getattr(self, key) for key in ("domains", "groups", "apart")}
        kept = {key: some and some.select(train, test) for key, some in groups.items()}
        return replace(self, train=self.train.select(train), test=self.test.select(test), **kept)

    def usable(self, part: str, rows: Tensor, absent: Tensor | None) -> Tensor:
        """Those of the rows of a split that have a wanted class and domain; DataError if none is left.

        `absent` are the rows of the table without a label. If it is given, neither they nor rows that lack an input
        (NaN) are used; the log has their number.
        """
        words = {"train": "training"}.get(part, part)
        if absent is not None:
            there = rows[~(absent | self.train.gaps)[rows]]
            problem = f"every {words} example of {self.name!r} ({len(rows)}) lacks an input or a label, so none is left"
            error_if(not len(there), problem)
            if dropped := len(rows) - len(there):
                log_once(f"data.missing: drop leaves out {dropped} of {len(rows)} {words} examples of {self.name!r}")
            rows = there
        rows = rows[self.train.labels[rows] >= 0]
        if (domains := getattr(self.domains, part, None)) is not None:
            rows = rows[domains[rows] >= 0]
        of_domains = f" of {', '.join(self.domains.names)}" if self.domains is not None else ""
        error_if(not len(rows), f"{self.name!r} has no {words} examples{of_domains}")
        return rows

    def standardised(self) -> DataSet:
        """With inputs of zero mean and unit deviation over the training examples of each group, or of all."""
        inputs = self.train.inputs
        if not isinstance(inputs, Tensor) or not inputs.is_floating_point():
            raise DataError(f"data.normalise is 'own', which is for numbers, but {self.name!r} has other inputs")
        whole = (torch.zeros(len(part), dtype=torch.int64) for part in (self.train, self.test))
        groups = self.groups or Groups((self.name,), *whole)
        present = groups.train.unique()
        if groups.test is None or not torch.isin(groups.test, present).all():
            raise DataError(
                f"data.normalise is 'own', but {self.name!r} has test examples of groups without training examples"
            )
        found = [moments_from([sums_of(inputs[groups.train == group])], self.input_names) for group in present]
        mean, deviation = torch.tensor(found, dtype=torch.float64).unbind(1)  # [groups, channels]

        def scaled(split: Examples, group_of: Tensor) -> Examples:
            rows = torch.searchsorted(present, group_of)
            form = (len(split), -1, *[1] * (inputs.ndim - 2))
            values = (main_input(split.inputs) - mean[rows].view(form)) / deviation[rows].view(form)
            return replace(split, inputs=values.to(inputs.dtype))

        return replace(self, train=scaled(self.train, groups.train), test=scaled(self.test, groups.test))

    def held_out(self, test: HeldOut) -> DataSet:
        """With a test split drawn from the examples, in proportion of classes (or ranges), domains and groups.

        The draw depends on `test` alone: neither on the seed of the run nor on the clients.
        """
        is_test = self._is_late(test) if test.time is not None else self._is_drawn(test)
        return self.select(~is_test, is_test)

    def _is_drawn(self, test: HeldOut) -> Tensor:
        """Which examples are drawn, all or none of those that have the same value of `data.test.by`."""
        units = np.arange(len(self.train)) if self.apart is None else self.apart.train.numpy()
        _, first, unit = np.unique(units, return_index=True, return_inverse=True)
        # A patient counts where the first of its examples does.
        columns = [grouping.train.cpu()[first] for grouping in (self.strata(), *self.groupings)]
        if self.apart is not None:  # the patients may be the groups
            columns = [column for column in columns if len(column.unique()) < len(first)] or [torch.zeros(len(first))]
        purpose, number, total = "held-out test examples", int(test.split or 0), len(first)
        kept_whole = "series" if test.by is None else f"values of data.test.by={test.by!r}"
        what = f"{total} {'examples' if self.apart is None else kept_whole} of {self.name!r}"
        if test.folds is not None:
            error_if(test.folds > total, f"data.test.folds is {test.folds}, more than the {what}")
            drawn = deal(columns, purpose, number // test.folds) % test.folds == number % test.folds
            return drawn[unit]
        assert test.share is not None
        count = round(test.share * total)
        error_if(not 0 < count < total, f"data.test is {test.share:g}, which is {count} of {what}")
        return torch.from_numpy(np.isin(unit, draw(count, columns, purpose, number).numpy()))

    def _is_late(self, test: HeldOut) -> Tensor:
        """Which examples are of the last times; as many times as give the share best."""
        assert self.apart is not None
        assert test.share is not None
        times = self.apart.names
        if wrong := [time for time in times if not re.match(r"-?\d*\.?\d+(e[+-]?\d+)?$|\d{4}-\d", time)]:
            raise DataError(
                f"data.test.time={test.time!r}: {self.name!r} has other times than numbers, or dates that begin with "
                "the year, such as 2024-03-31",
                f": {wrong[0]!r}",
            )
        counts = self.apart.train.bincount(minlength=len(times))
        late = counts.flip(0).cumsum(0)[:-1]  # examples of the last time, the last two, ...
        problem = f"data.test.time={test.time!r}: all examples of {self.name!r} are of one time"
        error_if(not len(late), problem, f": {times[0]!r}")
        number = 1 + int((late - test.share * len(self.train)).abs().argmin())
        return self.apart.train >= len(times) - number

    def to(self, device: torch.device, most: float = math.inf) -> DataSet:
        """On a device, as a whole if it has at most `most` bytes, or else batch by batch."""
        most = most if self.nbytes <= most else 0
        return replace(self, train=self.train.to(device, most), test=self.test.to(device, most))


# --- fewer examples ----------------------------------------------------------


def fewer(dataset: DataSet, examples: int | None, test_examples: int | None) -> DataSet:
    """The data set with this many training and test examples, in the same proportions of classes, domains and groups.

    None keeps all.

    The draw is fixed: all runs and all seeds get the same examples, and a smaller number is a subset of a larger one,
    up to rounding in each group.
    """
    groupings, rows = [dataset.strata(), *dataset.groupings], []
    for key, part, words, count in (
        ("examples", "train", "training", examples),
        ("test_examples", "test", "test", test_examples),
    ):
        columns = [column for grouping in groupings if (column := getattr(grouping, part)) is not None]
        total = len(columns[0])
        error_if((count or 0) > total, f"data.{key} is {count}, but {dataset.name!r} has {total} {words} examples")
        rows.append(torch.arange(total) if count is None else draw(count, columns))
    return dataset.select(*rows)


def _combinations(columns: Sequence[Tensor]) -> tuple[np.ndarray, np.ndarray]:
    """The number of each row's combination of values, and how many rows have each."""
    values = np.stack([column.cpu().numpy() for column in columns])
    _, group, sizes = np.unique(values, axis=1, return_inverse=True, return_counts=True)
    return group.reshape(-1), sizes


def deal(columns: Sequence[Tensor], purpose: str, number: int) -> Tensor:
    """A place for each row, in a random order of the rows of each combination of the columns' values."""
    group, _ = _combinations(columns)
    order = np.random.default_rng(seeding.seed_for(number, f"{purpose}, folds")).permutation(len(group))
    return torch.from_numpy(order[np.argsort(group[order], kind="stable")]).argsort()


def draw(count: int, columns: Sequence[Tensor], purpose: str = "fewer images", number: int = 0) -> Tensor:
    """`count` rows, ascending, in proportion to each combination of the columns' values, by largest remainders."""
    group, sizes = _combinations(columns)
    counts, remainders = np.divmod(sizes * count, len(group))
    # Without this, the first classes would always win among equal remainders.
    tie = np.random.default_rng(seeding.seed_for(number, f"{purpose}, remainders")).permutation(len(sizes))
    counts[np.lexsort((tie, -remainders))[: count - counts.sum()]] += 1
    order = np.random.default_rng(seeding.seed_for(number, purpose)).permutation(len(group))
    shuffled = group[order]
    kept = [order[shuffled == number][:some] for number, some in enumerate(counts)]
    return torch.from_numpy(np.sort(np.concatenate(kept)))
