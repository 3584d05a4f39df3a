"""A reader of the user's own files: at a site it gets the folder, and data larger than memory stay there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict

from fedbn_flwr.data.batches import ClientBatches, TestBatches
from fedbn_flwr.data.dataset import DataSet
from fedbn_flwr.data.load import load
from fedbn_flwr.data.source import Source
from fedbn_flwr.errors import DataError, SettingsError
from fedbn_flwr.experiment.node import ClientParts
from fedbn_flwr.experiment.settings import Data, Settings

COUNT, TINY = 150, 1e-6  # GiB: less than all scans take


class Scans(torch.utils.data.Dataset[Any]):
    """Files of 2x3x4 numbers, one for each scan; its class is the last digit of the file's name."""

    def __init__(self, folder: Path) -> None:
        self.files = sorted(folder.glob("*.npy"))
        self.targets = [int(file.stem[-1]) % 3 for file in self.files]
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, row: int) -> tuple[np.ndarray, int]:
        self.read.append(row)
        return np.load(self.files[row]), self.targets[row]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    for number in range(COUNT):
        np.save(tmp_path / f"{number:04}.npy", rng.normal(3, 2, (2, 3, 4)))
    return tmp_path


def scans(root: str) -> dict[str, Any]:
    return {"train": Scans(Path(root))}


def opened(name: str, folder: Path, memory: float) -> DataSet:
    return load(Source(name=name, root=str(folder), memory=memory, test=0.2, task="classification"))


def test_data_larger_than_memory_give_the_batches_of_data_in_memory(own: Any, folder: Path) -> None:
    whole, streamed = (opened(own(scans), folder, memory) for memory in (8.0, TINY))
    items: Scans = streamed.train.inputs.items  # type: ignore[union-attr]
    assert len({*items.read}) <= 3, "only the first of each split, to know its shape"
    assert streamed.shape == whole.shape == (2, 3, 4)
    assert (streamed.nbytes, streamed.checksum) == (whole.nbytes, whole.checksum)
    assert streamed.moments == whole.moments, "the sums of some items at a time are exact"
    items.read.clear()
    for kind in (
        lambda data: list(TestBatches(data.test, data.moments, 7)),
        lambda data: list(
            ClientBatches(data.train, torch.arange(4, 20), data.moments, batch_size=5, client=0, seed=0).epoch(1, 0)
        ),
    ):
        for (inputs, labels), (others, same) in zip(kind(streamed), kind(whole), strict=True):
            assert inputs.equal(others)
            assert labels.equal(same)
    assert len(items.read) == 30 + 15, "each example of a batch is read once; a last batch of one is left out"
    assert streamed.blank(2).shape == (2, 2, 3, 4)


def test_labels_of_a_reader_without_targets_are_those_of_its_items(own: Any, folder: Path) -> None:
    class Untold(Scans):
        def __init__(self, folder: Path) -> None:
            super().__init__(folder)
            self.labels = self.__dict__.pop("targets")

        def __getitem__(self, row: int) -> tuple[np.ndarray, int]:
            return np.load(self.files[row]), self.labels[row]

    name = own(lambda root: {"train": Untold(Path(root))})
    assert opened(name, folder, TINY).checksum == opened(own(scans), folder, 8.0).checksum


def node(**config: Any) -> Context:
    return Context(run_id=0, node_id=0, node_config={"partition-id": 0, **config}, state=RecordDict(), run_config={})


def test_a_site_s_folder_is_the_root_of_its_reader(own: Any, folder: Path) -> None:
    run = Settings(clients=1, data=Data(name=own(scans), test=0.2, memory=TINY), evaluate={"server": True})
    parts = ClientParts.of(run, node(**{"data-path": str(folder)}))
    assert parts.has_own_data
    assert len(parts.split[0]) == 0.8 * COUNT


def test_a_reader_without_a_root_is_refused(own: Any, folder: Path) -> None:
    with pytest.raises(DataError, match=r"has no parameter 'root', by which it gets data\.root, at a site"):
        opened(own(lambda: {"train": Scans(folder)}), folder, 8.0)


# --- sites that train otherwise ------------------------------------------------


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
