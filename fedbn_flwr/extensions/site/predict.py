"""Predicts new data with a model from a run. The run's settings and its model.json decide how the data are read."""

from __future__ import annotations

import itertools
import math
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
from fedbn_flwr.batch import count, first
from fedbn_flwr.client.evaluation import evaluate, metric_inputs
from fedbn_flwr.client.losses import logits_of
from fedbn_flwr.data.batches import TestBatches
from fedbn_flwr.data.catalogue import CATALOGUE
from fedbn_flwr.data.columns import of_series, read
from fedbn_flwr.data.dataset import DataSet
from fedbn_flwr.data.folders import has_splits, open_new, open_splits
from fedbn_flwr.data.load import KEY
from fedbn_flwr.data.table import Table
from fedbn_flwr.errors import UserError, error_if, few
from fedbn_flwr.experiment.data import at_site, load_data
from fedbn_flwr.experiment.settings import Data, check_settings
from fedbn_flwr.results.folder.description import Description
from fedbn_flwr.results.folder.reader import RunReader
from fedbn_flwr.storage import check_rights, replacing
from fedbn_flwr.tasks import CLASSIFICATION, SEGMENTATION, TASKS, Task, title_of

Part = Literal["train", "test"]
_NOT_FINITE = "the model's outputs are not finite (NaN or infinite)"
_NO_NUMBERS = {"string": "texts", "bool": "true and false"}


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
    described: Description
    source: Data
    table: Table
    data: DataSet  # its training examples are all that were read
    there: Tensor  # the places of the examples that training would not leave out
    batches: TestBatches  # of these
    labelled: TestBatches  # of those whose label is known
    said: Sequence[str]  # what is ignored


def opened(folder: RunReader, path: Path, ident: str | None = None, part: Part = "test") -> Opened:
    """This part of a folder that a site trains on; otherwise all rows of a table, or images of a folder."""
    if not (path := path.expanduser()).exists():
        raise UserError(f"--data {str(path)!r}: there is no such file or folder")
    run, summary, model = check_settings(folder.config()), folder.summary(), folder.model_description()
    task = TASKS[summary.task] if summary and summary.task else CLASSIFICATION
    error_if(
        not task.form,
        f"the run is for {task.name}; expected one that predicts classes, labels, numbers or masks",
    )
    source, said = _settings(run.source, model, task, path), list[str]()
    if named.is_name(run.data.name) and path.is_dir() and named.accepted(named.load(KEY, run.data.name), {"root": 0}):
        error_if(
            ident is not None,
            f"--id {ident!r}: {run.data.name!r} reads the folder, and names no columns; leave it out",
        )
        table, data = Table(pa.table({}), (0,)), load_data(at_site(run.source, str(path)), "cpu")
        data = replace(data, train=getattr(data, part))
    else:
        table, data, said = _read(source, model, path, ident, part)
    found, targets, there = data.train, first(data.train.targets), torch.arange(len(data.train))
    if source.missing == "drop":
        there = there[~found.gaps]
    known = ~(targets.isnan() if targets.is_floating_point() else targets < 0).reshape(len(targets), -1).any(1)
    batches = partial(TestBatches, found, model.normalise.moments, run.evaluate.batch_size)
    return Opened(task, model, source, table, data, there, batches(there), batches(there[known[there]]), said)


def predictions(folder: RunReader, model: nn.Module, path: Path, ident: str | None = None) -> Predictions:
    """A row for each example: its place, its file or id, its label if it has one, the prediction and probabilities.

    The label is empty where an example has none, and so is the prediction of an example that training would leave out.
    """
    new = opened(folder, path := path.expanduser(), ident)
    task, examples, columns = new.task, new.data.train, _columns(new, path, ident)
    names, masks = new.described.classes or new.data.class_names, dict[str, Tensor]()
    if task is SEGMENTATION:
        names, masks = (), _masks(model, new, columns["row"])
        made = {place: [name] for place, name in zip(new.there.tolist(), masks, strict=True)}
    else:
        made = dict(_scored(model, new, names))
    said = [f"{path}: {len(examples)} examples", *new.said]
    if labels := _labels(new.data):
        columns["label"] = labels
        right = [made[row][0] == label for row, label in enumerate(labels) if label and row in made]
        said.append(f"accuracy {sum(right) / max(1, len(right)):.4f}: {sum(right)} of {len(right)} labels")
    if task is SEGMENTATION and new.labelled.num_examples:
        metrics = measured(model, new, ["dice"])
        shown = (f"{title_of(name)} {metrics[name]:.4f}" for name in (*task.reported, "dice"))
        said.append(f"{', '.join(shown)}: {new.labelled.num_examples} masks")
    lacking = (
        (labels.count(""), "label", ""),
        (len(examples) - len(new.there), "prediction", ", which lack an input (data.missing is drop)"),
        (len(new.there) - len(made), "prediction", f", for which {_NOT_FINITE}"),
    )
    said += [f"without a {what}: {number} examples{why}" for number, what, why in lacking if number]
    words = "probability " if task.form != "numbers" else ""
    scored = [*(["prediction"] if task.form == "classes" else []), *(words + name for name in names)]
    blank = [""] * len(scored)
    rows = [[*cells, *made.get(row, blank)] for row, cells in enumerate(zip(*columns.values(), strict=True))]
    return Predictions([*columns, *scored], rows, said, masks)


def _columns(new: Opened, path: Path, ident: str | None) -> dict[str, Sequence[object]]:
    """Which example each row is of: its place, its file, and its series or id."""
    table, series, rows = new.table, new.source.series, new.data.train.rows
    assert rows is not None, "examples of a table have rows"
    columns: dict[str, Sequence[object]] = {"row": rows.tolist()}
    if images := [name for name in new.data.types if name in table.names and table.kind(name) == "Image"]:
        columns["file"] = [_file_name(table.columns[images[0]][row].as_py(), path) for row in rows.tolist()]
    if series is not None:
        columns[series] = of_series(new.source, table)[1].columns[series].to_pylist()
    elif ident is not None:
        columns[ident] = table.columns[ident].take(rows.numpy()).to_pylist()
    return columns


def _labels(data: DataSet) -> list[str]:
    """The label of each example, empty where it has none; nothing if all are, or if an example hasn't one class."""
    if data.task.form != "classes" or data.task is SEGMENTATION:
        return []
    labels = ["" if label < 0 else data.class_names[label] for label in data.train.labels.tolist()]
    return labels if any(labels) else []


def _masks(model: nn.Module, new: Opened, rows: Sequence[object]) -> dict[str, Tensor]:
    """The classes of the pixels of each example of `there`, by the name of a file."""
    found = classes_of(model, new).to(torch.uint8)
    form = "png" if found.ndim == 3 else "npy"
    return {f"{rows[place]}.{form}": mask for place, mask in zip(new.there.tolist(), found, strict=True)}


def _scored(model: nn.Module, new: Opened, names: Sequence[str]) -> Iterator[tuple[int, list[str]]]:
    """The place of each example of `there` whose outputs are finite, with its best class, if it has one, and scores."""
    outputs = itertools.chain(*_outputs(model, new.batches, new.task))
    for place, values in zip(new.there.tolist(), outputs, strict=True):
        if values.isfinite().all():
            best = [names[int(values.argmax())]] if new.task.form == "classes" else []
            yield place, [*best, *(f"{value:.6g}" for value in values.tolist())]


def write_masks(masks: Mapping[str, Tensor], folder: Path) -> None:
    folder.mkdir(mode=0o700, exist_ok=True)
    for name, mask in masks.items():
        with replacing(folder / name) as file, file.open("wb") as stream:
            if name.endswith("png"):
                Image.fromarray(mask.numpy()).save(stream, "png")
            else:
                np.save(stream, mask.numpy())


def _settings(data: Data, model: Description, task: Task, path: Path) -> Data:
    """How to read new data: the columns of model.json by their names, and the classes of the run."""
    names = (model.classes or tuple(map(str, range(data.classes or 0)))) if task.form == "classes" else ()
    entry, shape = CATALOGUE.get(data.name), model.build.input_shape
    changes = {
        "inputs": model.inputs or data.inputs,
        "label": model.label or data.label or ("label",),
        "task": task.name,
        "class_names": names,
        "channels": shape[0] if len(shape) == 3 else None,
        "size": data.size or (entry.size if entry else None),
        "fit": data.fit or (entry.fit if entry else None),
        **dict.fromkeys(("domain", "group")),
    }
    return at_site(data.model_copy(update={"name": str(path)}), str(path)).model_copy(update=changes)


def _read(
    source: Data, model: Description, path: Path, ident: str | None, part: Part
) -> tuple[Table, DataSet, list[str]]:
    """The table, its examples, which are all training examples, and what is ignored."""
    check_rights(path)
    is_site = has_splits(source, path)
    table = open_splits(source, path, None)[0] if is_site else open_new(source, path)
    said = _checked(table, source, model, path, ident)
    error_if(
        source.normalise == "own" and not is_site,
        f"the run normalises each site's data by their own mean and deviation; give --data the site's folder, in "
        f"which {source.train or 'train'}* are the examples that it trains on",
    )
    found = read(source, table, trains=is_site and source.held_out is not None)
    found = found.standardised() if source.normalise == "own" else found
    shape, wanted = list(found.shape), list(model.build.input_shape)
    error_if(
        shape != wanted and (len(shape) != len(wanted) or shape[0] != wanted[0] or len(shape) == 1),
        f"{str(path)!r} has inputs of shape {shape}, but the model takes {wanted}"
        + ("; convert the images to greyscale" if wanted[:1] == [1] and shape[:1] == [3] else ""),
    )
    table = table.of(part) if len(table.counts) > 1 else table
    return table, replace(found, train=getattr(found, part) if is_site else found.train), said


def _checked(table: Table, source: Data, model: Description, path: Path, ident: str | None) -> list[str]:
    """Raise an error for columns that have another kind of value than the model's; say which columns are ignored."""
    error_if(
        ident is not None and ident not in table.names,
        f"--id {ident!r} is not a column of {str(path)!r}; its columns: {table}",
    )
    for name, kind in zip(model.inputs, model.types, strict=True):
        found = table.kind(name) if name in table.names else kind
        error_if(
            found in _NO_NUMBERS and kind.startswith(("int", "uint", "float", "decimal")),
            f"{str(path)!r}: the column {name!r} has {_NO_NUMBERS.get(found)}; the model was trained on numbers in it",
        )
    error_if(
        source.series is not None and ident not in (None, source.series),
        f"--id {ident!r}: predictions are of series, so they have {source.series!r}; leave it out",
    )
    used = {*source.inputs, *source.label, source.series, source.time, ident}
    ignored = [name or "a column without name" for name in table.names if name not in used] if source.inputs else []
    return [f"ignored, since the model has no such inputs: {few(ignored, 20)}"] if ignored else []


def _file_name(file: Mapping[str, str | None], path: Path) -> str:
    """The name of an image file, in the folder if it is below it; empty for an image in a table."""
    name = file["path"] or ""
    return os.path.relpath(name, path) if Path(name).is_relative_to(path) else name


def measured(model: nn.Module, new: Opened, more: Sequence[str] = ()) -> Mapping[str, float]:
    """The metrics of the task, and these, on the examples whose label is known."""
    found = evaluate(model, new.labelled, lambda *_: torch.zeros(()), torch.device("cpu"), more, task=new.task)
    error_if(
        not all(map(math.isfinite, found.values())),
        f"there are examples for which {_NOT_FINITE}",
    )
    return {key.replace("-", "_"): value for key, value in found.items()}


def classes_of(model: nn.Module, new: Opened) -> Tensor:
    """The class of each example of `there`, or of each of its pixels."""
    scores = torch.cat([*_outputs(model, new.batches, new.task)] or [torch.zeros(0, 1)])
    error_if(
        not scores.isfinite().all(),
        f"there are examples for which {_NOT_FINITE}",
    )
    return scores.argmax(1)


@torch.no_grad()
def _outputs(model: nn.Module, batches: TestBatches, task: Task) -> Iterator[Tensor]:
    """The outputs: probabilities of classes or labels, or numbers."""
    for inputs, _ in batches:
        try:
            outputs = logits_of(model(inputs))
        except (RuntimeError, ValueError, TypeError) as error:  # of the network, which may be the user's
            raise UserError(f"the model fails on these inputs ({named.in_a_line(error)})") from None
        pixels = getattr(outputs, "shape", ())[2:]
        like = torch.zeros(count(inputs), *pixels, dtype=torch.int64) if task.form == "classes" else outputs
        if (found := metric_inputs(task, outputs, like)) is None:
            form = type(outputs).__name__
            raise UserError(f"the model returns a {form}, which cannot be read as predictions for {task.name}")
        scores, _ = found
        yield scores if task.form == "numbers" else scores.softmax(1) if task.form == "classes" else scores.sigmoid()
