"""An experiment to start from, for a table or a folder of images of one's own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import yaml

from fedbn_flwr import named
from fedbn_flwr.data.folders import open_splits
from fedbn_flwr.data.load import load
from fedbn_flwr.data.located import located
from fedbn_flwr.data.source import FOLDER, PARTS, Source
from fedbn_flwr.data.table import Table
from fedbn_flwr.errors import DataError, log_once, needs
from fedbn_flwr.trees import Draft, Tree

_MOST = 12  # values of a text column that become inputs


def _series_in(table: Table) -> tuple[str, str] | None:
    """A column of series and one of times, if times rise within each series and come again in others."""
    coded = {name: table.coded(name) for name in table.names if not table.is_array(name)}
    again = {name: codes for name, (values, codes) in coded.items() if 1 < len(values) < len(table) / 2}
    times = [name for name in again if not table.is_text(name)]
    ranks = {name: np.argsort(np.argsort(np.array(coded[name][0])))[again[name]] for name in times}
    for series, codes in sorted(again.items(), key=lambda each: -int(each[1].max())):
        order = np.argsort(codes, kind="stable")
        for time in times:
            if (np.diff(ranks[time][order])[np.diff(codes[order]) == 0] > 0).all():
                return series, time
    return None


def experiment_for(path: Path, given: Tree) -> str:
    """The text of an experiment on these data, of which some keys are given; DataError if they cannot be read by it.

    Text columns with few values are categories, missing inputs become the mean of their column, and each value of
    `group` is a client, or each folder of tables.
    """
    data: Draft = {"name": named.as_path(str(path)), **given}
    if not all([*path.glob(f"{part}*"), *path.glob(f"*/{part}*.*")] for part in PARTS):
        data["test"] = 0.2
    if "window" in data:
        data["window"] = {"length": data["window"], "overlap": 0.5}
    source = Source.model_validate(data)
    with needs("data", f"fedbn new --data {path}"):
        table, _ = open_splits(source, located(source), None)
    if "series" not in data and (found := _series_in(table)):
        log_once(
            f"{path} seems to have a row for each {found[1]!r} of each {found[0]!r}; in this experiment each row is an "
            f"example. For windows of series write it again with --series {found[0]} --time {found[1]} --window N"
        )
    if is_images := "Image" in map(table.kind, table.names):
        data["size"] = 32
    elif FOLDER in table.names:
        data.setdefault("group", FOLDER)
    others = [column for column in table.names if column not in data.values()]
    of_rows = others if "series" not in data else []
    texts = {column: table.coded(column)[0] for column in of_rows if table.is_text(column)}
    if few := {column: sorted(values) for column, values in texts.items() if 1 < len(values) <= _MOST}:
        data["categories"] = few
    if any(table.absent(column).any() for column in others if column in few or table.is_number(column)):
        data["missing"] = "mean"
    dataset = load(Source.model_validate(data))
    if isinstance(dataset.train.inputs, Mapping):
        raise DataError(f"{path} has series of several lengths; give --window N too, so that N rows are an example")
    if dataset.input_names:
        data["inputs"] = [*dataset.types]
    if dataset.task.form == "classes":
        data["class_names"] = [*dataset.class_names]
    groups = dataset.groups if "group" in data else None
    data["partition"] = {"kind": "natural" if groups else "iid"}
    clients = len(groups.names) if groups else 3
    model = "cnn" if is_images else "cnn1d" if len(dataset.shape) == 2 else "mlp"
    runs: Draft = {name: {"strategy": {"name": name}} for name in ("FedAvg", "FedBN")}
    runs["FixBN"] = {"strategy": {"name": "FixBN", "freeze_round": 0.5}}
    content: Draft = {"rounds": 20, "clients": clients, "data": data, "model": {"name": model, "norm": "bn"}}
    content |= {"train": {"lr": 0.05, "batch_size": 16}, "evaluate": {"clients": True}, "runs": runs}
    return str(yaml.safe_dump(content, sort_keys=False, default_flow_style=None, allow_unicode=True, width=120))
