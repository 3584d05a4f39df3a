"""Predicts a site's data with a model from a run. The run's settings decide how the data are read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from flwr.app import Context, RecordDict
from torch import Tensor, nn

from fedbn_flwr.client.evaluation import metric_inputs
from fedbn_flwr.client.losses import logits_of
from fedbn_flwr.data.batches import TestBatches
from fedbn_flwr.data.columns import read
from fedbn_flwr.data.dataset import DataSet
from fedbn_flwr.data.folders import open_rows
from fedbn_flwr.data.paths import check_rights
from fedbn_flwr.errors import UserError
from fedbn_flwr.experiment.file.layers import read_experiment
from fedbn_flwr.experiment.node import ClientParts
from fedbn_flwr.experiment.settings import Settings
from fedbn_flwr.results.folder import RunFolder
from fedbn_flwr.tasks import CLASSIFICATION, TASKS, Task


@dataclass(frozen=True)
class Predictions:
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]
    said: Sequence[str]  # what they are of, and how many are right


def predictions(folder: RunFolder, model: nn.Module, path: Path) -> Predictions:
    """A row for each example: its place, its label if it has one, the prediction, and a probability per class."""
    check_rights(path := path.expanduser())
    if not path.exists():
        raise UserError(f"--data {str(path)!r}: there is no such file or folder")
    run, summary = read_experiment(folder.config()).runs[0], folder.summary()
    task = TASKS[summary.task] if summary and summary.task else CLASSIFICATION
    dataset, indices, has_labels = _data(folder, run, task, path)
    if dataset.task is not task or not task.form or dataset.dense:
        raise UserError(
            f"{str(path)!r} has labels for {dataset.task.name}, and the run is for {task.name}; expected a run that "
            "predicts classes, labels or numbers for each example, and data for the same task"
        )
    batches = TestBatches(dataset.test, folder.moments(), run.evaluate.batch_size, indices)
    with torch.no_grad():
        found = list(_outputs(model, batches, task))
    scores, targets = (torch.cat(parts) for parts in zip(*found, strict=True))
    names = dataset.class_names
    if task.form == "classes":
        shown = [[names[number]] for number in scores.argmax(1).tolist()]
        labels = [[names[number]] for number in targets.tolist()]
        right = (scores.argmax(1) == targets).tolist()
    else:
        shown, labels, right = [[] for _ in scores], targets.tolist(), []
    words = "probability " if task.form != "numbers" else ""
    own = has_labels and task.form == "classes"
    columns = ["row", *(["label"] if own else []), *(["prediction"] if task.form == "classes" else [])]
    rows = [
        [place, *(label if own else []), *prediction, *(f"{value:.6g}" for value in values)]
        for place, (label, prediction, values) in enumerate(zip(labels, shown, scores.tolist(), strict=True))
    ]
    said = [f"{path}: {len(rows)} examples"]
    if own:
        said.append(f"accuracy {sum(right) / len(right):.4f}: {sum(right)} of {len(right)} labels")
    return Predictions([*columns, *(words + name for name in names)], rows, said)


def _data(folder: RunFolder, run: Settings, task: Task, path: Path) -> tuple[DataSet, Tensor, bool]:
    """The examples, read as by a client of the run, and whether they have labels.

    From a folder that a site trains on, these are its test examples; otherwise all rows of a table, or all images of a
    folder.
    """
    names = tuple(folder.model_description()["classes"] or map(str, range(run.data.classes or 0)))
    node = {"data-path": str(path.absolute())}
    context = Context(run_id=0, node_id=0, node_config=dict(node), state=RecordDict(), run_config={})
    parts = ClientParts.of(run, context)
    if path.is_dir() and any(path.glob(f"{run.data.train or 'train'}*")):
        return parts.dataset, parts.part[1], True
    changes = {"test": None, "domain": None, "group": None, "class_names": names}
    if run.data.missing == "drop":  # every row gets a prediction
        changes["missing"] = None
    source = parts.run.source.model_copy(update=changes)
    blank = (names or ("0",))[0] if task.form == "classes" else 0.0
    rows, has_labels = open_rows(path, source.label, blank)
    dataset = read(source, {"train": rows})
    return dataset, torch.arange(len(dataset.test)), has_labels


def _outputs(model: nn.Module, batches: TestBatches, task: Task) -> Iterator[tuple[Tensor, Tensor]]:
    """The outputs (probabilities of classes or labels, or numbers), and the targets."""
    for inputs, targets in batches:
        outputs = model(inputs)
        if (found := metric_inputs(task, outputs, targets)) is None:
            form = type(logits_of(outputs)).__name__
            raise UserError(f"the model returns a {form}, which cannot be read as predictions for {task.name}")
        scores, true = found
        if task.form != "numbers":
            scores = scores.softmax(1) if task.form == "classes" else scores.sigmoid()
        yield scores, true
