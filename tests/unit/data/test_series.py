"""Long tables, with a row for each time of a series."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from fedbn_flwr import run
from fedbn_flwr.batch import tensors
from fedbn_flwr.data.dataset import DataSet
from fedbn_flwr.data.load import load
from fedbn_flwr.data.partitions import hold_out
from fedbn_flwr.data.source import Source
from fedbn_flwr.errors import MissingPackage
from fedbn_flwr.experiment.data import load_data, shares_of, splits_of
from fedbn_flwr.experiment.settings import Data, Settings

RNG = np.random.default_rng(0)
LENGTHS = (3, 5, 4, 5)
KEYS: dict[str, Any] = {"series": "visit", "time": "minute", "label": "ill", "group": "site"}


def long(lengths: tuple[int, ...] = LENGTHS) -> pd.DataFrame:
    """Visits of two sites: 10, 11 and so on; two channels, hr and bp, which say visit and time."""
    rows = [
        {"visit": 10 + visit, "minute": 7.5 * time, "hr": 100 * visit + time, "bp": -time}
        | {"ill": ["no", "yes"][visit % 2], "site": ["north", "south"][visit // 2 % 2]}
        for visit, length in enumerate(lengths)
        for time in range(length)
    ]
    return pd.DataFrame(rows)


def opened(folder: Path, **options: Any) -> DataSet:
    return load(Source(name=str(folder), **KEYS | options))


def write(folder: Path, train: pd.DataFrame, test: pd.DataFrame) -> Path:
    folder.mkdir(exist_ok=True)
    train.to_csv(folder / "train.csv", index=False)
    test.to_csv(folder / "test.csv", index=False)
    return folder


def test_rows_in_any_order_become_padded_series_with_their_mask(tmp_path: Path) -> None:
    data = opened(write(tmp_path, long().sample(frac=1, random_state=0), long((6, 2))))
    assert (data.task.name, data.class_names, data.shape) == ("classification", ("no", "yes"), (2, 6))
    values, mask = tensors(data.train.inputs)
    assert values.dtype is torch.float32
    assert mask.sum(1).tolist() == [*LENGTHS]
    for visit, length in enumerate(LENGTHS):
        times = torch.arange(length)
        assert values[visit, 0, :length].equal(100.0 * visit + times)
        assert values[visit, 1, :length].equal(-1.0 * times)
        assert not values[visit, :, length:].any()
    assert data.train.labels.tolist() == [0, 1, 0, 1]
    assert [data.groups.names[group] for group in data.groups.train] == ["north", "north", "south", "south"]
    assert data.columns == {
        "visit": "data.series", "minute": "data.time", "hr": "input", "bp": "input", "ill": "data.label",
        "site": "data.group",
    }  # fmt: skip


def test_series_of_one_length_are_one_tensor_and_keep_the_table_s_order_without_times(tmp_path: Path) -> None:
    frame = long((4, 4, 4))
    backwards = write(tmp_path, frame[::-1], frame)
    data = opened(backwards, time=None, inputs=["hr"])
    assert isinstance(data.train.inputs, torch.Tensor)
    assert data.train.inputs[1].tolist() == [[103, 102, 101, 100]]
    by_time = opened(backwards, inputs=["hr"])
    assert by_time.train.inputs.equal(by_time.test.inputs)
    of_any_length = opened(backwards, inputs=["hr"], shape=[1, None])
    values, mask = tensors(of_any_length.train.inputs)
    assert values.equal(by_time.train.inputs)
    assert mask.all()


def test_a_long_table_trains_a_network_of_series(tmp_path: Path) -> None:
    frame = long((6,) * 24)
    frame["hr"] = np.where(frame["ill"] == "yes", 1.0, -1.0) + RNG.normal(0, 0.5, len(frame))
    frame.to_csv(tmp_path / "visits.csv", index=False)
    data = KEYS | {"name": str(tmp_path / "visits.csv"), "test": 0.25, "partition": {"kind": "natural"}}
    settings = {"rounds": 5, "clients": 2, "engine": {"workers": 0, "device": "cpu"}, "train": {"batch_size": 6}}
    result = run({**settings, "data": data, "model": "cnn1d"}, out=tmp_path / "out", progress=False)
    assert result.summary.accuracy == 1


def test_a_series_with_a_missing_value_is_left_out(tmp_path: Path) -> None:
    frame = long()
    frame.loc[[0, 3], "hr"] = np.nan
    data = opened(write(tmp_path, frame, long()), missing="drop")
    values, mask = tensors(data.train.inputs)
    assert values[:, 0, 0].tolist() == [200, 300]
    assert mask.sum(1).tolist() == [4, 5]


# --- windows -----------------------------------------------------------------


@pytest.mark.parametrize(("overlap", "step"), [(0.0, 4), (0.5, 2), (0.7, 1), (0.99, 1)])
def test_windows_are_the_slices_of_each_series(overlap: float, step: int, tmp_path: Path) -> None:
    frame = long((9, 3, 4, 14))
    shuffled = frame.sample(frac=1, random_state=0)
    data = opened(write(tmp_path, shuffled, frame), window={"length": 4, "overlap": overlap})
    expected = [
        (own[["hr", "bp"]].to_numpy(np.float32)[first : first + 4].T, own["site"].iloc[0])
        for _, own in frame.groupby("visit")
        for first in range(0, len(own) - 3, step)
    ]
    assert isinstance(data.train.inputs, torch.Tensor)
    assert data.train.inputs.equal(torch.from_numpy(np.stack([values for values, _ in expected])))
    assert data.train.inputs.equal(data.test.inputs)
    assert data.groups is not None
    assert [data.groups.names[group] for group in data.groups.train] == [site for _, site in expected]


@pytest.mark.parametrize("test", [0.25, {"share": 0.25, "split": 3}, {"folds": 4, "split": 1}])
def test_windows_of_a_series_are_on_one_side_of_the_split(test: object, tmp_path: Path) -> None:
    long((9,) * 8).to_csv(tmp_path / "visits.csv", index=False)
    source = Source(name=str(tmp_path / "visits.csv"), **KEYS, window={"length": 4, "overlap": 0.5}, test=test)
    data = load(source)
    of_train, of_test = ({int(row) // 100 for row in part.inputs[:, 0, 0]} for part in (data.train, data.test))
    assert (len(of_train), len(of_test), of_train & of_test) == (6, 2, set())
    series = data.train.inputs[:, 0, 0] // 100
    kept, held = hold_out(data, {0: torch.arange(len(series))}, 1 / 3, 0)[0]
    assert (len(series[held].unique()), len(series[kept].unique())) == (2, 4)


@pytest.mark.parametrize("partition", [{"kind": "iid"}, {"kind": "dirichlet", "alpha": 1.0}], ids=str)
def test_no_client_trains_on_a_series_that_another_one_validates_with(partition: object, tmp_path: Path) -> None:
    long((9,) * 20).to_csv(tmp_path / "visits.csv", index=False)
    data = Data(
        name=str(tmp_path / "visits.csv"), **KEYS, test=0.25, partition=partition, window={"length": 4, "overlap": 0.5}
    )
    run = Settings(data=data, clients=3, evaluate={"validation": 0.3})
    series, splits = load_data(data, "cpu").train.inputs[:, 0, 0] // 100, splits_of(run, "cpu")
    kept, held = ({int(row) for part in parts for row in series[part]} for parts in zip(*splits.values(), strict=True))
    assert (kept & held, len(kept | held)) == (set(), 15)
    assert 2 <= len(held) <= 6
    assert sum(map(len, itertools.chain(*splits.values()))) == len(series)


def test_series_shorter_than_a_window_are_counted(tmp_path: Path, flower_log: pytest.LogCaptureFixture) -> None:
    assert len(opened(write(tmp_path, long(), long()), window={"length": 5}).train) == 2
    assert "data.window leaves out 4 of 8 series" in flower_log.text


# --- The recordings of smartwatches, from the file of another package; a stand-in of the same form has known values.


SENSORS = ["ax", "ay", "az", "wx", "wy", "wz"]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray]:
    """Twenty recordings, two of each of ten persons, whose values say recording and time."""
    given = [1000.0 * number + np.arange(16)[:, None] + np.arange(6) / 10 for number in range(20)]
    content = {
        "X": given, "y": np.arange(20) % 2, "subject": 1 + np.arange(20) // 2, "X_labels": SENSORS,
        "y_labels": ["PEN", "ABD"],
    }  # fmt: skip
    folder = tmp_path / "seglearn" / "data"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").write_text("raise ImportError('it takes seconds')\n")
    np.save(folder / "watch_dataset.npy", np.array(content, object), allow_pickle=True)
    monkeypatch.syspath_prepend(tmp_path)
    return given


def keys(**changes: object) -> dict[str, object]:
    return {
        "name": "watch",
        "label": "exercise",
        "series": "recording",
        "window": {"length": 4, "overlap": 0.5},
    } | changes


def test_the_end_of_each_recording_is_for_testing(package: list[np.ndarray]) -> None:
    data = load(Source(**keys(group="person")))
    assert (data.shape, data.class_names) == ((6, 4), ("ABD", "PEN"))
    assert (len(data.train), len(data.test)) == (20 * 5, 20)
    assert data.train.inputs[5].equal(torch.from_numpy(package[1][:4].T).float())
    assert data.test.inputs[1].equal(torch.from_numpy(package[1][12:].T).float())


@pytest.mark.parametrize("seed", [0, 1, 4, 5])
def test_each_seed_has_other_persons_as_its_last_clients(package: list[np.ndarray], seed: int) -> None:
    data = Data(**keys(group="person", partition={"kind": "natural", "rotate": 2}))
    for part, rows in zip(("train", "test"), shares_of(data, 10, seed, "cpu"), strict=True):
        recordings = [getattr(load(data), part).inputs[own, 0, 0] // 2000 for own in rows]
        assert [int(own.unique()) for own in recordings] == [(client + 2 * seed) % 10 for client in range(10)]


def test_without_the_package_its_name_is_in_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", [])
    with pytest.raises(
        MissingPackage, match=r"data\.name='watch' is in the package 'seglearn': pip install seglearn=="
    ):
        load(Source(**keys()))
