"""How a node's config changes what its client reads, and how it trains."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict

from fedbn_flwr.data.dataset import DataSet
from fedbn_flwr.data.examples import Examples
from fedbn_flwr.data.load import load
from fedbn_flwr.data.source import Source
from fedbn_flwr.errors import DataError, SettingsError
from fedbn_flwr.experiment import data as module
from fedbn_flwr.experiment.data import forget_data, load_data, shares_of
from fedbn_flwr.experiment.node import ClientParts
from fedbn_flwr.experiment.settings import Data, Settings
from tests.support.images import numbered, write_pictures, write_splits


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


# --- The data sets that a process keeps: which are loaded once, and which again.


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    forget_data()
    yield
    forget_data()


def write(folder: Path, value: int, count: int = 4) -> None:
    images = [np.full((8, 8), value, np.uint8)] * (count // 2)
    write_pictures(folder, images, *(f"{split}/class {i}" for split in ("train", "test") for i in (0, 1)))


def value_of(data: Data) -> int:
    (value,) = load_data(data, "cpu").train.inputs.unique().tolist()
    return int(value)


def test_a_relative_folder_is_that_of_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = Data(name="./pictures")
    for site, count in (("one", 4), ("two", 6)):
        write(tmp_path / site / "pictures", count * 10, count)
    for site, count in (("one", 4), ("two", 6), ("one", 4)):
        monkeypatch.chdir(tmp_path / site)
        for parts in shares_of(data, 2, 0, "cpu"):
            assert sum(map(len, parts)) == count
        assert value_of(data) == count * 10


def test_changed_files_are_read_after_data_are_forgotten(tmp_path: Path) -> None:
    data = Data(name=str(tmp_path / "pictures"))
    write(tmp_path / "pictures", 10)
    first = load_data(data, "cpu")
    assert load_data(data, "cpu") is first
    write(tmp_path / "pictures", 20, count=6)
    forget_data()
    assert value_of(data) == 20
    assert sum(map(len, shares_of(data, 2, 0, "cpu")[0])) == 6


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often a data set was loaded: four images of 100 bytes for training, and as many for testing."""
    found: Counter[str] = Counter()

    def load(source: Source) -> DataSet:
        found[source.name] += 1
        part = Examples(torch.zeros(4, 1, 10, 10, dtype=torch.uint8), torch.zeros(4, dtype=torch.int64))
        return DataSet(source.name, part, part, ("only",))

    monkeypatch.setattr(module, "load", load)
    return found


@pytest.mark.parametrize(("memory", "times"), [(8.0, 1), (1_800 / 2**30, 3)], ids=["all fit", "two fit"])
def test_each_site_s_data_are_loaded_once_if_all_fit_into_memory(
    loads: Counter[str], memory: float, times: int
) -> None:
    run = Settings(clients=4, data=Data(name="a", memory=memory))
    for _ in range(3):
        for site in "abcd":
            assert ClientParts.of(run, Context(1, 1, {"data-path": site}, RecordDict(), {})).dataset.name == f"./{site}"
    assert loads == {f"./{site}": times for site in "abcd"}


def test_two_data_sets_are_kept_however_large_they_are(loads: Counter[str]) -> None:
    for name in "abab":
        load_data(Data(name=name, memory=1e-9), "cpu")
    assert loads == {"a": 1, "b": 1}


def test_names_of_domains_are_checked_when_data_are_loaded(tmp_path: Path) -> None:
    write_splits(tmp_path, (8, 8), {"label": [0, 1], "domain": ["a b", "a-b"]}, {"label": numbered(2)})
    with pytest.raises(
        DataError, match=r"has a domain whose accuracy would have the name of another metric; .*: 'a-b'"
    ):
        load_data(Data(name=str(tmp_path)), "cpu")
    assert load_data(Data(name=str(tmp_path), domains=("a b",)), "cpu").domains.names == ("a b",)
