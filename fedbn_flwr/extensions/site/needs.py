"""Checks what a site needs to train: versions, data and GPU. `fedbn check` prints them."""

from __future__ import annotations

import importlib.metadata
import platform
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, RecordDict
from torch import Tensor

from fedbn_flwr.data.dataset import DataSet
from fedbn_flwr.exchange.step import check_batch
from fedbn_flwr.experiment.node import ClientParts, min_batch_of
from fedbn_flwr.experiment.parts import choose_device, make_model, own_loss
from fedbn_flwr.experiment.prepare import make_rule, try_model
from fedbn_flwr.experiment.settings import Experiment, Settings, resolve

from .connection import Check, asked

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
    runs = experiment.runs if experiment is not None else (resolve(Settings()),)
    checks: list[Check] = []
    for run in runs:
        for check in _data_of_run(run, node, expected=experiment is not None):
            if check not in checks:  # most runs have the same data
                checks.append(check)
                yield check


def _data_of_run(run: Settings, node: Mapping[str, Any], *, expected: bool) -> Iterator[Check]:
    run = run.model_copy(update={"engine": run.engine.model_copy(update={"device": "cpu"})})
    parts = ClientParts.of(run, Context(run_id=0, node_id=0, node_config=dict(node), state=RecordDict(), run_config={}))
    dataset, (train, test) = parts.dataset, parts.part
    where = str(node.get("data-path", run.data.name))
    yield Check("data", "ok", f"{where}: {_content(dataset, train, test)}")
    if not len(test):
        yield Check(
            "data", "warning", f"{where}: no test examples", "add a test split; the site cannot evaluate its model"
        )
    if not expected:
        return
    try_model(run, make_model(run, dataset), dataset, torch.device("cpu"), own_loss(run))
    yield Check("experiment", "ok", f"{run.name}: {run.model.name} takes these examples")
    if allowed := make_rule(run).traits.min_batch:
        exchange = _exchange(min(run.train.batch_size, len(parts.split[0])), allowed, parts.min_batch)
        yield from asked("exchange", exchange, "have more examples, or allow smaller batches")


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
