"""The data sets that a process keeps: which are loaded once, and which again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict

from fedbn_flwr.data.dataset import DataSet
from fedbn_flwr.data.examples import Examples
from fedbn_flwr.data.source import Source
from fedbn_flwr.errors import DataError
from fedbn_flwr.experiment import data as module
from fedbn_flwr.experiment.data import forget_data, load_data, shares_of
from fedbn_flwr.experiment.node import ClientParts
from fedbn_flwr.experiment.settings import Data, Settings
from tests.support.images import numbered, write_pictures, write_splits


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
