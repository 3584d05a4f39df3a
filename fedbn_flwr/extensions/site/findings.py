"""What a site's data contain, for a person who knows what they should. It is only printed there: nothing is sent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from fedbn_flwr.data.dataset import DataSet
from fedbn_flwr.data.examples import Examples, main_input
from fedbn_flwr.errors import few
from fedbn_flwr.results.report.tables import as_text
from fedbn_flwr.results.text import columns_in_words

_MOST = 100  # columns in the table
_GAPS = 0.1  # share of missing values that is worth a warning


def describe(dataset: DataSet, train: Examples, test: Examples, ranges: Mapping[str, tuple[float, float]]) -> str:
    """A line, and for a table one for each input."""
    parts = [f"{len(train):,} training and {len(test):,} test examples of shape {list(dataset.shape)}"]
    if dataset.task.form != "classes":
        parts.append(f"{dataset.task.targets}: {', '.join(dataset.class_names)}")
    elif dataset.dense:
        parts.append(f"{dataset.classes} classes per pixel")
    else:
        counts = torch.bincount(train.labels.cpu(), minlength=dataset.classes).tolist()
        named = [f"{name}: {count}" for name, count in zip(dataset.class_names, counts, strict=True)]
        parts.append(f"classes: {', '.join(named)}")
    if not (names := dataset.input_names):
        return "; ".join(parts)
    parts += columns_in_words(dataset.columns)[1:]
    return f"{'; '.join(parts)}\n{_table(names, _values(train, test), ranges)}"


def doubts(dataset: DataSet, train: Examples, test: Examples, *, is_own: bool) -> Iterator[tuple[str, str]]:
    """What may be wrong with the data, which are the site's own or a partition, each with what to do."""
    if not len(test):
        yield "no test examples", "add a test split; the site cannot evaluate its model"
    if not is_own:
        return
    names = dataset.input_names
    if dataset.task.form == "classes" and not dataset.dense:
        there = set(train.labels.cpu().unique().tolist())
        if absent := [name for number, name in enumerate(dataset.class_names) if number not in there]:
            cure = "fine if this site has no such examples; otherwise correct the labels, or data.class_names"
            yield f"no training examples of {few(absent, 10)}", cure
    if (copies := _copies(train, test)) > len(test) / 2:
        yield f"{copies} of {len(test)} test examples are training examples too", "use other examples for the test"
    for name, column in zip(names, _values(train, test).unbind(1) if names else (), strict=True):
        known = column[~column.isnan()]
        if (share := 1 - len(known) / len(column)) >= _GAPS:
            yield f"{share:.0%} of the values of {name} are missing", "fine if this site has no more of them"
        for extreme in known.aminmax() if len(known) else ():
            others = known[known != extreme]
            if len(others.unique()) > 2 and (others - extreme).abs().min() > others.max() - others.min():
                found = f"{name} is {extreme:g} in {len(known) - len(others)} rows, and in the others from "
                cure = "leave the field empty where a value is missing; correct the value, or its unit"
                yield f"{found}{others.min():g} to {others.max():g}", cure


def _values(train: Examples, test: Examples) -> Tensor:
    return torch.cat([main_input(split.inputs) for split in (train, test)])


def _table(names: Sequence[str], values: Tensor, ranges: Mapping[str, tuple[float, float]]) -> str:
    """A line for each input, in the order of the experiment."""
    rows = [("input", "missing", "lowest", "median", "highest", "data.ranges" if ranges else "")]
    for name, column in [*zip(names, values.unbind(1), strict=True)][:_MOST]:
        known = column[~column.isnan()]
        numbers = (known.min(), known.median(), known.max()) if len(known) else ()
        low, middle, high = [f"{number:g}" for number in numbers] or ["-"] * 3
        limits = "{:g} to {:g}".format(*ranges[name]) if name in ranges else ""
        rows.append((name, str(len(column) - len(known)), low, middle, high, limits))
    return as_text(rows) + (f"\n... and {len(names) - _MOST} more" if len(names) > _MOST else "")


def _copies(train: Examples, test: Examples) -> int:
    """The test examples with the inputs of a training example; none if training examples often agree."""
    seen, asked = ([hash(row.tobytes()) for row in main_input(split.inputs).numpy()] for split in (train, test))
    return sum(map(set(seen).__contains__, asked)) if len(set(seen)) > len(seen) / 2 else 0
