"""Predicts new data with a model from a run. The run's settings and its model.json decide how the data are read."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import torch
from PIL import Image
from torch import Tensor, nn

from fedbn_flwr import named
from fedbn_flwr.batch import count, first, tensors
from fedbn_flwr.client.evaluation import evaluate, metric_inputs
from fedbn_flwr.client.losses import logits_of
from fedbn_flwr.data.batches import TestBatches
from fedbn_flwr.data.catalogue import CATALOGUE
from fedbn_flwr.data.columns import counts, of_series, open_examples, read
from fedbn_flwr.data.dataset import DataSet
from fedbn_flwr.data.folders import check_rights, open_new, open_splits
from fedbn_flwr.data.load import KEY, load
from fedbn_flwr.data.source import Source
from fedbn_flwr.data.table import Table
from fedbn_flwr.errors import UserError, few
from fedbn_flwr.experiment.file.layers import read_experiment
from fedbn_flwr.experiment.settings import Data
from fedbn_flwr.results.folder.reader import RunReader
from fedbn_flwr.storage import replacing
from fedbn_flwr.tasks import CLASSIFICATION, SEGMENTATION, TASKS, Task, title_of
from fedbn_flwr.trees import Json

Part = Literal["train", "test"]


@dataclass(frozen=True)
class Predictions:
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]
    said: Sequence[str]  # what they are of, and how many are right
    masks: Mapping[str, Tensor]  # uint8, a class for each pixel, by the names in the column `prediction`


@dataclass(frozen=True)
class Opened:
    """New data, as the model of a run reads them."""

    task: Task
    described: Json
    source: Source
    table: Table
    data: DataSet  # its training examples are all that were read
    there: Tensor  # the places of the examples that training would not leave out
    batches: TestBatches  # of these
    labelled: TestBatches  # of those whose label is known
    said: Sequence[str]  # what is ignored


def opened(folder: RunReader, path: Path, ident: str | None = None, part: Part = "test") -> Opened:
    """This part of a folder that a site trains on; otherwise all rows of a table, or images of a folder."""
    check_rights(path := path.expanduser())
    if not path.exists():
        raise UserError(f"--data {str(path)!r}: there is no such file or folder")
    run, summary = read_experiment(folder.config()).runs[0], folder.summary()
    task = TASKS[summary.task] if summary and summary.task else CLASSIFICATION
    if not task.form:
        raise UserError(f"the run is for {task.name}; expected one that predicts classes, labels, numbers or masks")
    described = folder.model_description()
    source = _source(run.source, described, task, path)
    table, data, said = _opened(run.source, source, described, path, ident, part)
    examples, missing = data.train, torch.zeros(len(data.train), dtype=torch.bool)
    if source.missing == "drop":
        absent = [some.isnan().reshape(len(some), -1).any(1) for some in tensors(examples.inputs)]
        missing = torch.stack(absent).any(0)
    there, targets = (~missing).nonzero()[:, 0], first(examples.targets)
    known = ~(targets.isnan() if targets.is_floating_point() else targets < 0).reshape(len(targets), -1).any(1)
    batches = partial(TestBatches, examples, folder.moments(), run.evaluate.batch_size)
    return Opened(task, described, source, table, data, there, batches(there), batches(there[known[there]]), said)


def predictions(folder: RunReader, model: nn.Module, path: Path, ident: str | None = None) -> Predictions:
    """A row for each example: its place, its file or id, its label if it has one, the prediction and probabilities.

    The label is empty where an example has none, and so is the prediction of an example that training would leave out.
    """
    new = opened(folder, path := path.expanduser(), ident)
    task, described, source, table, data = new.task, new.described, new.source, new.table, new.data
    examples, missing = data.train, len(data.train) - len(new.there)
    names, labels = described["classes"] or data.class_names, labels_of(data)
    assert examples.rows is not None, "examples of a table have rows"
    masks = dict[str, Tensor]()
    if task is SEGMENTATION:
        found, names = classes_of(model, new).to(torch.uint8), ()
        form = "png" if found.ndim == 3 else "npy"
        masks = {f"{row}.{form}": mask for row, mask in zip(examples.rows[new.there].tolist(), found, strict=True)}
        made = {place: [name] for place, name in zip(new.there.tolist(), masks, strict=True)}
    else:
        made = {}
        for place, values in zip(new.there.tolist(), itertools.chain(*_outputs(model, new.batches, task)), strict=True):
            best = [names[int(values.argmax())]] if task.form == "classes" else []
            made[place] = [*best, *(f"{value:.6g}" for value in values.tolist())]
    columns: dict[str, Sequence[object]] = {"row": examples.rows.tolist()}
    if images := [name for name in data.types if name in table.names and table.kind(name) == "Image"]:
        columns["file"] = [_file_name(table.columns[images[0]][row].as_py(), path) for row in examples.rows.tolist()]
    if source.series is not None:
        columns[source.series] = of_series(source, table)[0].columns[source.series].to_pylist()
    elif ident is not None:
        columns[ident] = table.columns[ident].take(examples.rows.numpy()).to_pylist()
    said = [f"{path}: {len(examples)} examples", *new.said]
    if task.form == "classes" and any(labels):
        columns["label"] = labels
        right = [made[row][0] == label for row, label in enumerate(labels) if label and row in made]
        said.append(f"accuracy {sum(right) / max(1, len(right)):.4f}: {sum(right)} of {len(right)} labels")
    if without := sum(not label for label in labels) if "label" in columns else 0:
        said.append(f"without a label: {without} examples")
    if task is SEGMENTATION and new.labelled.num_examples:
        metrics = measured(model, new, ["dice"])
        shown = (f"{title_of(name)} {metrics[name]:.4f}" for name in (*task.reported, "dice"))
        said.append(f"{', '.join(shown)}: {new.labelled.num_examples} masks")
    if missing:
        said.append(f"without a prediction: {missing} examples, which lack an input (data.missing is drop)")
    words = "probability " if task.form != "numbers" else ""
    scored = [*(["prediction"] if task.form == "classes" else []), *(words + name for name in names)]
    blank = [""] * len(scored)
    rows = [[*cells, *made.get(row, blank)] for row, cells in enumerate(zip(*columns.values(), strict=True))]
    return Predictions([*columns, *scored], rows, said, masks)


def write_masks(masks: Mapping[str, Tensor], folder: Path) -> None:
    folder.mkdir(mode=0o700, exist_ok=True)
    for name, mask in masks.items():
        with replacing(folder / name, mode=0o600) as file, file.open("wb") as stream:
            if name.endswith("png"):
                Image.fromarray(mask.numpy()).save(stream, "png")
            else:
                np.save(stream, mask.numpy())


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
    data: Data, source: Source, described: Json, path: Path, ident: str | None, part: Part
) -> tuple[Table, DataSet, list[str]]:
    """The table, its examples, and what is ignored. A folder is read by the run's own reader, if it takes one."""
    if named.is_name(data.name) and path.is_dir() and named.accepted(named.load(KEY, data.name), {"root": None}):
        if ident is not None:
            raise UserError(f"--id {ident!r}: {data.name!r} reads the folder, and names no columns; leave it out")
        found = load(data.model_copy(update={"root": str(path)}))
        found = found.standardised() if data.normalise == "own" else found
        return Table(pa.table({}), (0,)), replace(found, train=getattr(found, part)), []
    is_site = path.is_dir() and any(path.glob(f"{source.train or 'train'}*"))
    if is_site:
        whole, _ = open_splits(source, path, None)
        table = whole.of("train" if source.held_out else part)
    else:
        table = open_new(source, path)
    said = _checked(table, source, described, path, ident)
    if data.normalise == "own" and not is_site:
        raise UserError(
            f"the run normalises each site's data by their own mean and deviation; give --data the site's folder, in "
            f"which {source.train or 'train'}* are the examples that it trains on"
        )
    if is_site and (source.held_out or data.normalise == "own"):
        found = read(source, whole)
        found = found.standardised() if data.normalise == "own" else found
        return table, replace(found, train=getattr(found, part)), said
    there = [label for label in source.label if label in table.names]
    absent = pa.nulls(len(table), pa.string() if source.class_names else pa.float64())
    if source.task == SEGMENTATION.name and not any(map(table.is_array, there)):  # no masks
        source = source.model_copy(update={"task": CLASSIFICATION.name})
        table = table.with_columns(dict.fromkeys(source.label, absent))
    table = table.with_columns({label: absent for label in source.label if label not in there})
    _, opened, _, decoded = open_examples(source.model_copy(update={"test": None}), table)
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
    if ident is not None and ident not in table.names:
        raise UserError(f"--id {ident!r} is not a column of {str(path)!r}{there}")
    inputs = dict(zip(described.get("inputs", ()), described.get("types", ()), strict=True))
    needed, known = [*(inputs or source.inputs), *filter(None, (source.series, source.time))], {*table.names}
    if absent := [name for name in needed if name not in known]:
        raise UserError(
            f"{str(path)!r} has no column {few(map(repr, absent), 8)}; the model needs {few(needed, 20)}{there}"
        )
    for name, kind in inputs.items():
        if table.is_text(name) and not kind.endswith("string") and kind != "Image":
            raise UserError(f"{str(path)!r}: the column {name!r} has texts; the model was trained on numbers in it")
    if source.series is not None and ident not in (None, source.series):
        raise UserError(f"--id {ident!r}: predictions are of series, so they have {source.series!r}; leave it out")
    used = {*needed, *source.label, ident}
    if not (inputs or source.inputs):  # of a run folder without names, whose settings name none either
        return []
    if ignored := [name or "a column without name" for name in table.names if name not in used]:
        return [f"ignored, since the model has no such inputs: {few(ignored, 20)}"]
    return []


def _file_name(file: Mapping[str, str | None], path: Path) -> str:
    """The name of an image file, in the folder if it is below it; empty for an image in a table."""
    name = file["path"] or ""
    return os.path.relpath(name, path) if Path(name).is_relative_to(path) else name


def labels_of(data: DataSet) -> list[str]:
    """The label of each example, empty where it has none; the labels of other tasks are not shown."""
    if data.task.form != "classes" or data.task is SEGMENTATION:
        return [""] * len(data.train)
    return ["" if label < 0 else data.class_names[label] for label in data.train.labels.tolist()]


def measured(model: nn.Module, new: Opened, more: Sequence[str] = ()) -> Mapping[str, float]:
    """The metrics of the task, and these, on the examples whose label is known."""
    found = evaluate(model, new.labelled, lambda *_: torch.zeros(()), torch.device("cpu"), more, task=new.task)
    return {key.replace("-", "_"): value for key, value in found.items()}


def classes_of(model: nn.Module, new: Opened) -> Tensor:
    """The class of each example of `there`, or of each of its pixels."""
    found = [scores.argmax(1) for scores in _outputs(model, new.batches, new.task)]
    return torch.cat(found) if found else torch.empty(0)


@torch.no_grad()
def _outputs(model: nn.Module, batches: TestBatches, task: Task) -> Iterator[Tensor]:
    """The outputs: probabilities of classes or labels, or numbers."""
    for inputs, _ in batches:
        outputs = logits_of(model(inputs))
        pixels = getattr(outputs, "shape", ())[2:]
        like = torch.zeros(count(inputs), *pixels, dtype=torch.int64) if task.form == "classes" else outputs
        if (found := metric_inputs(task, outputs, like)) is None:
            form = type(outputs).__name__
            raise UserError(f"the model returns a {form}, which cannot be read as predictions for {task.name}")
        scores, _ = found
        yield scores if task.form == "numbers" else scores.softmax(1) if task.form == "classes" else scores.sigmoid()
