"""Reads tables: finds the columns of inputs, labels and groups by the settings or by their types."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from fedbn_flwr.batch import count, tensors
from fedbn_flwr.errors import DataError, log_once
from fedbn_flwr.tasks import BINARY, CLASSIFICATION, SEGMENTATION

from . import IGNORED
from .catalogue import Entry
from .dataset import DataSet, Groups, fewer
from .examples import MASK, Examples, main_input
from .series import Long
from .source import Source
from .table import Column, Names, Table, Tables
from .values import Targets, check_texts, counts, inputs_of, targets_of

_INDEX = re.compile(r"(__index_level_\d+__|Unnamed: \d+)?")  # pandas writes it as a column, in CSV without a name


@dataclass(frozen=True)
class Opened:
    """All examples of tables, before any is left out. Image files are decoded when it is clear which are used."""

    data: DataSet  # of image files, the inputs are still the numbers of rows
    lacking: dict[str, Tensor]  # bool by split, whether an example has no label
    decoded: Callable[[DataSet], DataSet]


def read(source: Source, tables: Tables, entry: Entry | None = None, known: Sequence[object] = ()) -> DataSet:
    """The data set of these splits; `known` are the names of its classes, if the data have them elsewhere."""
    opened = open_examples(source, {"train": tables["train"]} if source.held_out else tables, entry, known)
    data, lacking = opened.data, opened.lacking
    for part, split in {"train": data.train, "test": data.test}.items():
        if part not in lacking:
            continue
        if source.missing is None and (gaps := counts(split.inputs, torch.isnan, data.input_names)):
            raise DataError(
                f"{source.name!r}: of the {len(split)} rows of {part} some have no value (NaN or null) in "
                f"{gaps}; set data.missing: mean, which puts the mean of the column in their place, or drop, which "
                "leaves out the rows"
            )
        if source.missing != "drop" and lacking[part].any():
            raise DataError(
                f"{source.name!r}: {int(lacking[part].sum())} of {len(split)} rows of {part} have no value in "
                f"{', '.join(map(repr, data.labels))}, the first is row {int(lacking[part].int().argmax())}; expected "
                "one in each row, or data.missing: drop, which leaves out these rows"
            )
    _check_entry(source, entry, data)
    if source.missing == "drop":
        data = data.complete(lacking)
    data = data.wanted()
    if source.held_out:
        data = data.held_out(source.held_out)
    data = opened.decoded(fewer(data, source.examples, source.test_examples))
    if data.train.shape != data.test.shape:
        raise DataError(
            f"data.name={data.name!r}: training examples have the shape {data.train.shape}, test examples "
            f"{data.test.shape}; expected the same: set data.size to resize image files, and use colour or "
            "greyscale images in both splits"
        )
    return data


def open_examples(source: Source, tables: Tables, entry: Entry | None = None, known: Sequence[object] = ()) -> Opened:
    """All examples of the tables, those without a label too."""
    train = next(iter(tables.values()))
    inputs, label, domain, group = _chosen(source, tables, entry)
    types = {name: train.columns[name].kind for name in inputs}
    apart = _held_out_by(source)
    keys: dict[str, Sequence[str | None]] = {key: (column,) for key, column in apart.items()}
    keys |= {"label": label, "domain": (domain,), "group": (group,), "series": (source.series,), "time": (source.time,)}
    uses = _uses(source, train, inputs, keys)
    if source.series is not None:
        tables, inputs = _of_series(source, tables, inputs, [*label, *filter(None, (domain, group)), *apart.values()])
        train = next(iter(tables.values()))
    domains = _groups(source, tables, "domain", domain, source.domains)
    groups = _groups(source, tables, "group", group, ())
    held_out_by = next((_groups(source, tables, key, column, ()) for key, column in apart.items()), None)
    image, mask = _files(train, inputs, label[0])
    classes = _known(source, entry, tables, label, tuple(map(str, known)))
    rows = {part: torch.arange(len(table.files)) for part, table in tables.items() if image}
    if mask is None:
        keeps = entry is not None and bool(entry.keep) and not source.class_names
        targets = targets_of(source, tables, label, classes, keeps=keeps)
    else:  # until files are decoded, masks are zeros
        targets = Targets(
            {part: torch.zeros_like(numbers) for part, numbers in rows.items()},
            classes,
            SEGMENTATION,
            {part: np.zeros(len(numbers), bool) for part, numbers in rows.items()},
        )
    if targets.task is SEGMENTATION and (image is None) != (mask is None):
        raise DataError(
            f"data.label={label[0]!r} of {source.name!r} has the type {train.columns[label[0]].kind}; expected a "
            f"number or a text for each example, or images and a column of masks. Its columns: {train}"
        )
    if targets.task in (CLASSIFICATION, BINARY) and len(targets.names) == 1:
        log_once(
            f"data.label: all examples of {source.name!r} have one class, {targets.names[0]!r}, so there is nothing to "
            "learn; list all classes in data.class_names, or choose another column"
        )
    values, features = (rows, ()) if image else inputs_of(source, tables, inputs)
    examples: dict[str, Examples] = {}
    for part, some in values.items():
        split = Examples(some, targets.values[part], rows=torch.arange(count(some)))
        of_groups = [getattr(grouping, part) for grouping in (domains, groups) if grouping is not None]
        _check_sizes(f"{source.name!r}: {part}", split, of_groups, dense=targets.task is SEGMENTATION and not image)
        examples[part] = split
    first, *others = examples.values()
    data = DataSet(
        source.name,
        first,
        others[0] if others else first,
        targets.names,
        domains,
        groups,
        held_out_by,
        train.commit,
        targets.task,
        features,
        uses,
        source.tokens,
        types,
        label,
    )
    decoded = partial(_decoded, source, tables, entry, image, mask) if image else lambda data: data
    return Opened(data, {part: torch.from_numpy(absent) for part, absent in targets.absent.items()}, decoded)


def _files(train: Table, inputs: Names, label: str) -> tuple[str | None, str | None]:
    """The columns of image files and of masks."""
    images = [column for column in inputs if train.columns[column].kind == "Image"]
    if images and len(inputs) > 1:
        raise DataError(f"data.inputs is {list(inputs)}; expected one column of images, or columns without images")
    return next(iter(images), None), label if train.columns[label].kind == "Image" else None


def _check_entry(source: Source, entry: Entry | None, data: DataSet) -> None:
    """Raise an error if the data have other classes than their entry in the catalogue."""
    if entry is None or source.class_names or data.task is not CLASSIFICATION or data.classes == entry.classes:
        return
    raise DataError(
        f"data.name={source.name!r} ({entry.title}) has {entry.classes} classes, the data {data.classes} in "
        f"{data.labels[0]!r}; choose another column with data.label, or other data by a folder or hub name"
    )


def _decoded(
    source: Source, tables: Tables, entry: Entry | None, image: str, mask: str | None, data: DataSet
) -> DataSet:
    """The data set with the images of the files, where it has the numbers of their rows."""
    from .decoding import Files  # needs packages of the extra `data`

    first, *others = tables.values()
    files = Files(
        first.files,
        image,
        source.name,
        source.pixels or (entry.pixels if entry else None),
        source.fit or (entry.fit if entry else "stretch"),
        mask,
        entry.ids if entry else None,
        data.classes,
        source.channels or 1,
    )
    of_test = replace(files, split=others[0].files) if others else files
    return replace(data, train=files.decoded(data.train), test=of_test.decoded(data.test))


# --- columns -----------------------------------------------------------------


def _chosen(source: Source, tables: Tables, entry: Entry | None) -> tuple[Names, Names, str | None, str | None]:
    """The columns of inputs, labels, domains and groups."""
    train = next(iter(tables.values()))
    columns = train.columns

    def check(key: str, names: Sequence[str | None]) -> None:
        if absent := [name for name in names if name is not None and name not in columns]:
            raise DataError(f"data.{key}={absent[0]!r} is not a column of {source.name!r}; its columns: {train}")

    def usual(*names: str | None) -> str | None:
        return next((name for name in names if name is not None and name in columns), None)

    def only(key: str, kind: str, skipped: Sequence[str | None] = ()) -> Names:
        """The only column of this type."""
        found = [name for name, column in columns.items() if column.kind == kind and name not in skipped]
        if len(found) != 1:
            raise DataError(f"{source.name!r}: name the column with data.{key}; its columns: {train}")
        return tuple(found)

    apart = _held_out_by(source)
    by_key: dict[str, Iterable[str | None]] = {"inputs": source.inputs, "label": source.label}
    by_key |= {"series": [source.series], "time": [source.time]}
    by_key |= {"domain": [source.domain], "categories": source.categories, **{k: [c] for k, c in apart.items()}}
    for key, names in by_key.items():
        check(key, [*names])
    listed = Entry("", 0, 0, None, image="inputs", label="labels") if entry is None else entry
    domain = source.domain or usual(listed.domain, "domain", "domains")
    if source.domains and domain is None:
        check("domain", ["domain"])
    # A site's own data may lack the column of groups; where it is needed, `partition` reports that.
    group = usual(source.group or "groups")
    named = usual(listed.label, "labels")
    label = source.label or ((named,) if named else only("label", "ClassLabel", [*source.inputs, domain]))
    inputs = source.inputs or tuple(filter(None, [usual(listed.image, "inputs")]))
    has_arrays = any(column.kind in ("Image", "array") for name, column in columns.items() if name not in label)
    if not inputs and not has_arrays:
        taken = (*label, domain, group, source.series, source.time, *apart.values())
        others = [name for name in columns if name not in taken and not _INDEX.fullmatch(name)]
        inputs = tuple(name for name in others if name in source.categories or columns[name].is_number)
        for name in others:
            if name not in inputs and columns[name].is_text:
                check_texts(source, name, columns[name].read())
        if not inputs and not any(column.kind == "Image" for column in columns.values()):
            raise DataError(
                f"{source.name!r} has no column left for inputs, data.label names {', '.join(label)}; expected other "
                f"columns of numbers or images, or texts with data.categories. Its columns: {train}"
            )
    inputs = inputs or only("inputs", "Image", label)
    for part, split in tables.items():
        if absent := [column for column in (*inputs, *label) if column not in split.columns]:
            raise DataError(f"{source.name!r}: {part} has no column {', '.join(absent)}; expected the columns of train")
    if twice := [column for column in inputs if column in label]:
        raise DataError(f"{twice[0]!r} is in data.inputs and data.label; expected it in one")
    return inputs, label, domain, group


def _held_out_by(source: Source) -> dict[str, str]:
    """The key and the column of `data.test.by` or `data.test.time`."""
    columns = {f"test.{key}": getattr(source.held_out, key, None) for key in ("by", "time")}
    return {key: column for key, column in columns.items() if column is not None}


def _of_series(source: Source, tables: Tables, inputs: Names, others: Sequence[str]) -> tuple[Tables, Names]:
    """The columns of a long table with a value for each series, and the names of the new inputs."""

    longs = {
        part: Long.of(
            f"{source.name!r}: {part}",
            table.columns[str(source.series)].read(),
            table.columns[source.time].read() if source.time else None,
        )
        for part, table in tables.items()
    }
    lengths = np.concatenate([long.lengths for long in longs.values()])
    length = int(lengths.max())
    # A site whose series happen to have one length gives the network a mask too, if it is for series of any length.
    new = ("inputs", MASK) if lengths.min() < length or source.shape[-1:] == (None,) else ("inputs",)

    def made(part: str, long: Long) -> Table:
        of = tables[part].columns
        values = {
            "inputs": Column("array", lambda: long.stacked([of[name].read() for name in inputs], length)),
            MASK: Column("array", lambda: long.mask(length)),
        }
        return Table(
            {name: values[name] for name in new}
            | {
                name: replace(of[name], read=partial(long.one_each, name, of[name].read()))
                for name in others
                if name in of
            }
        )

    return {part: made(part, long) for part, long in longs.items()}, new


def _uses(source: Source, train: Table, inputs: Names, keys: Mapping[str, Sequence[str | None]]) -> dict[str, str]:
    """What each column is for, or why it is not an input."""
    used = dict.fromkeys(inputs, "input")
    used |= {column: f"data.{key}" for key, some in keys.items() for column in some if column}
    return {
        name: used.get(name)
        or ("not in data.inputs" if source.inputs else "index of pandas" if _INDEX.fullmatch(name) else column.kind)
        for name, column in train.columns.items()
    }


def _groups(source: Source, tables: Tables, key: str, column: str | None, wanted: Sequence[str]) -> Groups | None:
    if column is None:
        return None
    values = {}
    for part, table in tables.items():
        if column not in table.columns:
            continue
        found = table.columns[column]
        if not found.is_single:
            raise DataError(
                f"data.{key}={column!r} of {source.name!r} has the type {found.kind}; expected a number or a text for "
                "each example"
            )
        values[part] = found.read().tolist()
        if absent := sum(value is None or value != value for value in values[part]):
            raise DataError(
                f"{source.name!r}: {absent} of {len(values[part])} rows of {part} have no value in {column!r}; "
                "expected one in each row"
            )
    if "test" not in tables:
        values["test"] = values["train"]
    return Groups.of(source.name, values, wanted)


def _known(source: Source, entry: Entry | None, tables: Tables, label: Names, given: Names) -> Names:
    """The names of the classes, if the settings, the data or the catalogue have them."""
    columns = [table.columns[label[0]] for table in tables.values()]
    if given or source.class_names:
        return given or source.class_names
    if columns[0].kind == "Image":
        if source.classes is None and not (entry and entry.names):
            raise DataError(
                f"{source.name!r} is a segmentation data set; give its number of classes with data.classes (pixels of "
                f"a mask are 0 to classes - 1, or {IGNORED} if they are ignored)"
            )
        return (entry and entry.names) or tuple(map(str, range(source.classes or 0)))
    found = [column.names for column in columns]
    if len(set(found)) > 1:
        raise DataError(
            f"data.name={source.name!r}: the training split has {len(found[0])} classes in {label[0]!r}, the test "
            f"split {len(found[1])}; they must be the same, or the names of data.class_names"
        )
    if entry is None or not entry.keep:
        return found[0]
    there = found[0] or tuple(map(str, columns[0].read().tolist()))
    if absent := [name for name in entry.keep if name not in there]:
        raise DataError(f"data.name={source.name!r} ({entry.title}): the data has no class {', '.join(absent)}")
    return entry.keep


def _check_sizes(where: str, split: Examples, groups: Sequence[Tensor | None], *, dense: bool) -> None:
    """Raise an error if arrays differ in their numbers of rows, or masks in size from the inputs."""
    found = {"inputs": tensors(split.inputs), "labels": tensors(split.targets), "domains or groups": groups}
    for what, values in found.items():
        if wrong := [len(some) for some in values if some is not None and len(some) != len(split)]:
            raise DataError(f"{where} has {len(split)} labels and {wrong[0]} {what}; expected as many")
    size = list(split.shape[1:])
    if dense and (masks := list(main_input(split.targets).shape[1:])) != size:
        raise DataError(f"{where} has inputs of size {size} and masks of {masks}; expected the same size")
