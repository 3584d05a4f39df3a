"""Reads tables: finds the columns of inputs, labels and groups by the settings or by their types."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from fedbn_flwr.batch import Value, count, tensors
from fedbn_flwr.errors import DataError, log_once
from fedbn_flwr.tasks import BINARY, CLASSIFICATION, SEGMENTATION

from . import IGNORED
from .catalogue import Entry
from .dataset import DataSet, Groups, fewer
from .examples import MASK, Examples, main_input
from .series import Long
from .source import PARTS, Source
from .table import Column, Names, Table, Tables
from .values import Targets, check_texts, counts, inputs_of, targets_of

_INDEX = re.compile(r"(__index_level_\d+__|Unnamed: \d+)?")  # pandas writes it as a column, in CSV without a name


# All examples; by split, which of them have no label (bool); and what decodes image files, whose inputs are the numbers
# of their rows until it is clear which are used.
Opened = tuple[DataSet, dict[str, Tensor], Callable[[DataSet], DataSet]]


def read(source: Source, tables: Tables, entry: Entry | None = None, known: Sequence[object] = ()) -> DataSet:
    """The data set of these splits; `known` are the names of its classes, if the data have them elsewhere."""
    splits = {"train": tables["train"]} if source.held_out else tables
    data, lacking, decoded = open_examples(source, splits, entry, known)
    for part, absent in lacking.items():
        inputs = getattr(data, part).inputs
        if source.missing is None and (gaps := counts(inputs, torch.isnan, data.input_names)):
            raise DataError(
                f"{source.name!r}: of the {len(absent)} rows of {part} some have no value (NaN or null) in "
                f"{gaps}; set data.missing: mean, which puts the mean of the column in their place, or drop, which "
                "leaves out the rows"
            )
        if source.missing != "drop" and absent.any():
            raise DataError(
                f"{source.name!r}: {int(absent.sum())} of {len(absent)} rows of {part} have no value in "
                f"{', '.join(map(repr, data.labels))}, the first is row {int(absent.int().argmax())}; expected "
                "one in each row, or data.missing: drop, which leaves out these rows"
            )
    is_fixed = entry is not None and not source.class_names and data.task is CLASSIFICATION
    if entry is not None and is_fixed and data.classes != entry.classes:
        raise DataError(
            f"data.name={source.name!r} ({entry.title}) has {entry.classes} classes, the data {data.classes} in "
            f"{data.labels[0]!r}; choose another column with data.label, or other data by a folder or hub name"
        )
    data = (data.complete(lacking) if source.missing == "drop" else data).wanted()
    data = data.held_out(source.held_out) if source.held_out else data
    data = decoded(fewer(data, source.examples, source.test_examples))
    if data.train.shape != data.test.shape:
        raise DataError(
            f"data.name={data.name!r}: training examples have the shape {data.train.shape}, test examples "
            f"{data.test.shape}; expected the same: set data.size to resize image files, and use colour or "
            "greyscale images in both splits"
        )
    return data


def open_examples(given: Source, tables: Tables, entry: Entry | None = None, known: Sequence[object] = ()) -> Opened:
    """All examples of the tables, those without a label too."""
    source, train = _complete(given, tables, entry), next(iter(tables.values()))
    name, inputs, label = source.name, source.inputs, source.label
    types = {column: train.columns[column].kind for column in inputs}
    used = dict.fromkeys(inputs, "input") | {column: f"data.{key}" for key, column in _named(source)}
    other = "not in data.inputs" if given.inputs else ""
    uses = {
        column: used.get(column) or other or ("index of pandas" if _INDEX.fullmatch(column) else found.kind)
        for column, found in train.columns.items()
    }
    if source.series is not None:
        tables, inputs = of_series(source, tables)
        train = next(iter(tables.values()))
    grouping = [(key, column) for key, column in _named(source) if key in ("domain", "group") or "." in key]
    groups = {key: _groups(name, tables, key, column, source.domains) for key, column in grouping}
    images = [column for column in inputs if train.columns[column].kind == "Image"]
    if images and len(inputs) > 1:
        raise DataError(f"data.inputs is {list(inputs)}; expected one column of images, or columns without images")
    masks = train.columns[label[0]].kind == "Image"
    classes = _known(source, entry, tables, tuple(map(str, known)))
    if masks:  # zeros until files are decoded
        zeros = {part: torch.zeros(len(table), dtype=torch.int64) for part, table in tables.items()}
        absent = {part: some.bool().numpy() for part, some in zeros.items()}
        targets = Targets({**zeros}, classes, SEGMENTATION, absent)
    else:
        keeps = entry is not None and bool(entry.keep) and not source.class_names
        targets = targets_of(source, tables, label, classes, keeps=keeps)
    is_dense = targets.task is SEGMENTATION
    if is_dense and bool(images) != masks:
        raise DataError(
            f"data.label={label[0]!r} of {name!r} has the type {train.columns[label[0]].kind}; expected a number or a "
            f"text for each example, or images and a column of masks. Its columns: {train}"
        )
    if targets.task in (CLASSIFICATION, BINARY) and len(targets.names) == 1:
        log_once(
            f"data.label: all examples of {name!r} have one class, {targets.names[0]!r}, so there is nothing to "
            "learn; list all classes in data.class_names, or choose another column"
        )
    values: dict[str, Value]
    features: Names
    if images:
        values, features = {part: torch.arange(len(table)) for part, table in tables.items()}, ()
    else:
        values, features = inputs_of(source, tables, inputs)
    splits: list[Examples] = []
    for (part, some), key in zip(values.items(), PARTS, strict=False):
        splits.append(split := Examples(some, targets.values[part], rows=torch.arange(count(some))))
        of_groups = [found for group in groups.values() if (found := getattr(group, key)) is not None]
        if wrong := [len(each) for each in (*tensors(some), *of_groups) if len(each) != len(split)]:
            raise DataError(
                f"{name!r}: {part} has {len(split)} labels and {wrong[0]} inputs, domains or groups; expected as many"
            )
        if is_dense and not images and (size := main_input(split.targets).shape[1:]) != (whole := split.shape[1:]):
            raise DataError(
                f"{name!r}: {part} has inputs of size {list(whole)} and masks of {list(size)}; expected the same size"
            )
    data = DataSet(
        name,
        splits[0],
        splits[-1],
        targets.names,
        groups.get("domain"),
        groups.get("group"),
        next((group for key, group in groups.items() if key.startswith("test.")), None),
        train.commit,
        targets.task,
        features,
        uses,
        source.tokens,
        types,
        label,
    )
    decoded = (
        partial(_decoded, source, tables, entry, images[0], label[0] if masks else None) if images else lambda d: d
    )
    return data, {part: torch.from_numpy(some) for part, some in targets.absent.items()}, decoded


def _decoded(
    source: Source, tables: Tables, entry: Entry | None, image: str, mask: str | None, data: DataSet
) -> DataSet:
    """The data set with the images of the files, where it has the numbers of their rows."""
    from .decoding import Files  # needs packages of the extra `data`

    splits = [table.files for table in tables.values()]
    files = Files(
        splits[0],
        image,
        source.name,
        source.pixels or (entry.pixels if entry else None),
        source.fit or (entry.fit if entry else "stretch"),
        mask,
        entry.ids if entry else None,
        data.classes,
        source.channels or 1,
    )
    return replace(data, train=files.decoded(data.train), test=replace(files, split=splits[-1]).decoded(data.test))


# --- columns -----------------------------------------------------------------


def _named(source: Source) -> list[tuple[str, str]]:
    """The keys that name columns which are no inputs, each with its column."""
    found = [(f"test.{key}", getattr(source.held_out, key, None)) for key in ("by", "time")]
    found += [("label", column) for column in source.label]
    found += [(key, getattr(source, key)) for key in ("domain", "group", "series", "time")]
    return [(key, column) for key, column in found if column is not None]


def _complete(source: Source, tables: Tables, entry: Entry | None) -> Source:
    """With the columns of inputs, labels, domains and groups that the settings leave open."""
    train = next(iter(tables.values()))
    columns = train.columns

    def usual(*names: str | None) -> str | None:
        return next((name for name in names if name is not None and name in columns), None)

    def only(key: str, kind: str, skipped: Sequence[str | None] = ()) -> Names:
        """The only column of this type."""
        found = [name for name, column in columns.items() if column.kind == kind and name not in skipped]
        if len(found) != 1:
            raise DataError(f"{source.name!r}: name the column with data.{key}; its columns: {train}")
        return tuple(found)

    listed = Entry("", 0, 0, None, image="inputs", label="labels") if entry is None else entry
    domain = source.domain or usual(listed.domain, "domain", "domains") or ("domain" if source.domains else None)
    # A site's own data may lack the column of groups; where it is needed, `partition` reports that.
    group = usual(source.group or "groups")
    named = source.model_copy(update={"domain": domain, "group": group})
    wanted = [("inputs", name) for name in source.inputs] + [("categories", name) for name in source.categories]
    for key, name in (*wanted, *_named(named)):
        if name not in columns:
            raise DataError(f"data.{key}={name!r} is not a column of {source.name!r}; its columns: {train}")
    found = usual(listed.label, "labels")
    label = source.label or ((found,) if found else only("label", "ClassLabel", [*source.inputs, domain]))
    inputs = source.inputs or tuple(filter(None, [usual(listed.image, "inputs")]))
    has_arrays = any(column.kind in ("Image", "array") for name, column in columns.items() if name not in label)
    if not inputs and not has_arrays:
        taken = {column for _, column in _named(named)} | {*label}
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
    return named.model_copy(update={"inputs": inputs, "label": label})


def of_series(source: Source, tables: Tables) -> tuple[Tables, Names]:
    """The columns of a long table with a value for each series or window, and the names of the new inputs."""
    longs = {
        part: Long(
            f"{source.name!r}: {part}",
            table.columns[str(source.series)].read(),
            table.columns[source.time].read() if source.time else None,
            source.window,
        )
        for part, table in tables.items()
    }
    lengths = np.concatenate([long.lengths for long in longs.values()])
    length = int(lengths.max())
    # A site whose series happen to have one length gives the network a mask too, if it is for series of any length.
    new = ("inputs", MASK) if lengths.min() < length or source.shape[-1:] == (None,) else ("inputs",)
    found = {}
    for part, long in longs.items():
        of = tables[part].columns
        values = {"inputs": long.stacked([of[name].read() for name in source.inputs], length), MASK: long.mask(length)}
        made = {name: Column("array", partial(np.asarray, values[name])) for name in new}
        others = [name for key, name in _named(source) if key != "time" and name in of]
        one = {name: replace(of[name], read=partial(long.one_each, name, of[name].read())) for name in others}
        found[part] = Table(made | one)
    return found, new


def _groups(name: str, tables: Tables, key: str, column: str, wanted: Sequence[str]) -> Groups:
    values: list[Sequence[object] | None] = []
    for part, table in tables.items():
        if column not in table.columns:
            values.append(None)
            continue
        found = table.columns[column]
        if not found.is_single:
            raise DataError(
                f"data.{key}={column!r} of {name!r} has the type {found.kind}; expected a number or a text for each "
                "example"
            )
        values.append(rows := found.read().tolist())
        if absent := sum(value is None or value != value for value in rows):
            raise DataError(
                f"{name!r}: {absent} of {len(rows)} rows of {part} have no value in {column!r}; expected one in each "
                "row"
            )
    return Groups.of(name, values, wanted if key == "domain" else ())


def _known(source: Source, entry: Entry | None, tables: Tables, given: Names) -> Names:
    """The names of the classes, if the settings, the data or the catalogue have them."""
    columns = [table.columns[source.label[0]] for table in tables.values()]
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
            f"data.name={source.name!r}: the training split has {len(found[0])} classes in {source.label[0]!r}, the "
            f"test split {len(found[1])}; they must be the same, or the names of data.class_names"
        )
    if entry is None or not entry.keep:
        return found[0]
    there = found[0] or tuple(map(str, columns[0].read().tolist()))
    if absent := [name for name in entry.keep if name not in there]:
        raise DataError(f"data.name={source.name!r} ({entry.title}): the data has no class {', '.join(absent)}")
    return entry.keep
