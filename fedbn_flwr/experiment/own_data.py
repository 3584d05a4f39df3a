"""An experiment to start from, for a table or a folder of images of one's own."""

from __future__ import annotations

from pathlib import Path

import yaml

from fedbn_flwr import named
from fedbn_flwr.data.folders import local, open_splits
from fedbn_flwr.data.load import load
from fedbn_flwr.data.source import Source
from fedbn_flwr.errors import needs
from fedbn_flwr.trees import Draft

_MOST = 12  # values of a text column that become inputs


def experiment_for(path: Path, label: str | None, group: str | None) -> str:
    """The text of an experiment on these data; DataError if they cannot be read by it.

    Text columns with few values are categories, missing inputs become the mean of their column, and each value of
    `group` is a client.
    """
    name = named.as_path(str(path))
    data: Draft = {"name": name, "test": 0.2}
    data |= {key: value for key, value in (("label", label), ("group", group)) if value}
    if is_folder := path.is_dir():
        data["size"] = 32
    source = Source.model_validate(data)
    with needs("data", f"fedbn new --data {path}"):
        table, _ = open_splits(source, local(source, None), None)
    others = [column for column in table.names if column not in (label, group)]
    texts = {column: table.coded(column)[0] for column in others if table.is_text(column)}
    if few := {column: sorted(values) for column, values in texts.items() if 1 < len(values) <= _MOST}:
        data["categories"] = few
    if any(table.absent(column).any() for column in others if column in few or table.is_number(column)):
        data["missing"] = "mean"
    dataset = load(Source.model_validate(data))
    if dataset.input_names:
        data["inputs"] = [*dataset.types]
    if dataset.task.form == "classes":
        data["class_names"] = [*dataset.class_names]
    groups = dataset.groups if group else None
    data["partition"] = {"kind": "natural" if groups else "iid"}
    clients = len(groups.names) if groups else 3
    model = "cnn" if is_folder else "cnn1d" if len(dataset.shape) == 2 else "mlp"
    runs: Draft = {name: {"strategy": {"name": name}} for name in ("FedAvg", "FedBN")}
    runs["FixBN"] = {"strategy": {"name": "FixBN", "freeze_round": 0.5}}
    content: Draft = {"rounds": 20, "clients": clients, "data": data, "model": {"name": model, "norm": "bn"}}
    content |= {"train": {"lr": 0.05, "batch_size": 16}, "evaluate": {"clients": True}, "runs": runs}
    return str(yaml.safe_dump(content, sort_keys=False, default_flow_style=None, allow_unicode=True, width=120))
