"""How a node's config changes what its client reads, and how it trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, RecordDict

from fedbn_flwr.data.load import load
from fedbn_flwr.data.source import Source
from fedbn_flwr.errors import DataError, SettingsError
from fedbn_flwr.experiment.node import ClientParts
from fedbn_flwr.experiment.settings import Data, Settings


def node(**config: Any) -> Context:
    return Context(run_id=0, node_id=0, node_config={"partition-id": 0, **config}, state=RecordDict(), run_config={})


def scans(root: str) -> dict[str, Any]:
    files = sorted(Path(root).glob("*.npy"))
    return {"train": [(np.load(file), int(file.stem) % 3) for file in files]}


def test_a_site_s_folder_is_the_root_of_its_reader(own: Any, tmp_path: Path) -> None:
    for number in range(30):
        np.save(tmp_path / f"{number:02}.npy", np.full((2, 3, 4), number / 2))
    run = Settings(clients=1, data=Data(name=own(scans), test=0.2), evaluate={"server": True})
    parts = ClientParts.of(run, node(**{"data-path": str(tmp_path)}))
    assert parts.has_own_data
    assert (len(parts.split[0]), parts.dataset.shape) == (24, (2, 3, 4))
    with pytest.raises(DataError, match=r"has no parameter 'root', by which it gets data\.root, at a site"):
        load(Source(name=own(lambda: scans("/")), root=str(tmp_path), test=0.2))


def site(run: Settings, **config: Any) -> ClientParts:
    return ClientParts.of(run, node(**config))


def test_a_node_trains_by_its_own_config_and_else_by_the_experiment() -> None:
    train = {"epochs": 2, "batch_size": 16, "of_clients": [{"client": 0, "steps": 3, "lr_factor": 0.5}]}
    run = Settings(clients=1, train=train)
    listed = site(run).run.train
    assert (listed.epochs, listed.steps, listed.batch_size) == (None, 3, 16)
    itself = site(run, **{"epochs": 4, "batch-size": 8, "device": "cpu"})
    assert (itself.run.train.epochs, itself.run.train.steps, itself.run.train.batch_size) == (4, None, 8)
    assert (itself.own.lr_factor, itself.run.engine.device) == (0.5, "cpu")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"batch-size": 0}, "this node's config: batch-size=0: .*greater than or equal to 1"),
        ({"lr-factor": "much"}, "this node's config: lr-factor='much': "),
        ({"device": "tpu"}, "this node's config: device='tpu': .*'auto', 'cpu' or 'cuda'"),
        ({"steps": 2, "epochs": 2}, r"this node's config: .*epochs \(2\) and steps \(2\) exclude each other"),
        ({"batchsize": 2}, "unknown key 'batchsize'; did you mean 'batch-size'"),
    ],
)
def test_what_is_wrong_with_a_node_s_config_is_named(config: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        site(Settings(clients=1), **config)
