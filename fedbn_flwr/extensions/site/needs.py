"""Checks what a site needs to train: versions, data and GPU. `fedbn check` prints them."""

from __future__ import annotations

import importlib.metadata
import math
import platform
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, RecordDict
from torch import Tensor

from fedbn_flwr.data.dataset import DataSet
from fedbn_flwr.errors import needs
from fedbn_flwr.exchange.step import check_batch
from fedbn_flwr.experiment.data import source_of
from fedbn_flwr.experiment.node import ClientParts, min_batch_of
from fedbn_flwr.experiment.parts import choose_device, make_model
from fedbn_flwr.experiment.prepare import make_rule, try_model
from fedbn_flwr.experiment.settings import Data, Experiment, Settings
from fedbn_flwr.named import is_name

from .connection import Check, Failed, asked

_SHOWN_CLASSES = 12


def check_versions() -> Iterator[Check]:
    """Python's version and those of the packages on which server and sites must agree."""
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("fedbn-flwr", "flwr", "torch", "torchvision")]
    yield Check("versions", "ok", ", ".join([f"python {platform.python_version()}", *versions]))


def check_node_config(node: Mapping[str, Any]) -> Iterator[Check]:
    min_batch_of(node)
    yield from ()


def check_state(folder: Path) -> Iterator[Check]:
    """Whether the node's state folder can be written to."""
    there = next(each for each in (folder, *folder.absolute().parents) if each.exists())  # the client makes the rest
    tempfile.TemporaryFile(dir=there).close()
    yield Check("state folder", "ok", f"{folder}: can be written to")


def check_data(experiment: Experiment | None, node: Mapping[str, Any]) -> Iterator[Check]:
    """Whether the data of the site's client can be read, what they are, and whether they suit the experiment."""
    runs = experiment.runs if experiment is not None else (Settings(),)
    checks: list[Check] = []
    for run in runs:
        for check in _data_of_run(run, node, expected=experiment is not None):
            if check not in checks:  # most runs have the same data
                checks.append(check)
                yield check


def _data_of_run(run: Settings, node: Mapping[str, Any], *, expected: bool) -> Iterator[Check]:
    run = run.model_copy(update={"engine": run.engine.model_copy(update={"device": "cpu"})})
    parts = ClientParts.of(run, Context(run_id=0, node_id=0, node_config=dict(node), state=RecordDict(), run_config={}))
    yield from _columns(parts.run.data)
    dataset, (train, test) = parts.dataset, parts.part
    where = str(node.get("data-path", run.data.name))
    yield Check("data", "ok", f"{where}: {_content(dataset, train, test)}")
    if not len(test):
        yield Check(
            "data", "warning", f"{where}: no test examples", "add a test split; the site cannot evaluate its model"
        )
    if not expected:
        return
    try_model(run, make_model(run, dataset), dataset, torch.device("cpu"))
    yield Check("experiment", "ok", f"{run.name}: {run.model.name} takes these examples")
    if allowed := make_rule(run).traits.min_batch:
        exchange = _exchange(min(run.train.batch_size, len(parts.split[0])), allowed, parts.min_batch)
        yield from asked("exchange", exchange, "have more examples, or allow smaller batches")


def _columns(data: Data) -> Iterator[Check]:
    """How the columns of a table differ from those that the experiment names, all at once and without values."""
    if not data.inputs or is_name(data.name):
        return
    with needs("data", f"data.name={data.name!r}"):
        from fedbn_flwr.data.folders import open_splits
    splits, _ = open_splits(source_of(data), None)
    categories, ranges = dict(data.categories), dict(data.ranges)
    used = [*data.inputs, *data.label, *filter(None, (data.domain, data.group))]
    problems = [f"there is no column {name!r}" for name in used if name not in splits["train"].features]
    for part, split in splits.items():
        for name in filter(split.features.__contains__, used):
            rows = split.to_pandas()[name]
            if name in data.inputs and name not in categories and rows.dtype.kind in "OSU":
                problems.append(f"{part}: {name!r} has texts, expected numbers")
            if (absent := int(rows.isna().sum())) and not (data.missing and name in data.inputs):
                problems.append(f"{part}: {absent} of {len(rows)} rows have no value in {name!r}")
            low, high = ranges.get(name, (-math.inf, math.inf))
            if rows.dtype.kind in "iuf" and (outside := int(((rows < low) | (rows > high)).sum())):
                problems.append(
                    f"{part}: {outside} of {len(rows)} rows have a value of {name!r} outside of data.ranges, "
                    f"{low:g} to {high:g}"
                )
            known = categories.get(name, data.class_names if (name,) == data.label else ())
            if other := int((~rows.dropna().astype(str).isin(known)).sum()) if known else 0:
                problems.append(
                    f"{part}: {other} of {len(rows)} rows have a value in {name!r} other than {list(known)}"
                )
    if problems:
        raise Failed(f"{data.name}: {'; '.join(problems)}", "correct the files, or the experiment")
    unused = [name for name in splits["train"].features if name not in used]
    more = f"; not used: {', '.join(unused)}" if unused else ""
    yield Check("columns", "ok", f"{data.name}: {', '.join(used)}{more}")


def _exchange(examples: int, allowed: int, own: int) -> Iterator[Check]:
    """Whether the statistics of the site's batches may be exchanged."""
    check_batch(examples, allowed=allowed, own=own)
    yield Check("exchange", "ok", f"batches of {examples} examples, {max(allowed, own)} are needed")


def _content(dataset: DataSet, train: Tensor, test: Tensor) -> str:
    what = f"examples of shape {list(dataset.shape)}"
    if dataset.is_image:
        height, width = dataset.size
        channels = {1: "grey", 3: "RGB"}.get(dataset.channels, f"{dataset.channels} channels")
        what = f"images of {height}x{width} pixels, {channels}"
    parts = [f"{len(train):,} training and {len(test):,} test {what}"]
    if dataset.task.form != "classes":
        parts.append(f"{dataset.task.targets}: {', '.join(dataset.class_names)}")
    elif dataset.dense:
        parts.append(f"{dataset.classes} classes per pixel")
    else:
        counts = torch.bincount(dataset.train.labels[train].cpu(), minlength=dataset.classes).tolist()
        named = [f"{name}: {count}" for name, count in zip(dataset.class_names, counts, strict=True)]
        more = f", ... ({len(named)} classes)" if len(named) > _SHOWN_CLASSES else ""
        parts.append(f"classes: {', '.join(named[:_SHOWN_CLASSES])}{more}")
        if absent := counts.count(0):
            parts.append(f"no training examples of {absent} of the {len(counts)} classes")
    if (domains := dataset.domains) is not None:
        here = sorted({domains.names[number] for number in domains.train[train.cpu()].tolist()})
        parts.append(f"domain{'s' if len(here) > 1 else ''}: {', '.join(here)}")
    return "; ".join(parts)


def check_gpu(experiment: Experiment | None) -> Iterator[Check]:
    for run in experiment.runs if experiment is not None else ():
        choose_device(run.engine.device)
    if not torch.cuda.is_available():
        yield Check("GPU", "ok", "none: the client trains on the CPU")
        return
    free, total = torch.cuda.mem_get_info()
    yield Check("GPU", "ok", f"{torch.cuda.get_device_name()}, {free / 1e9:.0f} of {total / 1e9:.0f} GB free")
