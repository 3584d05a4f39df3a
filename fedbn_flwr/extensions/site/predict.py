"""Predicts new data with a model from a run. The run's settings and its model.json decide how the data are read."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import datasets
import numpy as np
import torch
from torch import Tensor, nn

from fedbn_flwr.batch import count, tensors
from fedbn_flwr.client.evaluation import metric_inputs
from fedbn_flwr.client.losses import logits_of
from fedbn_flwr.data.batches import TestBatches
from fedbn_flwr.data.catalogue import CATALOGUE
from fedbn_flwr.data.columns import of_series, open_examples, read
from fedbn_flwr.data.dataset import DataSet
from fedbn_flwr.data.folders import open_new, open_splits
from fedbn_flwr.data.paths import check_rights
from fedbn_flwr.data.source import Source
from fedbn_flwr.data.table import Column, Table
from fedbn_flwr.data.values import counts
from fedbn_flwr.errors import UserError, few
from fedbn_flwr.experiment.file.layers import read_experiment
from fedbn_flwr.experiment.settings import Data
from fedbn_flwr.results.folder.reader import RunReader
from fedbn_flwr.tasks import CLASSIFICATION, TASKS, Task
from fedbn_flwr.trees import Json

_PART = "the file"  # in errors, the name of the only split


@dataclass(frozen=True)
class Predictions:
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]
    said: Sequence[str]  # what they are of, and how many are right


def predictions(folder: RunReader, model: nn.Module, path: Path, ident: str | None = None) -> Predictions:
    """A row for each example: its place, its file or id, its label if it has one, the prediction and probabilities.

    From a folder that a site trains on, these are its test examples; otherwise all rows of a table, or all images of a
    folder. The label is empty where an example has none, and so is the prediction of an example that training would
    leave out.
    """
    check_rights(path := path.expanduser())
    if not path.exists():
        raise UserError(f"--data {str(path)!r}: there is no such file or folder")
    run, summary = read_experiment(folder.config()).runs[0], folder.summary()
    task = TASKS[summary.task] if summary and summary.task else CLASSIFICATION
    if not task.form or task.name == "segmentation":
        raise UserError(
            f"the run is for {task.name}; expected a run that predicts classes, labels or numbers for each example"
        )
    described = folder.model_description()
    source = _source(run.source, described, task, path)
    table, data, said = _opened(run.source, source, described, path, ident)
    examples, missing = data.train, torch.zeros(len(data.train), dtype=torch.bool)
    if source.missing == "drop":
        absent = [some.isnan().reshape(len(some), -1).any(1) for some in tensors(examples.inputs)]
        missing = torch.stack(absent).any(0)
    there = (~missing).nonzero()[:, 0]
    batches = TestBatches(examples, folder.moments(), run.evaluate.batch_size, there)
    with torch.no_grad():
        scores = torch.cat([*_outputs(model, batches, task)]) if len(there) else torch.empty(0, 0)
    names, labels = described["classes"] or data.class_names, _labels(data)
    made: dict[int, list[object]] = {}
    for row, values in zip(there.tolist(), scores.tolist(), strict=True):
        best = [names[int(np.argmax(values))]] if task.form == "classes" else []
        made[row] = [*best, *(f"{value:.6g}" for value in values)]
    assert examples.rows is not None, "examples of a table have rows"
    columns: dict[str, Sequence[object]] = {"row": examples.rows.tolist()}
    if (image := next((name for name in data.types if table.columns[name].kind == "Image"), None)) is not None:
        columns["file"] = np.array(_file_names(table, image, path))[examples.rows].tolist()
    if source.series is not None:
        windows = of_series(source, {_PART: table})[0][_PART]
        columns[source.series] = windows.columns[source.series].read().tolist()
    elif ident is not None:
        columns[ident] = table.columns[ident].read()[examples.rows].tolist()
    said = [f"{path}: {len(examples)} examples", *said]
    if task.form == "classes" and any(labels):
        columns["label"] = labels
        right = [made[row][0] == label for row, label in enumerate(labels) if label and row in made]
        said.append(f"accuracy {sum(right) / max(1, len(right)):.4f}: {sum(right)} of {len(right)} labels")
    if without := sum(not label for label in labels) if "label" in columns else 0:
        said.append(f"without a label: {without} examples")
    if missing.any():
        said.append(f"without a prediction: {int(missing.sum())} examples, which lack an input (data.missing is drop)")
    words = "probability " if task.form != "numbers" else ""
    scored = [*(["prediction"] if task.form == "classes" else []), *(words + name for name in names)]
    blank = [""] * len(scored)
    rows = [[*cells, *made.get(row, blank)] for row, cells in enumerate(zip(*columns.values(), strict=True))]
    return Predictions([*columns, *scored], rows, said)


def _source(data: Data, described: Json, task: Task, path: Path) -> Source:
    """How to read new data: the columns of model.json by their names, and the classes of the run."""
    names = tuple(described["classes"] or map(str, range(data.classes or 0)))
    entry, shape = CATALOGUE.get(data.name), described["build"]["input_shape"]
    inputs = tuple(described.get("inputs", ())) or data.inputs
    changes = {
        "name": str(path),
        "inputs": inputs,
        "label": tuple(described.get("label", ())) or data.label or ("label",),
        "task": task.name,
        "class_names": names if task.form == "classes" else (),
        "channels": shape[0] if len(shape) == 3 else None,
        "size": data.size or (entry.size if entry else None),
        "fit": data.fit or (entry.fit if entry else None),
    }
    kept = {"series", "time", "window", "categories", "ranges", "missing", "shape", "tokens", "train", "test"}
    return Source(**(data.model_dump(include=kept) | changes))


def _opened(
    data: Data, source: Source, described: Json, path: Path, ident: str | None
) -> tuple[Table, DataSet, list[str]]:
    """The table, its examples, and what is ignored."""
    is_site = path.is_dir() and any(path.glob(f"{source.train or 'train'}*"))
    if is_site:
        tables, _ = open_splits(source, path, None)
        table = tables["train" if source.held_out else "test"]
    else:
        table = open_new(source, path)
    said = _checked(table, source, described, path, ident)
    if data.normalise == "own" and not is_site:
        raise UserError(
            f"the run normalises each site's data by their own mean and deviation; give --data the site's folder, in "
            f"which {source.train or 'train'}* are the examples that it trains on"
        )
    if is_site and (source.held_out or data.normalise == "own"):
        found = read(source, tables)
        found = found.standardised() if data.normalise == "own" else found
        return table, replace(found, train=found.test), said
    kind, nothing = ("string", None) if source.class_names else ("float64", np.nan)
    absent = Column(kind, functools.partial(np.full, len(table), nothing))
    table = replace(table, columns=dict.fromkeys(source.label, absent) | dict(table.columns))
    opened, _, decoded = open_examples(source.model_copy(update={"test": None}), {_PART: table})
    gaps = counts(opened.train.inputs, torch.isnan, opened.input_names)
    if gaps and not source.missing:
        raise UserError(
            f"{str(path)!r}: of the {len(table)} rows of the file some have no value (NaN or null) in {gaps}; fill "
            "them in, or leave out these rows: the run was trained without data.missing"
        )
    found = decoded(opened)
    shape, wanted = list(found.shape), list(described["build"]["input_shape"])
    if shape != wanted and (len(shape) != len(wanted) or shape[0] != wanted[0] or len(shape) == 1):
        raise UserError(
            f"{str(path)!r} has inputs of shape {shape}, but the model takes {wanted}"
            + ("; convert the images to greyscale" if wanted[:1] == [1] and shape[:1] == [3] else "")
        )
    return table, found, said


def _checked(table: Table, source: Source, described: Json, path: Path, ident: str | None) -> list[str]:
    """Raise an error for columns that the model needs and the table lacks; say which columns are ignored."""
    there = f"; its columns: {table}"
    if ident is not None and ident not in table.columns:
        raise UserError(f"--id {ident!r} is not a column of {str(path)!r}{there}")
    inputs = dict(zip(described.get("inputs", ()), described.get("types", ()), strict=True))
    needed = [*(inputs or source.inputs), *filter(None, (source.series, source.time))]
    if absent := [name for name in needed if name not in table.columns]:
        raise UserError(
            f"{str(path)!r} has no column {few(map(repr, absent), 8)}; the model needs {few(needed, 20)}{there}"
        )
    for name, kind in inputs.items():
        if table.columns[name].is_text and not kind.endswith("string") and kind != "Image":
            raise UserError(f"{str(path)!r}: the column {name!r} has texts; the model was trained on numbers in it")
    if source.series is not None and ident not in (None, source.series):
        raise UserError(f"--id {ident!r}: predictions are of series, so they have {source.series!r}; leave it out")
    used = {*needed, *source.label, ident}
    if not (inputs or source.inputs):  # of a run folder without names, whose settings name none either
        return []
    if ignored := [name or "a column without name" for name in table.columns if name not in used]:
        return [f"ignored, since the model has no such inputs: {few(ignored, 20)}"]
    return []


def _file_names(table: Table, column: str, path: Path) -> list[str]:
    """The names of image files, in the folder where they are below it; empty for images in a table."""
    kept = table.files.select_columns([column]).cast_column(column, datasets.Image(decode=False))
    found = [each["path"] or "" for each in kept[column]]
    return [os.path.relpath(name, path) if Path(name).is_relative_to(path) else name for name in found]


def _labels(data: DataSet) -> list[str]:
    """The label of each example, empty where it has none; the labels of other tasks are not shown."""
    if data.task.form != "classes":
        return [""] * len(data.train)
    return ["" if label < 0 else data.class_names[label] for label in data.train.labels.tolist()]


def _outputs(model: nn.Module, batches: TestBatches, task: Task) -> Iterator[Tensor]:
    """The outputs: probabilities of classes or labels, or numbers."""
    for inputs, _ in batches:
        outputs = logits_of(model(inputs))
        like = torch.zeros(count(inputs), dtype=torch.int64) if task.form == "classes" else outputs
        if (found := metric_inputs(task, outputs, like)) is None:
            form = type(outputs).__name__
            raise UserError(f"the model returns a {form}, which cannot be read as predictions for {task.name}")
        scores, _ = found
        yield scores if task.form == "numbers" else scores.softmax(1) if task.form == "classes" else scores.sigmoid()
